"""Getting GPUs from many endpoints at once: the first endpoint that can grant does, and only one grant is kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from gpu_worker_pool.client.backends.lease_book import (
    Granted,
    LeaseAnswer,
    LeaseBook,
    NeverGranted,
    NotBelieved,
    Over,
    Queued,
)
from gpu_worker_pool.client.endpoints.known_endpoints import KnownEndpoints
from gpu_worker_pool.client.endpoints.member import Place
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.errors import (
    EndpointError,
    NoEndpointAnsweredError,
    RequestRefusedError,
    ServiceUnavailableError,
    WorkerTimeoutError,
)
from gpu_worker_pool.host.clock import boot_time

from .tally import Tally

if TYPE_CHECKING:
    from .here import RequestHere

logger = logging.getLogger("gpu_worker_pool.client")

# How long the next endpoint waits for the one before it to answer: a dead one must not delay a live one.
PATIENCE_S = 0.2
# A long poll is asked for this long, and then asked for again.
WAIT_S = 25.0
# A request that must not wait asks each endpoint once, within this time.
ONE_TRY_S = 1.0
# How soon an endpoint that could not answer is asked again.
ASK_AGAIN_S = 1.0
# After so many failures in a row the user is told, although the request goes on.
FAILURES_TO_TELL = 2
# How long a request that gives up waits for its releases; what takes longer goes on in the background.
LEAVE_S = 0.5
# A grant is new where no more than this part of its TTL can have run: a quarter of the time to a heartbeat.
NEW_PER_TTL = 12


class Leave(Protocol):
    """Releases a lease in the background, once the call that is still under way for it has ended."""

    def __call__(
        self, book: LeaseBook, lease_id: str, under_way: asyncio.Task[LeaseAnswer] | None, *, kept_in: str | None = None
    ) -> asyncio.Task[None]: ...


@dataclass(frozen=True, slots=True)
class Won:
    """A grant, and where it is kept alive."""

    place: Place
    book: LeaseBook
    lease_id: str
    grant: Granted
    safe_since: float


def is_new(grant: Granted, request: Request) -> float | None:
    """Since when its TTL can have run at the most, if it is known to be new; None where it has to be made sure of."""
    since = grant.safe_since
    return since if since is not None and boot_time() - since <= request.ttl_s / NEW_PER_TTL else None


class Acquisition:
    def __init__(
        self,
        known: KnownEndpoints,
        lease_id: str,
        request: Request,
        leave: Leave,
        tally: Tally,
        *,
        on_queued: Callable[[str, str, str], None],
        begun: RequestHere | None = None,
    ) -> None:
        self._known = known
        self._lease_id = lease_id
        self._request = request
        self._leave = leave
        self._tally = tally
        self._begun = begun
        # Called once for each queue that it enters: with the endpoint, its id there, and why it waits.
        self._on_queued = on_queued
        self._told: set[tuple[str, str]] = set()
        self._tasks: dict[asyncio.Task[LeaseAnswer], tuple[Place, LeaseBook]] = {}
        self._asked: dict[str, tuple[Place, LeaseBook]] = {}
        self._granted_at: set[str] = set()
        # The same id everywhere, except where that lease has ended and another one takes its place.
        self._ids: dict[str, str] = {}
        self._numbers = count(1)
        # Ids under which it is asked for no more. A box of a fleet may bring such a lease back.
        self._given_up: list[tuple[LeaseBook, str]] = []
        self._waiting_at: dict[str, Queued] = {}
        self._refused: dict[str, str] = {}
        # How often each endpoint has failed in a row, and why at last.
        self._failures: dict[str, tuple[int, str]] = {}
        self._was_ended = False
        self._ask_again_at: dict[str, float] = {}
        if begun is not None:
            self._asked[begun.place.key] = (begun.place, begun.book)
            if begun.has_queued:
                self._told.add((begun.place.key, lease_id))
            if isinstance(begun.last, Queued):
                self._waiting_at[begun.place.key] = begun.last

    async def run(self, timeout_s: float) -> Won:
        """Get the GPUs, or raise: WorkerTimeoutError, ServiceUnavailableError, RequestRefusedError. However it ends, no
        lease that was requested and not kept is left behind.
        """
        began = boot_time() if self._begun is None else self._begun.began
        won: Won | None = None
        limit = asyncio.timeout(max(began + (timeout_s or ONE_TRY_S) - boot_time(), 0.0))
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
                        self._leave(won.book, won.lease_id, None)  # the caller will not hear of it
                    raise
        return won

    async def _race(self, *, is_patient: bool) -> Won:
        # One after the other, in the order of the strategy, as long as they answer.
        for place in self._known.order():
            if not place.is_healthy:
                continue
            self._start(place, self._ask(place))
            won = await self._next(PATIENCE_S)
            if won is not None:
                return won
        if not is_patient and not self._tasks:
            raise self._too_late(0.0)
        self._tally.waiting.add(self._lease_id)
        while True:
            self._go_on()
            won = await self._next(self._until_ask_again(), self._known.changed())
            if won is not None:
                return won

    def _is_refused(self) -> bool:
        return self._refused.keys() >= {place.key for place in self._known.places()}

    def _start(self, place: Place, answer: Coroutine[Any, Any, LeaseAnswer]) -> None:
        task = asyncio.ensure_future(answer)
        self._tasks[task] = (place, place.book)

    async def _ask(self, place: Place) -> LeaseAnswer:
        book = place.book
        if any(self._is_other_box(place, asked) for asked, _ in self._asked.values()):
            # In one pool an id is one request, and this one is for the GPUs of another box.
            self._ids.setdefault(place.key, f"{self._lease_id}-{next(self._numbers)}")
        self._asked[place.key] = (place, book)
        if self._begun is not None and self._begun.place.key == place.key:
            begun, self._begun = self._begun, None
            return await begun.go_on()
        return await book.ask(self._id_at(place), self._request)

    @staticmethod
    def _is_other_box(place: Place, asked: Place) -> bool:
        """Whether these are two boxes of one pool, and each is asked for its own GPUs."""
        one, other = place.seen, asked.seen
        is_same_pool = one.pool_id is not None and one.pool_id == other.pool_id
        is_same_box = (one.server_id, one.node) == (other.server_id, other.node)
        return is_same_pool and not is_same_box and place.fleet is None and asked.fleet is None

    def _id_at(self, place: Place) -> str:
        return self._ids.get(place.key, self._lease_id)

    def _go_on(self) -> None:
        """Wait at every endpoint that has the request in its queue; ask every other one that is up."""
        busy = {place.key for place, _ in self._tasks.values()}
        now = boot_time()
        for place in self._known.places():
            if place.key in busy or place.key in self._refused:
                continue
            if place.key in self._waiting_at:
                self._start(place, self._asked[place.key][1].wait(self._id_at(place), self._request, WAIT_S))
            elif place.is_healthy and now >= self._ask_again_at.get(place.key, now):
                self._start(place, self._ask(place))

    def _until_ask_again(self) -> float | None:
        now = boot_time()
        waits = [at - now for id_, at in self._ask_again_at.items() if at > now and id_ not in self._waiting_at]
        return max(min(waits), 0.01) if waits else None

    async def _next(self, timeout_s: float | None, change: asyncio.Future[None] | None = None) -> Won | None:
        """Wait for answers and handle them; returns what was won."""
        waiting: set[asyncio.Future[Any]] = {*self._tasks}
        if change is not None:
            waiting.add(change)
        done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._known.is_stopping:
            raise RuntimeError("the client was stopped while this request waited")
        won: Won | None = None
        for task in [task for task in self._tasks if task in done]:
            place, book = self._tasks.pop(task)
            found = await self._take_in(task, place, book)
            won = won or found
        if won is None and self._is_refused():
            has_granted = self._granted_at & self._refused.keys() != set()
            refused = {self._name_of(key): reason for key, reason in self._refused.items()}
            raise RequestRefusedError(refused, has_granted=has_granted, was_ended=self._was_ended)
        return won

    def _name_of(self, key: str) -> str:
        """The endpoint that was asked there."""
        return self._asked[key][0].id

    async def _take_in(self, task: asyncio.Task[LeaseAnswer], place: Place, book: LeaseBook) -> Won | None:
        self._waiting_at.pop(place.key, None)
        try:
            answer = task.result()
        except EndpointError as error:
            if error.status is not None and 300 <= error.status < 400:
                self._refused[place.key] = error.reason
            else:
                self._fail(place, error)
            return None
        self._failures.pop(place.key, None)
        match answer:
            case Granted():
                self._granted_at.add(place.key)
                return await self._make_sure(place, book, answer)
            case Queued():
                self._waiting_at[place.key] = answer
                lease_id = self._id_at(place)
                if (place.key, lease_id) not in self._told and not answer.is_set_aside:
                    self._told.add((place.key, lease_id))
                    self._on_queued(place.id, lease_id, answer.reason)
            case NeverGranted():
                self._refused[place.key] = answer.reason
            case NotBelieved():
                self._disbelieve(place, answer.reason)
            case Over():
                self._ask_under_new_id(place, book, answer)
        return None

    def _disbelieve(self, place: Place, reason: str) -> None:
        """Use nothing that this endpoint grants, and have it released."""
        self._granted_at.add(place.key)
        self._refused[place.key] = f"its grant is not used, because {reason}"
        fields = {"lease_id": self._id_at(place), "endpoint": place.id}
        # Where no other endpoint is left, the error says it.
        level = logging.INFO if self._is_refused() else logging.WARNING
        logger.log(level, "endpoint %s: %s", place.id, self._refused[place.key], extra=fields)

    def _ask_under_new_id(self, place: Place, book: LeaseBook, over: Over) -> None:
        """Ask under another id after the lease ended under this one, unless a person ended it."""
        if over.is_final:
            self._refused[place.key] = over.words
            self._was_ended = True
            return
        ended_id = self._id_at(place)
        fields = {"lease_id": ended_id, "endpoint": place.id}
        logger.info("lease %s ended at %s (%s); asking under another id", ended_id, place.id, over.reason, extra=fields)
        if book.needs_heartbeat:
            self._given_up.append((book, ended_id))
        self._ids[place.key] = f"{self._lease_id}-{next(self._numbers)}"
        self._ask_again_at[place.key] = boot_time() + ASK_AGAIN_S

    async def _make_sure(self, place: Place, book: LeaseBook, grant: Granted) -> Won | None:
        """Renew a grant that may be old, to see whether it still stands. One that is known to be new is used at once."""
        if (since := is_new(grant, self._request)) is not None:
            return self._won(place, book, self._id_at(place), grant, since)
        lease_id = self._id_at(place)
        try:
            renewal = await book.renew([lease_id])
        except EndpointError as error:
            self._fail(place, error)
            return None
        if lease_id in renewal.renewed:
            return self._won(place, book, lease_id, grant, renewal.renewed_at)
        self._ask_under_new_id(place, book, renewal.lost.get(lease_id, Over("unknown")))
        return None

    @staticmethod
    def _won(place: Place, book: LeaseBook, lease_id: str, grant: Granted, since: float) -> Won:
        if place.fleet is None:
            return Won(place, book, lease_id, grant, since)
        home = place.home(grant.gpus[0].key.node)
        return Won(home, home.book, lease_id, grant, since)

    def _fail(self, place: Place, error: EndpointError) -> None:
        self._ask_again_at[place.key] = boot_time() + ASK_AGAIN_S
        self._known.note_failure(error)
        times = self._failures.get(place.key, (0, ""))[0] + 1
        self._failures[place.key] = (times, error.reason)
        if times == FAILURES_TO_TELL and place.is_healthy:
            fields = {"lease_id": self._id_at(place), "endpoint": place.id}
            text = "endpoint %s has failed this request %d times: %s; it is asked again"
            logger.warning(text, place.id, times, error.reason.rstrip(". "), extra=fields)

    def _leave_the_others(self, won: Won | None) -> list[asyncio.Task[None]]:
        """Release what was requested and is not kept; returns what to wait for. This does not wait itself, so that
        nothing can happen in between.

        A second grant is released before the caller sees the first. For a place in a queue the winner need not wait; a
        request that gives up waits for all, for a while.
        """
        under_way = {place.key: task for task, (place, _) in self._tasks.items()}
        for id_, task in under_way.items():
            if task.done() and not task.cancelled() and task.exception() is None and isinstance(task.result(), Granted):
                self._granted_at.add(id_)
            if id_ in self._waiting_at:
                task.cancel()  # a poll; a PUT must arrive, or it would come in after its release
        leaving = {
            place.key: self._leave(
                book, self._id_at(place), under_way.get(place.key), kept_in=self._kept_in(won, place)
            )
            for place, book in self._asked.values()
            if not (self._has_nothing_of_ours(place) or (won is not None and self._is_won_at(won, place)))
        }
        for book, lease_id in self._given_up:
            if won is None or lease_id != won.lease_id:  # which may be the same server by another name
                self._leave(book, lease_id, None)
        return [task for id_, task in leaving.items() if won is None or id_ in self._granted_at]

    def _has_nothing_of_ours(self, place: Place) -> bool:
        """Whether the endpoint refused the request, answered every call, and never had the request in its queue."""
        has_queued = any(id_ == place.key for id_, _ in self._told)
        has_answered = place.key in self._refused and place.key not in self._ask_again_at
        return has_answered and not has_queued and place.key not in self._granted_at

    def _is_won_at(self, won: Won, place: Place) -> bool:
        """Whether this is where the lease was won: one server may go by several names, one pool may have several servers,
        and one id there is one lease.
        """
        if place.key == won.place.key:
            return True
        if self._id_at(place) != won.lease_id:
            return False
        one, other = place.seen, won.place.seen
        is_same_pool = one.pool_id is not None and one.pool_id in (other.pool_id, won.grant.pool_id)
        return is_same_pool or (one.server_id is not None and one.server_id == other.server_id)

    def _kept_in(self, won: Won | None, place: Place) -> str | None:
        """The pool in which the id that is to be released here is a lease that is kept."""
        return won.grant.pool_id if won is not None and self._id_at(place) == won.lease_id else None

    def _too_late(self, waited_s: float) -> WorkerTimeoutError | ServiceUnavailableError:
        if not self._known.is_up:
            return NoEndpointAnsweredError(self._known.reasons(), waited_s=round(waited_s, 3))
        why = {key: queued.reason for key, queued in self._waiting_at.items()} | self._refused
        why |= {key: reason for key, (_, reason) in self._failures.items() if key not in self._refused}
        silent = sorted(place.key for place, _ in self._tasks.values() if place.key not in why)
        why |= dict.fromkeys(silent, "it has not answered")
        reasons = [f"{self._name_of(key)}: {reason}" for key, reason in why.items()]
        return WorkerTimeoutError(waited_s=round(waited_s, 3), reason="; ".join(reasons) or "no endpoint granted it")
