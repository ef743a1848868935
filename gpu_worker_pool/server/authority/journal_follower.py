"""The pool as the journal of the fleet has it: a candidate reads it from its last snapshot, and follows what is written since."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.fleet.following import MOST_AT_ONCE, Following
from gpu_worker_pool.core.fleet.leadership import LeaderRow, why_lost
from gpu_worker_pool.core.model.events import Event
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.ledger.driver import restore
from gpu_worker_pool.ledger.journal import HistoryChanged

if TYPE_CHECKING:
    from gpu_worker_pool.ledger.postgres.database import PostgresDatabase

logger = logging.getLogger(__name__)

# Events of a snapshot that are applied at once.
EVENTS_AT_ONCE = 500


class JournalFollower:
    """`on_events` is called with the row and the events of it, each time that some were applied."""

    def __init__(
        self,
        database: PostgresDatabase,
        settings: PoolSettings,
        on_events: Callable[[LeaderRow, Sequence[Event]], None],
    ) -> None:
        self._database = database
        self._settings = settings
        self._on_events = on_events
        self.following = Following()
        self.state = PoolState()

    async def catch_up(self, row: LeaderRow) -> None:
        """Apply what the journal has up to the end that this row tells. JournalError if it cannot be read."""
        following = self.following
        if following.misses(row.end):
            # The row may be older than what was read since it was asked for.
            row = await self._database.read_leader()
            if following.misses(row.end):
                lost = why_lost(row.end, following.end)
                logger.error("%s", lost)
                following.reload(lost)
        while following.is_behind(row.end):
            if following.reload_because is not None:
                logger.info("reading the journal from its last snapshot: %s", following.reload_because)
                await self._load_snapshot()
            else:
                try:
                    stored = await self._database.read_events(following.end, MOST_AT_ONCE)
                except HistoryChanged as error:
                    following.reload(str(error))
                    continue
                fresh = [each.event for each in stored]
                restore(self.state, fresh)
                following.take(stored)
                self._on_events(row, fresh)
            await asyncio.sleep(0)

    async def _load_snapshot(self) -> None:
        snapshot = await self._database.load_snapshot()
        ended = await self._database.load_ended(self._settings.remembered_ended_leases)
        state = PoolState(settings=self._settings)
        state.ended.update((lease.id, lease) for lease in ended)
        events = () if snapshot is None else snapshot.events
        # In parts: to apply all at once would hold the event loop for long.
        for first in range(0, len(events), EVENTS_AT_ONCE):
            restore(state, events[first : first + EVENTS_AT_ONCE])
            await asyncio.sleep(0)
        self.state = state
        self.following.loaded(snapshot)

    async def write_snapshot_if_due(self) -> None:
        if self.following.is_snapshot_due(is_leader=False):
            end = self.following.end
            await self._database.write_snapshot(end, condense(self.state))
            self.following.snapshot_known(end.position)
