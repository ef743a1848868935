"""What the calls that read the history of leases have in common."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from gpu_worker_pool.core.model.lease import LiveLease
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.ledger.sqlite.accounts import Accounts
from gpu_worker_pool.server.authority.authority import Authority
from gpu_worker_pool.server.http.call import Call, Reply, not_possible
from gpu_worker_pool.server.http.problems import Refused

from .leases import RETRY_AFTER

# A long history takes seconds to read. One is read at a time, and so many may wait for their turn.
MOST_ASKING = 16


class HistoryCalls(ABC):
    """Answers GET /`name`. The history is read in a thread and by a connection of its own, so that nobody else waits."""

    name: ClassVar[str]

    def __init__(self, authority: Authority, open_accounts: Callable[[], Accounts], *, prefix: str, node: str) -> None:
        self.authority = authority
        self.node = node
        self._open_accounts = open_accounts
        self._path = f"{prefix}/{self.name}"
        self._turn = asyncio.Lock()
        self._asking = 0

    def find(self, method: str, path: str) -> Callable[[Call], Awaitable[Reply]] | None:
        """What answers this call; None where it is another one."""
        if path != self._path:
            return None
        return self.show if method == "GET" else not_possible(method, path, ("GET",))

    @abstractmethod
    async def show(self, call: Call) -> Reply:
        """Answer it."""

    async def read(self, work: Callable[[Sequence[LiveLease], Accounts], bytes]) -> bytes:
        """What `work` makes, in a thread, of the leases that are live now and the accounts; Refused where that cannot be.

        Each lease is found once: who is live now, as such; who has ended by now is written before it is read; and who
        ends in between is known by his id.
        """
        if self._asking >= MOST_ASKING:
            raise Refused(503, f"{MOST_ASKING} others ask for the same; ask again in a moment.", RETRY_AFTER)
        self._asking += 1
        try:
            async with self._turn:
                self.check_is_well()
                leases = list(self.authority.driver.state.leases.values())
                await self.authority.driver.caught_up()
                self.check_is_well()
                return await asyncio.to_thread(lambda: work(leases, self._open_accounts()))
        except JournalError as error:
            raise _not_readable(str(error)) from error
        finally:
            self._asking -= 1

    def now(self) -> float:
        """As it is written for leases: on the wall, but by a clock that is not set while the server runs."""
        driver = self.authority.driver
        return driver.now() + driver.state.wall_offset_s

    def check_is_well(self) -> None:
        """Refused while the journal is in trouble."""
        if self.authority.trouble is not None:
            raise _not_readable(self.authority.trouble)


def _not_readable(why: str) -> Refused:
    return Refused(503, f"What was used cannot be told now: {why.rstrip('.')}. Mend that, or ask later.", RETRY_AFTER)
