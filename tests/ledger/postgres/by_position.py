"""The database as tests speak of it: by positions. The checksum at each is looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_worker_pool.core.fleet.leadership import JournalEnd, StoredEvent
from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.postgres.database import PostgresDatabase


class ByPosition(PostgresDatabase):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # The ends of its own appends.
        self.written: dict[int, JournalEnd] = {}

    async def end_at(self, position: int) -> JournalEnd:
        """The end of the journal, when it was at this position."""
        query = self._sql["crc_at"]
        crc = await self._reads.read(lambda raw: raw.fetchval(query, self.pool, position), 10.0)
        return JournalEnd(position, crc or 0)

    async def write(
        self,
        epoch: int,
        term: str,
        head: int,
        batch: str,
        events: Sequence[DurableEvent],
        ended: Sequence[EndedLease] = (),
    ) -> int | None:
        after = self.written.get(head) or await self.end_at(head)
        end = await self.append(epoch, term, after, batch, events, ended)
        if end is None:
            return None
        self.written[end.position] = end
        return end.position

    async def read(self, after: int, most: int) -> list[StoredEvent]:
        return await self.read_events(await self.end_at(after), most)

    async def snapshot(self, position: int, events: Sequence[DurableEvent]) -> None:
        await self.write_snapshot(await self.end_at(position), events)
