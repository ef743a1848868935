"""Where the history of a pool is, if this server takes part in no election: in a file of its own, or with a leader elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import time
from typing import Protocol

from gpu_worker_pool.host.state_dir import StateDirError
from gpu_worker_pool.ledger.driver import restored
from gpu_worker_pool.ledger.journal import Journal, JournalError, JournalInUse
from gpu_worker_pool.ledger.outbox import WriterThread
from gpu_worker_pool.wire.service import FleetView

from .pool import JournalSource, Pool

logger = logging.getLogger(__name__)

# How often to retry to open a journal.
TRY_AGAIN_S = 2.0
# How often to look who leads.
LOOK_S = 0.5


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


class FleetMember(Protocol):
    """A box that cannot lead its fleet."""

    @property
    def leader_url(self) -> str | None: ...

    @property
    def trouble(self) -> str | None: ...

    def view(self) -> FleetView: ...


class LedElsewhere(JournalSource):
    """The pool of such a box has no history of its own, and names the leader instead."""

    def __init__(self, pool: Pool, member: FleetMember) -> None:
        self._pool = pool
        self._member = member
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._say())
        await asyncio.sleep(0)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def view(self) -> FleetView:
        return self._member.view()

    async def _say(self) -> None:
        while True:
            url = self._member.leader_url
            why = f"this box cannot lead the fleet; ask its leader, {url}" if url else self._member.trouble
            self._pool.say_trouble(why or "this box cannot lead the fleet")
            await asyncio.sleep(LOOK_S)
