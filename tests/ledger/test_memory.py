"""The journal in memory."""

from __future__ import annotations

import pytest

from gpu_worker_pool.ledger.memory import MemoryJournal
from tests.ledger.examples import ended, note
from tests.ledger.journal_contract import Opens, ReplacementContract


class TestMemoryJournalContract(ReplacementContract):
    @pytest.fixture
    def opens(self) -> Opens:
        journal = MemoryJournal()

        def again() -> MemoryJournal:
            journal.load(0)
            return journal

        return again


def test_ended_leases_are_bounded_and_the_oldest_go() -> None:
    journal = MemoryJournal(most_ended=2)

    journal.append([note(1)], [ended(lease_id) for lease_id in "abc"])

    assert [lease.id for lease in journal.load(100).ended] == ["b", "c"]
