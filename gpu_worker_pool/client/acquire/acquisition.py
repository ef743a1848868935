"""Getting GPUs from many endpoints at once: the first endpoint that can grant does, and only one grant is kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Any

from gpu_worker_pool.client.backends.lease_book import (
    Granted,
    LeaseAnswer,
    LeaseBook,
    NeverGranted,
    NotBelieved,
    Over,
    Queued,
)
from gpu_worker_pool.client.endpoints.fleet import Fleet, Member
from gpu_worker_pool.client.inherited_lease import InheritedLease
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


# Releases a lease in the background, once the call that is still under way for it has ended.
Leave = Callable[[LeaseBook, str, "asyncio.Task[LeaseAnswer] | None"], "asyncio.Task[None]"]


@dataclass(frozen=True, slots=True)
class Won:
    member: Member
    book: LeaseBook
    lease_id: str
    grant: Granted
    safe_since: float


class Acquisition:
    def __init__(
        self,
        fleet: Fleet,
        lease_id: str,
        request: Request,
        leave: Leave,
        tally: Tally,
        *,
        inside: InheritedLease | None = None,
        on_queued: Callable[[str, str, str], None],
    ) -> None:
        self._fleet = fleet
        self._lease_id = lease_id
        self._request = request
        self._leave = leave
        self._tally = tally
        # The endpoints that may be asked. Inside a lease that is the one which knows the lease.
        self._members = fleet.members
        if inside is not None:
            known = [member for member in fleet.members.values() if inside.is_at(member.endpoint.url)]
            self._members = {member.id: member for member in known[:1]}
        # Called once for each queue that it enters: with the endpoint, its id there, and why it waits.
        self._on_queued = on_queued
        self._told: set[tuple[str, str]] = set()
        self._tasks: dict[asyncio.Task[LeaseAnswer], tuple[Member, LeaseBook]] = {}
        self._asked: dict[str, tuple[Member, LeaseBook]] = {}
        self._granted_at: set[str] = set()
        # The same id everywhere, except where that lease has ended and another one takes its place.
        self._ids: dict[str, str] = {}
        self._numbers = count(1)
        self._waiting_at: dict[str, Queued] = {}
        self._refused: dict[str, str] = {}
        # How often each endpoint has failed in a row, and why at last.
        self._failures: dict[str, tuple[int, str]] = {}
        self._was_ended = False
        self._ask_again_at: dict[str, float] = {}

    async def run(self, timeout_s: float) -> Won:
        """Get the GPUs, or raise: WorkerTimeoutError, ServiceUnavailableError, RequestRefusedError. However it ends, no
        lease that was requested and not kept is left behind.
        """
        began = boot_time()
        won: Won | None = None
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
                        self._leave(won.book, won.lease_id, None)  # the caller will not hear of it
                    raise
        return won

    async def _race(self, *, is_patient: bool) -> Won:
        # One after the other, in the order of the strategy, as long as they answer.
        for member in self._fleet.order():
            if member.id not in self._members:
                continue
            self._start(member, self._ask(member))
            won = await self._next(PATIENCE_S)
            if won is not None:
                return won
        if not is_patient and not self._tasks:
            raise self._too_late(0.0)
        self._tally.waiting.add(self._lease_id)
        while True:
            self._go_on()
            won = await self._next(self._until_ask_again(), self._fleet.changed())
            if won is not None:
                return won

    def _start(self, member: Member, answer: Coroutine[Any, Any, LeaseAnswer]) -> None:
        task = asyncio.ensure_future(answer)
        self._tasks[task] = (member, member.book)

    async def _ask(self, member: Member) -> LeaseAnswer:
        book = member.book
        self._asked[member.id] = (member, book)
        return await book.ask(self._id_at(member), self._request)

    def _id_at(self, member: Member) -> str:
        return self._ids.get(member.id, self._lease_id)

    def _go_on(self) -> None:
        """Wait at every endpoint that has the request in its queue; ask every other one that is up."""
        busy = {member.id for member, _ in self._tasks.values()}
        now = boot_time()
        for member in self._members.values():
            if member.id in busy or member.id in self._refused:
                continue
            if member.id in self._waiting_at:
                self._start(member, self._asked[member.id][1].wait(self._id_at(member), self._request, WAIT_S))
            elif member.endpoint.is_healthy and now >= self._ask_again_at.get(member.id, now):
                self._start(member, self._ask(member))

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
        if self._fleet.is_stopping:
            raise RuntimeError("the client was stopped while this request waited")
        won: Won | None = None
        for task in [task for task in self._tasks if task in done]:
            member, book = self._tasks.pop(task)
            found = await self._take_in(task, member, book)
            won = won or found
        if won is None and self._refused.keys() >= self._members.keys():
            has_granted = self._granted_at & self._refused.keys() != set()
            raise RequestRefusedError(self._refused, has_granted=has_granted, was_ended=self._was_ended)
        return won

    async def _take_in(self, task: asyncio.Task[LeaseAnswer], member: Member, book: LeaseBook) -> Won | None:
        self._waiting_at.pop(member.id, None)
        try:
            answer = task.result()
        except EndpointError as error:
            if error.status is not None and 300 <= error.status < 400:
                self._refused[member.id] = error.reason
            else:
                self._fail(member, error)
            return None
        self._failures.pop(member.id, None)
        match answer:
            case Granted():
                self._granted_at.add(member.id)
                return await self._make_sure(member, book, answer)
            case Queued():
                self._waiting_at[member.id] = answer
                place = (member.id, self._id_at(member))
                if place not in self._told:
                    self._told.add(place)
                    self._on_queued(*place, answer.reason)
            case NeverGranted():
                self._refused[member.id] = answer.reason
            case NotBelieved():
                self._disbelieve(member, answer.reason)
            case Over():
                self._ask_under_new_id(member, answer)
        return None

    def _disbelieve(self, member: Member, reason: str) -> None:
        """Use nothing that this endpoint grants, and have it released."""
        self._granted_at.add(member.id)
        self._refused[member.id] = f"its grant is not used, because {reason}"
        fields = {"lease_id": self._id_at(member), "endpoint": member.id}
        # Where no other endpoint is left, the error says it.
        level = logging.INFO if self._refused.keys() >= self._members.keys() else logging.WARNING
        logger.log(level, "endpoint %s: %s", member.id, self._refused[member.id], extra=fields)

    def _ask_under_new_id(self, member: Member, over: Over) -> None:
        """Ask under another id after the lease ended under this one, unless a person ended it."""
        if over.is_final:
            self._refused[member.id] = over.words
            self._was_ended = True
            return
        ended_id = self._id_at(member)
        fields = {"lease_id": ended_id, "endpoint": member.id}
        logger.info(
            "lease %s ended at %s (%s); asking under another id", ended_id, member.id, over.reason, extra=fields
        )
        self._ids[member.id] = f"{self._lease_id}-{next(self._numbers)}"
        self._ask_again_at[member.id] = boot_time() + ASK_AGAIN_S

    async def _make_sure(self, member: Member, book: LeaseBook, grant: Granted) -> Won | None:
        """Renew a grant that may be old, to see whether it still stands. One that is known to be new is used at once."""
        since = grant.safe_since
        if since is not None and boot_time() - since <= self._request.ttl_s / NEW_PER_TTL:
            return Won(member, book, self._id_at(member), grant, since)
        lease_id = self._id_at(member)
        try:
            renewal = await book.renew([lease_id])
        except EndpointError as error:
            self._fail(member, error)
            return None
        if lease_id in renewal.renewed:
            return Won(member, book, lease_id, grant, renewal.renewed_at)
        self._ask_under_new_id(member, renewal.lost.get(lease_id, Over("unknown")))
        return None

    def _fail(self, member: Member, error: EndpointError) -> None:
        self._ask_again_at[member.id] = boot_time() + ASK_AGAIN_S
        self._fleet.note_failure(member, error)
        times = self._failures.get(member.id, (0, ""))[0] + 1
        self._failures[member.id] = (times, error.reason)
        if times == FAILURES_TO_TELL and member.endpoint.is_healthy:
            fields = {"lease_id": self._id_at(member), "endpoint": member.id}
            text = "endpoint %s has failed this request %d times: %s; it is asked again"
            logger.warning(text, member.id, times, error.reason.rstrip(". "), extra=fields)

    def _leave_the_others(self, won: Won | None) -> list[asyncio.Task[None]]:
        """Release what was requested and is not kept; returns what to wait for. This does not wait itself, so that
        nothing can happen in between.

        A second grant is released before the caller sees the first. For a place in a queue the winner need not wait; a
        request that gives up waits for all, for a while.
        """
        under_way = {member.id: task for task, (member, _) in self._tasks.items()}
        for id_, task in under_way.items():
            if task.done() and not task.cancelled() and task.exception() is None and isinstance(task.result(), Granted):
                self._granted_at.add(id_)
            if id_ in self._waiting_at:
                task.cancel()  # a poll; a PUT must arrive, or it would come in after its release
        leaving = {
            member.id: self._leave(book, self._id_at(member), under_way.get(member.id))
            for member, book in self._asked.values()
            if not (self._has_nothing_of_ours(member) or (won is not None and self._is_won_at(won, member)))
        }
        return [task for id_, task in leaving.items() if won is None or id_ in self._granted_at]

    def _has_nothing_of_ours(self, member: Member) -> bool:
        """Whether the endpoint refused the request, answered every call, and never had the request in its queue."""
        has_queued = any(id_ == member.id for id_, _ in self._told)
        has_answered = member.id in self._refused and member.id not in self._ask_again_at
        return has_answered and not has_queued and member.id not in self._granted_at

    def _is_won_at(self, won: Won, member: Member) -> bool:
        """Whether this is where the lease was won: one server may go by several names, and one id there is one lease."""
        if member is won.member:
            return True
        server_id = member.view.server_id
        return server_id is not None and server_id == won.member.view.server_id and self._id_at(member) == won.lease_id

    def _too_late(self, waited_s: float) -> WorkerTimeoutError | ServiceUnavailableError:
        if not self._fleet.is_up:
            return NoEndpointAnsweredError(self._fleet.reasons(), waited_s=round(waited_s, 3))
        reasons = [f"{id_}: {queued.reason}" for id_, queued in self._waiting_at.items()]
        reasons += [f"{id_}: {reason}" for id_, reason in self._refused.items()]
        reasons += [f"{id_}: {reason}" for id_, (_, reason) in self._failures.items() if id_ not in self._refused]
        silent = {member.id for member, _ in self._tasks.values()} - self._waiting_at.keys() - self._failures.keys()
        reasons += [f"{id_}: it has not answered" for id_ in sorted(silent)]
        return WorkerTimeoutError(waited_s=round(waited_s, 3), reason="; ".join(reasons) or "no endpoint granted it")
