"""The common part of the calls that read past leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gpu_worker_pool.core.model.lease import LiveLease
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.ledger.sqlite.accounts import Accounts
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.http.problems import RETRY_AFTER, Refused

# A long history takes seconds to read. One call reads at a time, and so many may wait.
MOST_ASKING = 16


class PastLeases:
    """Reads past leases in a thread, with a connection of its own, so that no other call waits."""

    def __init__(self, pool: Pool, open_accounts: Callable[[], Accounts]) -> None:
        self._pool = pool
        self._open_accounts = open_accounts
        self._turn = asyncio.Lock()
        self._asking = 0

    async def read(self, work: Callable[[Sequence[LiveLease], Accounts], bytes]) -> bytes:
        """Run `work` in a thread, on the live leases and the accounts; Refused if they cannot be read.

        Each lease is found once: leases that are live now are passed as live, those that have ended are written before
        the read, and those that end in between are recognized by their id.
        """
        if self._asking >= MOST_ASKING:
            raise Refused(
                503, f"{MOST_ASKING} such calls wait already, which is the limit; ask again in a moment.", RETRY_AFTER
            )
        self._asking += 1
        try:
            async with self._turn:
                self.check_journal()
                leases = list(self._pool.state.leases.values())
                await self._pool.caught_up()
                self.check_journal()
                return await asyncio.to_thread(lambda: work(leases, self._open_accounts()))
        except JournalError as error:
            raise _not_readable(str(error)) from error
        finally:
            self._asking -= 1

    def check_journal(self) -> None:
        """Raise Refused while the journal is in trouble."""
        if self._pool.trouble is not None:
            raise _not_readable(self._pool.trouble)


def _not_readable(why: str) -> Refused:
    return Refused(503, f"The past leases cannot be read now: {why.rstrip('.')}. Fix that, or ask later.", RETRY_AFTER)
