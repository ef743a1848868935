"""The user's client: one endpoint or many, with leases underneath."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from gpu_worker_pool.config import ClientConfig, Scope
from gpu_worker_pool.core.model.gpu_names import as_gpu_names
from gpu_worker_pool.core.model.memory import asked_mb
from gpu_worker_pool.core.model.request import Request, Wishes
from gpu_worker_pool.core.model.span import parse_span
from gpu_worker_pool.errors import (
    EndpointError,
    NoEndpointAnsweredError,
    PoolError,
    ServiceUnavailableError,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from gpu_worker_pool.models import GlobalGPUAssignment, GPUAssignment, LeaseEnding, PoolStatus

from .acquire.tally import Tally
from .events import ClientEvent, EventKind, Hook, call_hook, ending_text, log_event
from .inherited_lease import config_inside
from .own_program import with_own_label

# Loaded when a client is started: a program that imports this module may never start one.
if TYPE_CHECKING:
    from .acquire.acquisition import Won
    from .acquire.lost import Lost
    from .acquire.release import Releases
    from .acquire.warned import Warned
    from .endpoints.known_endpoints import KnownEndpoints
    from .reports import Reports

logger = logging.getLogger("gpu_worker_pool.client")

Assignment = GPUAssignment | GlobalGPUAssignment
_RetriedT = TypeVar("_RetriedT")
# How long a stop waits for GPUs to be released; at servers that do not answer, a thread goes on trying.
STOP_S = 2.0
# How long a release waits for the server; after that it goes on in the background.
RELEASE_S = 1.0


@dataclass(eq=False, slots=True)
class _Kept:
    """An assignment of this client, and how to release it."""

    assignment: Assignment
    won: Won
    lost: Lost
    warned: Warned


class GPUWorkerPoolClient:
    """Requests GPUs and releases them; `async with` starts and stops it.

    What is not given here comes from the environment (see .env.example), and from defaults after that. Several endpoints
    of one fleet are entry points of one pool, a single one stands for its own box; `scope` says otherwise. `on_lost` is
    called with an assignment that is lost, `on_ending` with one whose `ending` has changed, `on_event` with everything
    that happens; all are called in the event loop, so they must be quick.
    """

    def __init__(  # noqa: PLR0917 - the documented signature
        self,
        service_endpoint: str | None = None,
        service_endpoints: str | list[str] | tuple[str, ...] | None = None,
        load_balancing_strategy: str | None = None,
        memory_threshold: float | None = None,
        utilization_threshold: float | None = None,
        polling_interval: float | None = None,
        worker_timeout: float = 300.0,
        request_timeout: float = 30.0,
        *,
        endpoint_timeout: float | None = None,
        endpoint_max_retries: int | None = None,
        endpoint_health_check_interval: float | None = None,
        token: str | Mapping[str, str] | None = None,
        workers_per_gpu: int | None = None,
        scope: Scope | None = None,
        on_lost: Callable[[Assignment], None] | None = None,
        on_ending: Callable[[Assignment], None] | None = None,
        on_event: Hook | None = None,
    ) -> None:
        build = partial(
            ClientConfig.build,
            load_balancing_strategy=load_balancing_strategy,
            memory_threshold=memory_threshold,
            utilization_threshold=utilization_threshold,
            polling_interval=polling_interval,
            worker_timeout=worker_timeout,
            request_timeout=request_timeout,
            endpoint_timeout=endpoint_timeout,
            endpoint_max_retries=endpoint_max_retries,
            endpoint_health_check_interval=endpoint_health_check_interval,
            token=token,
            workers_per_gpu=workers_per_gpu,
            scope=scope,
        )
        self._config, self._lease = config_inside(build, service_endpoint, service_endpoints)
        self._on_lost, self._on_ending = on_lost, on_ending
        self._hooks: list[Hook] = [log_event, *([on_event] if on_event else [])]
        self._known: KnownEndpoints | None = None
        self._tally, self._numbers = Tally(), itertools.count(1)
        self._kept: dict[str, _Kept] = {}
        self._releases: Releases | None = None
        self._acquiring: set[asyncio.Future[None]] = set()
        # Two clients may run in processes of the same number, in two containers, say.
        self._name = uuid.uuid4().hex[:6]
        self._pid = os.getpid()

    def __repr__(self) -> str:
        state = "stopped" if self._known is None else f"{len(self._kept)} GPUs assigned"
        return f"<GPUWorkerPoolClient: {', '.join(self._config.endpoints)}; {state}>"

    async def start(self) -> None:
        """Poll all endpoints. An endpoint that is down is not an error: it is tried again in the background."""
        if self._known is not None:
            raise RuntimeError("the client is already started")
        from .acquire.release import Releases  # noqa: PLC0415 - see above
        from .endpoints.known_endpoints import KnownEndpoints  # noqa: PLC0415

        self._pid = os.getpid()
        known = KnownEndpoints(self._config, self._lose, self._warn)
        self._known, self._releases = known, Releases(self._config)
        try:
            await known.start()
        except BaseException:
            self._known = None
            await known.stop()
            raise

    async def stop(self) -> None:
        """Release all GPUs, and stop. Stopping twice is harmless."""
        known, self._known = self._known, None
        if known is None or os.getpid() != self._pid:
            return  # in a forked child the GPUs and the connections are its parent's
        known.say_that_it_stops()
        for kept in list(self._kept.values()):
            # A worker that still uses the GPU must hear that the lease has ended.
            kept.lost.set("the client was stopped")
            self._release_kept(kept)
        try:
            if self._acquiring:
                await asyncio.wait(self._acquiring, timeout=STOP_S)
            if self._releases is not None:
                await self._releases.finish(STOP_S)
        finally:
            await known.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def request_gpu(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - the documented signature
        *,
        gpus: int = 1,
        memory_mb: float | None = None,
        memory: str | float | None = None,
        model: str | None = None,
        among: Iterable[int | str] | None = None,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
        pid: int | None = None,
        new: bool = False,
        time_limit: float | str | None = None,
        preemptible: bool = False,
        nodes: int = 1,
    ) -> Assignment:
        """Wait for GPUs, and be assigned them.

        Several `gpus` are all on one server; with `nodes`, so many on each of so many boxes of a fleet, all or nothing. With `memory_mb`, or `memory="8GB"`, a GPU is shared with requests that also
        name an amount. `among`: only these GPUs, by index, UUID or the beginning of one. `labels` are shown with the
        lease; `command` is this program's script unless they have a `command` or a `name`. `pid` is the process that is to
        use the GPU, where that is not this one: its death then frees the GPU. Inside a `gpu-pool run` or `batch` the request
        uses the GPUs of that lease, and waits for others inside it; `new` asks for other GPUs. The lease ends `time_limit`
        after its grant (seconds, or `2h`, `90m`); a `preemptible` one may be ended when another request needs its GPUs.
        Both are told before, by `assignment.ending`. Raises WorkerTimeoutError
        after `timeout` seconds (by default the client's worker_timeout), RequestRefusedError where no endpoint could ever
        serve it. A cancelled request leaves nothing behind.
        """
        known = self._started()
        timeout_s: Any = self._config.worker_timeout if timeout is None else timeout
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 <= timeout_s <= 1e9:
            raise ValueError(f"timeout is {timeout!r}; it must be a number of seconds, 0 or more")
        from .backends.server_leases import holder  # noqa: PLC0415 - see above

        worker_id = f"worker-{os.getpid()}-{self._name}-{next(self._numbers)}"
        wishes = Wishes(
            gpus,
            asked_mb(memory_mb, memory),
            model,
            self._config.asked_memory_threshold,
            self._config.asked_utilization_threshold,
            None if among is None else as_gpu_names(among),
            nodes,
        )
        parent = None if new or self._lease is None else self._lease.id
        labelled = tuple(sorted(with_own_label(labels or {}).items()))
        limit_s = None if time_limit is None else parse_span(time_limit)
        if not isinstance(preemptible, bool):
            raise ValueError(f"preemptible is {preemptible!r}; it must be True or False")  # noqa: TRY004 - as all others
        who, ttl_s, lease_id = holder(worker_id, pid), self._config.ttl_s, uuid.uuid4().hex
        request = Request(wishes, who, priority, ttl_s, labelled, parent, limit_s, preemptible)
        self._tally.requests += 1
        self._tell(ClientEvent("requested", worker_id, lease_id))
        try:
            won = await self._acquire(known, lease_id, request, timeout_s)
        except WorkerTimeoutError as error:
            self._tally.failed += 1
            self._tell(ClientEvent("timed_out", worker_id, lease_id, detail=error.reason))
            raise
        except PoolError as error:
            self._tally.failed += 1
            self._tell(ClientEvent("failed", worker_id, lease_id, detail=str(error)))
            raise
        return self._keep(won, worker_id, request.ttl_s)

    async def release_gpu(self, assignment: Assignment) -> None:
        """Release a GPU. ValueError where this client does not have it (any more), StaleAssignmentError where it is lost."""
        self._started()
        kept = self._find(assignment)
        if kept.lost.is_set():
            # Seen here first: the clock says so, and no timer has run yet.
            kept.lost.set("no heartbeat got through in time")
            kept.won.place.heartbeat.drop(kept.won.lease_id)
            self._lose(kept.won.lease_id, kept.lost.reason or "")
            raise StaleAssignmentError(assignment, kept.lost.reason)
        leaving = self._release_kept(kept)
        # The caller need not wait for a server that does not answer: the lease expires by itself.
        await asyncio.wait([leaving], timeout=RELEASE_S)

    def is_multi_endpoint_mode(self) -> bool:
        """Whether GPUs have global ids, and status and metrics show endpoints."""
        return self._config.is_multi

    def get_pool_status(self) -> PoolStatus:
        """The whole pool as its servers see it, with the changes that this client made since."""
        return self._reports().status()

    def get_detailed_metrics(self) -> dict[str, Any]:
        """Everything that is counted, for monitoring."""
        return self._reports().metrics()

    def get_endpoints_info(self) -> list[dict[str, Any]] | None:
        """Each endpoint; None where the client is not started or has a single one."""
        if self._known is None or not self._config.is_multi:
            return None
        return self._reports().endpoints()

    def get_error_recovery_status(self) -> dict[str, Any]:
        """Which endpoints are up, which are not and why, and how their breakers stand."""
        return self._reports().recovery()

    def print_error_recovery_summary(self) -> None:
        """The same for people, on standard output."""
        print(self._reports().recovery_summary())  # noqa: T201 - that is what it is for

    async def trigger_endpoint_recovery(self, endpoint_id: str) -> bool:
        """Try an endpoint now, even where its breaker is open; returns whether it answered, False for an unknown id."""
        member = (known := self._started_multi()).members.get(endpoint_id)
        return member is not None and await known.try_again(member)

    async def queue_request_for_retry(self, request_func: Callable[[], Awaitable[_RetriedT]]) -> _RetriedT:
        """Call this as soon as an endpoint is up, and again where it failed because none was, for up to worker_timeout."""
        known = self._started_multi()
        limit = asyncio.timeout(self._config.worker_timeout)
        try:
            async with limit:
                while True:
                    if known.is_up:
                        with suppress(EndpointError, ServiceUnavailableError):
                            return await request_func()
                    await asyncio.shield(known.changed())
                    self._started()
        except TimeoutError:
            if not limit.expired():
                raise  # its own
            raise NoEndpointAnsweredError(known.reasons(), waited_s=self._config.worker_timeout) from None

    def _started(self) -> KnownEndpoints:
        if self._known is None:
            raise RuntimeError("the client is not started: use `async with`, or call start() first")
        if os.getpid() != self._pid:
            raise RuntimeError("this client belongs to the process that started it: make another one after a fork")
        return self._known

    def _started_multi(self) -> KnownEndpoints:
        known = self._started()
        if not self._config.is_multi:
            raise RuntimeError("this client has a single endpoint: give it service_endpoints for this")
        return known

    def _reports(self) -> Reports:
        from .reports import Reports  # noqa: PLC0415 - see above

        return Reports(self._config, self._started(), self._tally)

    async def _acquire(self, known: KnownEndpoints, lease_id: str, request: Request, timeout_s: float) -> Won:
        from .acquire.acquisition import Acquisition  # noqa: PLC0415 - see above

        def queued(endpoint_id: str, id_there: str, reason: str) -> None:
            worker_id = request.holder.worker_id or ""
            self._tell(ClientEvent("waiting", worker_id, id_there, endpoint_id, detail=reason))

        inside = self._lease if request.parent is not None else None
        acquisition = Acquisition(known, lease_id, request, self._leave, self._tally, inside=inside, on_queued=queued)
        self._acquiring.add(over := asyncio.get_running_loop().create_future())
        try:
            return await acquisition.run(timeout_s)
        finally:
            self._tally.waiting.discard(lease_id)
            self._tally.done.append(lease_id)
            self._acquiring.discard(over)
            over.set_result(None)

    def _keep(self, won: Won, worker_id: str, ttl_s: float) -> Assignment:
        from .acquire.assigned import make_assignment  # noqa: PLC0415 - see above
        from .acquire.lost import Lost  # noqa: PLC0415
        from .acquire.warned import Warned  # noqa: PLC0415

        lost, warned = Lost(ttl_s, is_local=won.grant.is_local), Warned()
        assignment = make_assignment(won, worker_id, lost, warned, is_multi=self._config.is_multi)
        self._kept[won.lease_id] = _Kept(assignment, won, lost, warned)
        if won.book.needs_heartbeat:
            won.place.heartbeat.add(won.lease_id, lost, won.safe_since)
        for gpu in won.grant.gpus:
            won.place.note_taken(gpu.key.uuid, worker_id)
        self._tally.granted += 1
        self._tally.by_endpoint[won.place.id] += 1
        self._tell(ClientEvent("assigned", worker_id, won.lease_id, won.place.id, assignment.gpu_id))
        return assignment

    def _find(self, assignment: Assignment) -> _Kept:
        kept = self._kept.get(getattr(assignment, "lease_id", None) or "")
        if kept is None:
            if getattr(assignment, "is_lost", False):
                raise StaleAssignmentError(assignment, getattr(assignment.lost, "reason", None))
            raise ValueError(f"{assignment!r} is not an assignment of this client, or was released before")
        return kept

    def _release_kept(self, kept: _Kept) -> asyncio.Task[None]:
        won, assignment = kept.won, kept.assignment
        self._drop(kept)
        won.place.heartbeat.drop(won.lease_id)
        kept.lost.settle()
        self._tell(ClientEvent("released", assignment.worker_id, won.lease_id, won.place.id, assignment.gpu_id))
        return self._leave(won.book, won.lease_id, is_local=kept.lost.is_local)

    def _drop(self, kept: _Kept) -> None:
        del self._kept[kept.won.lease_id]
        for gpu in kept.won.grant.gpus:
            kept.won.place.note_released(gpu.key.uuid, kept.assignment.worker_id)

    @property
    def _leave(self) -> Callable[..., asyncio.Task[None]]:
        """Releases a lease in the background."""
        assert self._releases is not None  # noqa: S101 - a lease is had only after the start
        return self._releases.start

    def _lose(self, lease_id: str, reason: str, code: str | None = None) -> None:
        kept = self._kept.get(lease_id)
        if kept is None:
            return
        kept.lost.set(reason, code)
        self._drop(kept)
        endpoint_id, assignment = kept.won.place.id, kept.assignment
        self._tell(ClientEvent("lost", assignment.worker_id, lease_id, endpoint_id, assignment.gpu_id, reason))
        call_hook("on_lost", self._on_lost, assignment)
        # The server may only have missed the heartbeats; then the next waiter need not wait for the TTL.
        self._leave(kept.won.book, lease_id, is_local=kept.lost.is_local)

    def _warn(self, lease_id: str, ending: LeaseEnding | None) -> None:
        kept = self._kept.get(lease_id)
        if kept is None or not kept.warned.set(ending):
            return
        kind: EventKind = "going_on" if ending is None else "ending"
        endpoint_id, assignment = kept.won.place.id, kept.assignment
        said = ending_text(ending)
        self._tell(ClientEvent(kind, assignment.worker_id, lease_id, endpoint_id, assignment.gpu_id, said))
        call_hook("on_ending", self._on_ending, assignment)

    def _tell(self, event: ClientEvent) -> None:
        for hook in self._hooks:
            call_hook("on_event", hook, event)
