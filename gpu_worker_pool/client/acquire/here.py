"""A request in the thread of a caller that blocks: asked, waited for and granted without the loop.

That spares the way to the loop's thread and back. It is for one endpoint whose server is on this machine. What it cannot
finish goes on in the loop, under the same id and with the last answer.
"""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker_pool.client.backends.lease_book import Granted, LeaseAnswer, Queued
from gpu_worker_pool.client.endpoints.known_endpoints import KnownEndpoints
from gpu_worker_pool.client.endpoints.member import Place
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.host.clock import boot_time

from .acquisition import ONE_TRY_S, WAIT_S, Won, is_new

# The server may hold its first answer so long: most requests in a short queue need no second call. The user hears of a
# longer wait after this time, and a caller that is interrupted waits no longer for the answer.
HOLD_S = 1.0
# The first answer comes in this part of the timeout at the latest, so that a request that is too late can say why.
HOLDS_PER_TIMEOUT = 2


class RequestHere:
    def __init__(self, place: Place, lease_id: str, request: Request, timeout_s: float) -> None:
        self.place, self.book = place, place.member.server_leases
        self.lease_id, self._request, self._timeout_s = lease_id, request, timeout_s
        self.began = boot_time()
        # The last answer, or why there was none; None before the first, and where none came in time.
        self.last: LeaseAnswer | EndpointError | None = None
        self.has_queued = False

    def run(self, known: KnownEndpoints, on_queued: Callable[[str, str, str], None]) -> Won | None:
        """The GPUs; None where it goes on in the loop."""
        until, endpoint = self.began + (self._timeout_s or ONE_TRY_S), self.place.member.endpoint
        try:
            hold_s = min(HOLD_S, self._timeout_s / HOLDS_PER_TIMEOUT)
            answer = self.last = endpoint.run_here(self.book.ask(self.lease_id, self._request, hold_s), until)
            while isinstance(answer, Queued) and self._timeout_s > 0 and not known.is_stopping:
                if not self.has_queued and not answer.is_set_aside:
                    self.has_queued = True
                    on_queued(self.place.id, self.lease_id, answer.reason)
                wait_s = max(min(until - boot_time(), WAIT_S), 0.0)
                waiting = self.book.wait(self.lease_id, self._request, wait_s)
                answer = self.last = endpoint.run_here(waiting, until)
        except TimeoutError:
            return None
        except EndpointError as error:
            self.last = error
            return None
        since = is_new(answer, self._request) if isinstance(answer, Granted) else None
        if not isinstance(answer, Granted) or since is None or known.is_stopping:
            return None
        return Won(self.place, self.book, self.lease_id, answer, since)

    async def go_on(self) -> LeaseAnswer:
        """The answer to its last call, in the loop."""
        last, self.last = self.last, None
        if isinstance(last, EndpointError):
            raise last
        return await self.book.ask(self.lease_id, self._request) if last is None else last
