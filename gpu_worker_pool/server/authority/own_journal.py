"""The journal of a server that shares its pool with no other: a file of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import time

from gpu_worker_pool.host.state_dir import StateDirError
from gpu_worker_pool.ledger.driver import restored
from gpu_worker_pool.ledger.journal import Journal, JournalError, JournalInUse
from gpu_worker_pool.ledger.outbox import WriterThread

from .authority import Authority

logger = logging.getLogger(__name__)

# How often to retry to open a journal.
TRY_AGAIN_S = 2.0


class OwnJournal:
    def __init__(self, open_journal: Callable[[], Journal]) -> None:
        self._open_journal = open_journal
        self._opening: asyncio.Task[None] | None = None

    async def start(self, authority: Authority) -> None:
        try:
            await self._open(authority)
        except JournalInUse:
            raise
        except JournalError as error:
            logger.error("no GPU can be granted: %s", error)  # noqa: TRY400 - a traceback would not help
            authority.say_trouble(str(error))
            self._opening = asyncio.create_task(self._keep_trying(authority))

    async def stop(self) -> None:
        if self._opening is not None:
            self._opening.cancel()

    async def _open(self, authority: Authority) -> None:
        settings = authority.pool.state.settings
        journal = await asyncio.to_thread(self._open_journal)
        try:
            history = await asyncio.to_thread(journal.load, settings.remembered_ended_leases)
            state = restored(history, settings)
        except JournalError:
            journal.close()
            raise
        writer = WriterThread(journal, asyncio.get_running_loop())
        authority.lead(state, writer, pool_id=journal.pool_id, wall_clock=time)

    async def _keep_trying(self, authority: Authority) -> None:
        while True:
            await asyncio.sleep(TRY_AGAIN_S)
            try:
                await self._open(authority)
            except (JournalError, StateDirError) as error:
                authority.say_trouble(str(error))
            else:
                logger.warning("the journal is open; leases are granted from now on")
                return
