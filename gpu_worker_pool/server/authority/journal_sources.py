"""Where the history of a pool is, if this server takes part in no election: in a file of its own, or with a leader elsewhere."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from time import time

from gpu_worker_pool.core.fleet.boxes import BoxInfo
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.host.state_dir import StateDirError
from gpu_worker_pool.ledger.driver import restored
from gpu_worker_pool.ledger.journal import Journal, JournalError, JournalInUse
from gpu_worker_pool.ledger.outbox import WriterThread
from gpu_worker_pool.server.agent.link import BoxLink
from gpu_worker_pool.server.leader.fleet_leader import FleetLeader
from gpu_worker_pool.wire.service import FleetView

from .pool import Pool

logger = logging.getLogger(__name__)

# How often to retry to open a journal.
TRY_AGAIN_S = 2.0


class JournalSource(ABC):
    """Where the history of the pool is. It lets the pool lead once that is known, if this server is to lead."""

    @abstractmethod
    async def start(self) -> None:
        """Begin. JournalInUse or StateDirError if the server must not run at all."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop. The driver is closed already."""

    def view(self) -> FleetView | None:
        """What is known of the fleet that this server belongs to."""
        return None

    def goes_on_without(self) -> str | None:
        """What becomes of the fleet while this server is away, if no other can lead it."""
        return None

    def lead_later_epoch(self, epoch_seen: int) -> None:  # noqa: B027 - only candidates lead
        """A box of the fleet has seen this epoch, which is above the leader's."""


class LeadingSource(JournalSource):
    """The source of a server that can lead its fleet: it also tells the agent of its box what it knows of the leader."""

    _pool: Pool
    _leader: FleetLeader

    @property
    def is_leading(self) -> bool:
        return self._leader.is_leading

    @property
    def trouble(self) -> str | None:
        return self._pool.trouble

    @property
    def box_infos(self) -> Mapping[str, BoxInfo]:
        return self._leader.boxes

    def link_to(self, node: str) -> BoxLink | None:
        return self._leader.link_to(node) if self.is_leading else None

    def stand_back(self) -> None:
        """Claim nothing for a while: a leader that lives has another key."""


class OwnJournal(JournalSource):
    """The journal of a server that shares its pool with no other."""

    def __init__(self, pool: Pool, open_journal: Callable[[], Journal]) -> None:
        self._pool = pool
        self._open_journal = open_journal
        self._opening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        try:
            await self._open()
        except JournalInUse:
            raise
        except JournalError as error:
            logger.error("no GPU can be granted: %s", error)  # noqa: TRY400 - a traceback would not help
            self._pool.say_trouble(str(error))
            self._opening = asyncio.create_task(self._keep_trying())

    async def stop(self) -> None:
        if self._opening is not None:
            self._opening.cancel()

    async def _open(self) -> None:
        settings = self._pool.state.settings
        journal = await asyncio.to_thread(self._open_journal)
        try:
            history = await asyncio.to_thread(journal.load, settings.remembered_ended_leases)
            state = restored(history, settings)
        except JournalError:
            journal.close()
            raise
        await self._lead(journal, state)

    async def _lead(self, journal: Journal, state: PoolState) -> None:
        writer = WriterThread(journal, asyncio.get_running_loop())
        self._pool.lead(state, writer, pool_id=journal.pool_id, wall_clock=time)

    async def _keep_trying(self) -> None:
        while True:
            await asyncio.sleep(TRY_AGAIN_S)
            try:
                await self._open()
            except (JournalError, StateDirError) as error:
                self._pool.say_trouble(str(error))
            else:
                logger.warning("the journal is open; leases are granted from now on")
                return


class LedElsewhere(JournalSource):
    """The pool of a box that cannot lead its fleet has no history of its own. `view_fleet` is what its agent knows."""

    def __init__(self, pool: Pool, view_fleet: Callable[[], FleetView]) -> None:
        self._pool = pool
        self._view_fleet = view_fleet

    async def start(self) -> None:
        self._pool.say_trouble("this box cannot lead its fleet")

    async def stop(self) -> None:
        """Nothing runs."""

    def view(self) -> FleetView:
        return self._view_fleet()
