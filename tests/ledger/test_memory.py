"""The journal in memory, with which the driver is tested, keeps the promises of a real one."""

from __future__ import annotations

import pytest

from tests.ledger.journal_contract import Opens, ReplacementContract
from tests.ledger.memory import MemoryJournal


class TestMemoryJournalContract(ReplacementContract):
    @pytest.fixture
    def opens(self) -> Opens:
        journal = MemoryJournal()

        def again() -> MemoryJournal:
            journal.load(0)
            return journal

        return again
