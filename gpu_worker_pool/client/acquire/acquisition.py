"""Getting GPUs from many places at once: the first place that can grant does, and only one grant is kept."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from gpu_worker_pool.client.backends.lease_backend import (
    HeldLease,
    LeaseAnswer,
    LeaseBackend,
    NeverGranted,
    Over,
    Queued,
)
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
# After this number of failures in a row the user is told, although the request goes on.
FAILURES_TO_TELL = 2
# How long a request that gives up waits for its releases; what takes longer goes on in the background.
LEAVE_S = 0.5
# A grant is new where no more than this part of its TTL can have run: a quarter of the time to a heartbeat.
NEW_PER_TTL = 12
_NUMBER = re.compile(r"-[1-9][0-9]{0,3}\Z")


@dataclass(eq=False, slots=True)
class Bid:
    """The request at one place, and what came of it there so far."""

    place: Place
    endpoint: Endpoint
    backend: LeaseBackend
    lease_id: str
    task: asyncio.Task[None] | None = None
    # Whether a PUT is under way: it must arrive, or it would come in after its release.
    is_asking: bool = False
    # Why it waits, as its queue last said, or why it is never granted there.
    reason: str = ""
    refusal: str | None = None
    # Why the last call failed, and how many did in a row.
    failure: str = ""
    failures: int = 0
    was_granted: bool = False
    # Whether the user has heard that it waits there.
    is_told: bool = False
    # Whether it was in its queue, or a lease may be there that no answer has told of.
    is_unsure: bool = False

    @property
    def fields(self) -> dict[str, str]:
        """For a log record."""
        return {"lease_id": self.lease_id, "endpoint": self.backend.endpoint_id}


def request_of(lease_id: str) -> str:
    """The request that a lease is for: it has the same id at its first place, and that id with a number at each other."""
    return _NUMBER.sub("", lease_id)


class Acquisition:
    """One request. Each place knows it by another id: one server may go by several names, and one pool have several
    servers, where an id is one lease. At each place a task of its own asks and waits.
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
        self._is_patient = True
        # What the tasks bring, and what wakes the one that waits for it.
        self._won: HeldLease | None = None
        self._error: BaseException | None = None
        self._was_ended = False
        self._news = asyncio.Event()
        self._is_over = False

    async def run(self, timeout_s: float) -> HeldLease:
        """Get the GPUs, or raise: WorkerTimeoutError, ServiceUnavailableError, RequestRefusedError. However it ends, no
        lease that was requested and not kept is left behind.
        """
        began = boot_time()
        won: HeldLease | None = None
        limit = asyncio.timeout(timeout_s or ONE_TRY_S)
        self._is_patient = timeout_s > 0
        try:
            async with limit:
                won = await self._race()
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

    async def _race(self) -> HeldLease:
        await self._places.refresh_to_choose()
        # One after the other, in the order of the strategy, as long as they answer.
        for place, endpoint in self._places.order():
            if place.is_healthy:
                self._start(place, endpoint)
                if (won := await self._hear(PATIENCE_S)) is not None:
                    return won
        self._on_waiting()
        with self._places.watched(self._news.set):
            while True:
                if self._is_patient:
                    for place, endpoint in self._places.all():
                        if place.is_healthy:
                            self._start(place, endpoint)
                elif all(bid.task is None or bid.task.done() for bid in self._bids.values()):
                    raise self._too_late(0.0)
                if (won := await self._hear()) is not None:
                    return won

    def _start(self, place: Place, endpoint: Endpoint) -> None:
        """Have a task ask there, unless one does, or the place has refused."""
        bid = self._bids.get(place.key)
        if bid is None:
            bid = self._bids[place.key] = Bid(place, endpoint, place.backend(endpoint), self._next_id())
        elif bid.refusal is not None or not (bid.task is None or bid.task.done()):
            return
        bid.endpoint = endpoint
        bid.task = asyncio.get_running_loop().create_task(self._bid(bid))
        bid.task.add_done_callback(self._has_ended)

    def _next_id(self) -> str:
        number = next(self._numbers)
        return f"{self._lease_id}-{number}" if number else self._lease_id

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._error = self._error or task.exception()
            self._news.set()

    async def _hear(self, timeout_s: float | None = None) -> HeldLease | None:
        """Wait for news of the bids or the places; returns what was won."""
        timer = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, self._news.set)
        try:
            await self._news.wait()
        finally:
            if timer is not None:
                timer.cancel()
        self._news.clear()
        if self._places.is_stopping:
            raise RuntimeError("the client was stopped while this request waited")
        if self._won is None and self._error is not None:
            raise self._error
        if self._won is None and self._is_refused():
            refused = {bid.backend.endpoint_id: bid.refusal for bid in self._bids.values() if bid.refusal is not None}
            was_granted = any(bid.was_granted for bid in self._bids.values() if bid.refusal is not None)
            raise RequestRefusedError(refused, has_granted=was_granted, was_ended=self._was_ended)
        return self._won

    def _is_refused(self) -> bool:
        """Whether every place that answers has refused it. One that is down would be waited for in silence, for ever."""
        refused = {key for key, bid in self._bids.items() if bid.refusal is not None}
        return bool(refused) and refused >= {place.key for place, _ in self._places.all() if place.is_healthy}

    async def _bid(self, bid: Bid) -> None:
        """Ask at one place, and wait in its queue, until it grants the request, refuses it or is down."""
        answer: LeaseAnswer | EndpointError | None = None
        while bid.refusal is None:
            try:
                if isinstance(answer, Queued):
                    answer = await bid.backend.wait(bid.lease_id, self._request, WAIT_S)
                else:
                    answer = await self._ask(bid)
                if isinstance(answer, HeldLease) and not self._is_over:
                    bid.was_granted = True
                    answer = await self._make_sure(bid, answer)
            except EndpointError as error:
                answer = error
            if self._is_over:
                return
            self._take_in(bid, answer)
            self._news.set()
            if isinstance(answer, HeldLease):
                return
            if isinstance(answer, Queued) and (self._is_patient or answer.is_set_aside):
                continue
            if not self._is_patient:
                return
            if bid.refusal is None:
                await asyncio.sleep(ASK_AGAIN_S)
                if not bid.place.is_healthy:
                    return  # it is asked again when it is up

    async def _ask(self, bid: Bid) -> LeaseAnswer:
        bid.backend = bid.place.backend(bid.endpoint)
        bid.is_asking = True
        try:
            return await bid.backend.ask(bid.lease_id, self._request)
        finally:
            bid.is_asking = False

    def _take_in(self, bid: Bid, answer: LeaseAnswer | EndpointError) -> None:
        bid.reason = ""
        if isinstance(answer, EndpointError):
            self._fail(bid, answer)
            return
        bid.failure, bid.failures = "", 0
        match answer:
            case HeldLease():
                self._won = self._won or answer
            case Queued():
                bid.reason, bid.is_unsure = answer.reason, True
                if not (bid.is_told or answer.is_set_aside):
                    bid.is_told = True
                    self._on_queued(bid.backend.endpoint_id, bid.lease_id, answer.reason)
            case NeverGranted():
                bid.refusal = answer.reason
                if answer.is_grant:
                    self._disbelieve(bid)
            case Over():
                self._ask_under_new_id(bid, answer)

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
        bid.is_told, bid.is_unsure = False, True

    async def _make_sure(self, bid: Bid, lease: HeldLease) -> HeldLease | Over:
        """Renew a grant that may be old, to see whether it still stands. One that is known to be new is used at once."""
        if boot_time() - lease.safe_since > self._request.ttl_s / NEW_PER_TTL:
            renewal = await bid.backend.renew([lease.id])
            if lease.id in renewal.lost:
                return renewal.lost[lease.id]
            if lease.id not in renewal.renewed:
                # After a take-over its box may not have joined the new leader yet. The lease stands, so the id stays.
                raise bid.endpoint.error("the box that keeps the lease has not answered yet", is_temporary=True)
            lease.safe_since = renewal.renewed_at
        place, assignment = bid.place, lease.assignment
        if place.fleet_id is not None and (home := place.endpoint_of(assignment.nodes[0])) is not None:
            lease.backend = place.backend(home)  # kept alive at the box that has the GPU
            assignment.server_url = lease.backend.url
        return lease

    def _fail(self, bid: Bid, error: EndpointError) -> None:
        if error.status is not None and 300 <= error.status < 400:
            bid.refusal = error.reason
            return
        bid.is_unsure = True
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
        self._is_over = True
        must_wait = []
        for bid in self._bids.values():
            if bid.task is not None and not bid.is_asking:
                bid.task.cancel()
            is_settled = bid.refusal is not None and not (bid.is_unsure or bid.was_granted)
            if is_settled or (won is not None and won.id == bid.lease_id):
                continue
            release = self._releases.start(bid.backend, bid.lease_id, bid.task)
            if won is None or bid.was_granted:
                must_wait.append(release)
        return must_wait

    def _too_late(self, waited_s: float) -> WorkerTimeoutError | ServiceUnavailableError:
        if not self._places.is_up:
            return NoEndpointAnsweredError(self._places.reasons(), waited_s=round(waited_s, 3))
        reasons = []
        for bid in self._bids.values():
            why = bid.refusal or bid.failure or bid.reason or "it has not answered"
            reasons.append(f"{bid.backend.endpoint_id}: {why}")
        return WorkerTimeoutError(waited_s=round(waited_s, 3), reason="; ".join(reasons) or "no endpoint granted it")
