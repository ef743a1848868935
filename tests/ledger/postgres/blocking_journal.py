"""A fleet's database as a journal of one process that blocks, for the contract of all journals."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import uuid4

from gpu_worker_pool.core.fleet.leadership import BEGINNING
from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.journal import History
from gpu_worker_pool.ledger.postgres.database import PostgresDatabase


class BlockingJournal:
    """Leads from the beginning to `close`, which hands over."""

    def __init__(self, runner: asyncio.Runner, url: str, pool: str) -> None:
        self._runner = runner
        self._database: PostgresDatabase = self._runner.run(_opened(url, pool))
        self._term = uuid4().hex
        row = self._runner.run(self._database.claim(self._term, "test", "http://test", 0))
        assert row is not None
        self._epoch, self._end = row.epoch, row.end
        snapshot = self._runner.run(self._database.load_snapshot())
        self._compacted_to = 0 if snapshot is None else snapshot.end.position
        self._is_closed = False

    @property
    def pool_id(self) -> str:
        return self._database.pool_id

    def load(self, most_ended: int) -> History:
        return self._runner.run(self._load(most_ended))

    def append(self, events: Sequence[DurableEvent], ended: Sequence[EndedLease]) -> None:
        end = self._runner.run(self._database.append(self._epoch, self._term, self._end, uuid4().hex, events, ended))
        assert end is not None and end.position == self._end.position + len(events)  # noqa: PT018
        self._end = end

    def compact(self, events: Sequence[DurableEvent]) -> None:
        self._runner.run(self._database.write_snapshot(self._end, events))
        self._compacted_to = self._end.position

    def replace_damaged(self, events: Sequence[DurableEvent]) -> None:
        raise NotImplementedError

    @property
    def events_since_compaction(self) -> int:
        return self._end.position - self._compacted_to

    @property
    def bytes_since_compaction(self) -> int:
        return 0

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._runner.run(self._database.hand_over(self._epoch, self._term))
            self._runner.run(self._database.close())

    def __repr__(self) -> str:
        return f"<BlockingJournal {self._database!r}: {self.events_since_compaction} events>"

    async def _load(self, most_ended: int) -> History:
        snapshot = await self._database.load_snapshot()
        end, events = (BEGINNING, ()) if snapshot is None else (snapshot.end, snapshot.events)
        later = []
        while some := await self._database.read_events(end, 7):
            later += [stored.event for stored in some]
            end = some[-1].end
        return History((*events, *later), await self._database.load_ended(most_ended))


async def _opened(url: str, pool: str) -> PostgresDatabase:
    database = PostgresDatabase(url, pool)
    await database.open()
    return database
