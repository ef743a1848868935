"""Getting GPUs from many places at once: the first place that can grant does, and only one grant is kept."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Any

from gpu_worker_pool.client.backends.held_lease import HeldLease
from gpu_worker_pool.client.backends.lease_backend import LeaseAnswer, LeaseBackend, NeverGranted, Over, Queued
from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.errors import (
    EndpointError,
    NoEndpointAnsweredError,
    RequestRefusedError,
    ServiceUnavailableError,
    WorkerTimeoutError,
)
from gpu_worker_pool.host.clock import boot_time

from .places import Place, Places
from .release import Releases

logger = logging.getLogger("gpu_worker_pool.client")

# How long the next place waits for the one before it to answer: a dead one must not delay a live one.
PATIENCE_S = 0.2
# A long poll is asked for this long, and then asked for again.
WAIT_S = 25.0
# A request that must not wait asks each place once, within this time.
ONE_TRY_S = 1.0
# How soon a place that could not answer is asked again.
ASK_AGAIN_S = 1.0
# After so many failures in a row the user is told, although the request goes on.
FAILURES_TO_TELL = 2
# How long a request that gives up waits for its releases; what takes longer goes on in the background.
LEAVE_S = 0.5
# A grant is new where no more than this part of its TTL can have run: a quarter of the time to a heartbeat.
NEW_PER_TTL = 12
_NUMBER = re.compile(r"-[1-9][0-9]{0,3}\Z")


@dataclass(eq=False, slots=True)
class Bid:
    """The request at one place. `queued` is the last answer while it waits there."""

    place: Place
    backend: LeaseBackend
    lease_id: str
    task: asyncio.Task[LeaseAnswer] | None = None
    queued: Queued | None = None
    # Why it is never granted there.
    refusal: str | None = None
    # Why the last call failed, and how many did in a row.
    failure: str = ""
    failures: int = 0
    ask_again_at: float = 0.0
    was_queued: bool = False
    # Whether the user has heard that it waits there.
    is_told: bool = False
    was_granted: bool = False

    @property
    def fields(self) -> dict[str, str]:
        """For a log record."""
        return {"lease_id": self.lease_id, "endpoint": self.backend.endpoint_id}

    @property
    def is_settled(self) -> bool:
        """Whether the place refused the request, answered every call, and never had the request in its queue."""
        return self.refusal is not None and self.ask_again_at == 0.0 and not (self.was_queued or self.was_granted)


def request_of(lease_id: str) -> str:
    """The request that a lease is for: it has the same id at its first place, and that id with a number at each other."""
    return _NUMBER.sub("", lease_id)


class Acquisition:
    """One request. Each place knows it by another id: one server may go by several names, and one pool have several
    servers, where an id is one lease.
    """

    def __init__(
        self,
        places: Places,
        lease_id: str,
        request: Request,
        releases: Releases,
        *,
        on_queued: Callable[[str, str, str], None],
        on_waiting: Callable[[], None],
    ) -> None:
        self._places = places
        self._request = request
        self._releases = releases
        # Called once for each queue that it enters: with the endpoint, its id there, and why it waits.
        self._on_queued = on_queued
        # Called when no place has granted it at once.
        self._on_waiting = on_waiting
        self._bids: dict[str, Bid] = {}
        self._lease_id, self._numbers = lease_id, count()
        self._was_ended = False

    async def run(self, timeout_s: float) -> HeldLease:
        """Get the GPUs, or raise: WorkerTimeoutError, ServiceUnavailableError, RequestRefusedError. However it ends, no
        lease that was requested and not kept is left behind.
        """
        began = boot_time()
        won: HeldLease | None = None
        limit = asyncio.timeout(timeout_s or ONE_TRY_S)
        try:
            async with limit:
                won = await self._race(is_patient=timeout_s > 0)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._too_late(boot_time() - began) from None
        finally:
            must_wait = self._leave_the_others(won)
            if must_wait:
                try:
                    await asyncio.wait(must_wait, timeout=LEAVE_S)
                except BaseException:
                    if won is not None:
                        self._releases.start(won.backend, won.id)  # the caller will not hear of it
                    raise
        return won

    async def _race(self, *, is_patient: bool) -> HeldLease:
        await self._places.refresh_to_choose()
        # One after the other, in the order of the strategy, as long as they answer.
        for place, endpoint in self._places.order():
            if not place.is_healthy:
                continue
            self._ask(place, endpoint)
            won = await self._next(PATIENCE_S)
            if won is not None:
                return won
        if not is_patient and not any(bid.task for bid in self._bids.values()):
            raise self._too_late(0.0)
        self._on_waiting()
        with self._places.watched():
            while True:
                self._go_on()
                won = await self._next(self._until_ask_again(), self._places.changed())
                if won is not None:
                    return won

    def _next_id(self) -> str:
        number = next(self._numbers)
        return f"{self._lease_id}-{number}" if number else self._lease_id

    def _ask(self, place: Place, endpoint: Endpoint) -> None:
        backend = place.backend(endpoint)
        bid = self._bids.get(place.key)
        if bid is None:
            bid = self._bids[place.key] = Bid(place, backend, self._next_id())
        bid.backend = backend
        self._start(bid, backend.ask(bid.lease_id, self._request))

    @staticmethod
    def _start(bid: Bid, answer: Coroutine[Any, Any, LeaseAnswer]) -> None:
        bid.task = asyncio.ensure_future(answer)

    def _go_on(self) -> None:
        """Wait at every place that has the request in its queue; ask every other one that is up."""
        now = boot_time()
        for place, endpoint in self._places.all():
            bid = self._bids.get(place.key)
            if bid is not None and (bid.task is not None or bid.refusal is not None):
                continue
            if bid is not None and bid.queued is not None:
                self._start(bid, bid.backend.wait(bid.lease_id, self._request, WAIT_S))
            elif place.is_healthy and (bid is None or now >= bid.ask_again_at):
                self._ask(place, endpoint)

    def _until_ask_again(self) -> float | None:
        now = boot_time()
        waits = [bid.ask_again_at - now for bid in self._bids.values() if bid.ask_again_at > now and not bid.queued]
        return max(min(waits), 0.01) if waits else None

    async def _next(self, timeout_s: float | None, change: asyncio.Future[None] | None = None) -> HeldLease | None:
        """Wait for answers and handle them; returns what was won."""
        waiting: set[asyncio.Future[Any]] = {bid.task for bid in self._bids.values() if bid.task is not None}
        if change is not None:
            waiting.add(change)
        done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._places.is_stopping:
            raise RuntimeError("the client was stopped while this request waited")
        won: HeldLease | None = None
        for bid in list(self._bids.values()):
            if bid.task is not None and bid.task in done:
                task, bid.task = bid.task, None
                found = await self._take_in(bid, task)
                won = won or found
        if won is None and self._is_refused():
            refused = {bid.backend.endpoint_id: bid.refusal for bid in self._bids.values() if bid.refusal is not None}
            was_granted = any(bid.was_granted for bid in self._bids.values() if bid.refusal is not None)
            raise RequestRefusedError(refused, has_granted=was_granted, was_ended=self._was_ended)
        return won

    def _is_refused(self) -> bool:
        """Whether every place that answers has refused it. One that is down would be waited for in silence, for ever."""
        refused = {key for key, bid in self._bids.items() if bid.refusal is not None}
        return bool(refused) and refused >= {place.key for place, _ in self._places.all() if place.is_healthy}

    async def _take_in(self, bid: Bid, task: asyncio.Task[LeaseAnswer]) -> HeldLease | None:
        bid.queued = None
        try:
            answer = task.result()
        except EndpointError as error:
            if error.status is not None and 300 <= error.status < 400:
                bid.refusal = error.reason
            else:
                self._fail(bid, error)
            return None
        bid.failure, bid.failures = "", 0
        match answer:
            case HeldLease():
                bid.was_granted = True
                return await self._make_sure(bid, answer)
            case Queued():
                bid.queued = answer
                bid.was_queued = True
                if not (bid.is_told or answer.is_set_aside):
                    bid.is_told = True
                    self._on_queued(bid.backend.endpoint_id, bid.lease_id, answer.reason)
            case NeverGranted():
                bid.refusal = answer.reason
                if answer.is_grant:
                    self._disbelieve(bid)
            case Over():
                self._ask_under_new_id(bid, answer)
        return None

    def _disbelieve(self, bid: Bid) -> None:
        """Use nothing that this place grants, and have it released."""
        bid.was_granted = True
        bid.refusal = f"its grant is not used, because {bid.refusal}"
        # Where no other place is left, the error says it.
        level = logging.INFO if self._is_refused() else logging.WARNING
        logger.log(level, "endpoint %s: %s", bid.backend.endpoint_id, bid.refusal, extra=bid.fields)

    def _ask_under_new_id(self, bid: Bid, over: Over) -> None:
        """Ask under another id after the lease ended under this one, unless a person ended it."""
        if over.is_final:
            bid.refusal = over.words
            self._was_ended = True
            return
        text = "lease %s ended at %s (%s); asking under another id"
        logger.info(text, bid.lease_id, bid.backend.endpoint_id, over.reason, extra=bid.fields)
        bid.lease_id = self._next_id()
        bid.was_queued = bid.is_told = False
        bid.ask_again_at = boot_time() + ASK_AGAIN_S

    async def _make_sure(self, bid: Bid, lease: HeldLease) -> HeldLease | None:
        """Renew a grant that may be old, to see whether it still stands. One that is known to be new is used at once."""
        if boot_time() - lease.safe_since > self._request.ttl_s / NEW_PER_TTL:
            try:
                renewal = await bid.backend.renew([lease.id])
            except EndpointError as error:
                self._fail(bid, error)
                return None
            if lease.id not in renewal.renewed:
                self._ask_under_new_id(bid, renewal.lost.get(lease.id, Over("unknown")))
                return None
            lease.safe_since = renewal.renewed_at
        place = bid.place
        lease.names = tuple(place.name_of(gpu.key.node) for gpu in lease.gpus)
        if place.fleet_id is not None and (home := place.endpoint_of(lease.gpus[0].key.node)) is not None:
            lease.backend = place.backend(home)  # kept alive at the box that has the GPU
        return lease

    def _fail(self, bid: Bid, error: EndpointError) -> None:
        bid.ask_again_at = boot_time() + ASK_AGAIN_S
        self._places.note_failure(error)
        bid.failure, bid.failures = error.reason, bid.failures + 1
        if bid.failures == FAILURES_TO_TELL and bid.place.is_healthy:
            text = "endpoint %s has failed this request %d times: %s; it is asked again"
            reason = error.reason.rstrip(". ")
            logger.warning(text, bid.backend.endpoint_id, bid.failures, reason, extra=bid.fields)

    def _leave_the_others(self, won: HeldLease | None) -> list[asyncio.Task[None]]:
        """Release what was requested and is not kept; returns what to wait for. This does not wait itself, so that
        nothing can happen in between.

        A second grant is released before the caller sees the first. For a place in a queue the winner need not wait; a
        request that gives up waits for all, for a while.
        """
        must_wait = []
        for bid in self._bids.values():
            task = bid.task
            if task is not None and task.done() and not task.cancelled() and task.exception() is None:
                bid.was_granted |= isinstance(task.result(), HeldLease)
            if task is not None and bid.queued is not None:
                task.cancel()  # a poll; a PUT must arrive, or it would come in after its release
            if bid.is_settled or (won is not None and won.id == bid.lease_id):
                continue
            release = self._releases.start(bid.backend, bid.lease_id, task)
            if won is None or bid.was_granted:
                must_wait.append(release)
        return must_wait

    def _too_late(self, waited_s: float) -> WorkerTimeoutError | ServiceUnavailableError:
        if not self._places.is_up:
            return NoEndpointAnsweredError(self._places.reasons(), waited_s=round(waited_s, 3))
        reasons = []
        for bid in self._bids.values():
            why = bid.refusal or bid.failure or ("" if bid.queued is None else bid.queued.reason)
            if why or bid.task is not None:
                reasons.append(f"{bid.backend.endpoint_id}: {why or 'it has not answered'}")
        return WorkerTimeoutError(waited_s=round(waited_s, 3), reason="; ".join(reasons) or "no endpoint granted it")
