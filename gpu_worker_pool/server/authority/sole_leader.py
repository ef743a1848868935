"""A box that leads its fleet with its own journal. No other can take over: while it is away, grants pause and no lease ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import time

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.model.events import Event, TakenOver
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.ledger.journal import Journal
from gpu_worker_pool.ledger.outbox import WriterThread
from gpu_worker_pool.server.leader.fleet_leader import FleetLeader
from gpu_worker_pool.wire.service import FleetView

from .journal_sources import LeadingSource, OwnJournal
from .pool import Pool

logger = logging.getLogger(__name__)

# How long a server that starts waits until it leads. A disk that is slower keeps no caller from hearing why.
FIRST_S = 5.0


class SoleLeader(OwnJournal, LeadingSource):
    """The lock of the journal is the leadership. `epoch_seen` is the highest epoch that this box has seen in a fleet: boxes
    obey no lower one.
    """

    def __init__(
        self,
        pool: Pool,
        leader: FleetLeader,
        open_journal: Callable[[], Journal],
        *,
        node: str,
        url: str,
        epoch_seen: int,
    ) -> None:
        super().__init__(pool, open_journal)
        self._leader = leader
        self._node = node
        self._url = url
        self._epoch = epoch_seen
        self._is_written = asyncio.Event()
        self._writer: WriterThread | None = None
        self._again: asyncio.Task[None] | None = None
        pool.follow(self._note)

    async def start(self) -> None:
        await super().start()
        if self._writer is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_written.wait(), FIRST_S)

    async def stop(self) -> None:
        if self._again is not None:
            self._again.cancel()
        await super().stop()

    async def _lead(self, journal: Journal, state: PoolState) -> None:
        if state.epoch == 0:
            # So far the journal was about this box alone, whatever its name was. From here on names count.
            await asyncio.to_thread(journal.compact, condense(state))
        self._epoch = max(self._epoch, state.epoch) + 1
        self._is_written.clear()
        self._writer = WriterThread(journal, asyncio.get_running_loop())
        logger.warning("this server leads the fleet from now on (epoch %d)", self._epoch)
        self._pool.lead(
            state,
            self._writer,
            pool_id=journal.pool_id,
            wall_clock=time,
            epoch=self._epoch,
            may_act=self._is_written.is_set,
        )

    def _note(self, events: Sequence[Event]) -> None:
        """Once the TakenOver of this start is written, it answers callers."""
        if any(isinstance(event, TakenOver) and event.epoch == self._epoch for event in events):
            self._is_written.set()

    def lead_later_epoch(self, epoch_seen: int) -> None:
        """Lead above what a box has seen: the journal was put back, or the box was in another fleet."""
        if self._again is None or self._again.done():
            self._epoch = max(self._epoch, epoch_seen)
            self._again = asyncio.create_task(self._lead_again(epoch_seen))

    async def _lead_again(self, epoch_seen: int) -> None:
        why = (
            f"a box has seen epoch {epoch_seen}, so the journal was put back; this server leads again in a later epoch"
        )
        logger.warning("%s", why)
        self._pool.step_down(why)
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)
        await self.start()

    def leader_url(self) -> str | None:
        return self._url if self.is_leading else None

    def goes_on_without(self) -> str:
        return "this server stops, which leads the fleet; until it is back, nothing is granted on any box, and no lease ends"

    def view(self) -> FleetView:
        return FleetView(
            id=self._pool.pool_id,
            role="leader",
            epoch=self._epoch or None,
            leader=self._node if self.is_leading else None,
            leader_url=self.leader_url(),
            lag_s=0.0 if self.is_leading else None,
            trouble=None if self.is_leading else self._pool.trouble,
        )
