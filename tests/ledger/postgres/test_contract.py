"""The journal of a fleet keeps what every journal promises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.ledger.journal_contract import JournalContract, Opens
from tests.ledger.postgres.blocking_journal import BlockingJournal


class TestPostgresContract(JournalContract):
    @pytest.fixture
    def opens(self, shared_url: str, pool: str) -> Iterator[Opens]:
        with asyncio.Runner() as runner:
            yield lambda: BlockingJournal(runner, shared_url, pool)
