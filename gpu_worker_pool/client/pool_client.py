"""The user's client: one endpoint or many, with leases underneath."""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from gpu_worker_pool.config import ClientConfig, Scope
from gpu_worker_pool.errors import RequestRefusedError, WorkerTimeoutError
from gpu_worker_pool.models import Assignment, LeaseInfo, PoolStatus

from .events import ClientEvent, EventKind, Hook, Tally, call_hook, log_event
from .inherited_lease import InheritedLease, config_inside
from .options import RequestWishes

# Loaded when a client is started: a program that imports this module may never start one.
if TYPE_CHECKING:
    from gpu_worker_pool.core.model.request import Request

    from .lease_list import LeaseLister
    from .reports import Reports
    from .started_client import StartedClient


__all__ = ["Assignment", "GPUWorkerPoolClient"]

_RetriedT = TypeVar("_RetriedT")


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
            scope=scope,
        )
        self._config, self._lease = config_inside(build, service_endpoint, service_endpoints)
        self._on_lost, self._on_ending = on_lost, on_ending
        self._hooks: list[Hook] = [log_event, *([on_event] if on_event else [])]
        self._started_client: StartedClient | None = None
        # False: the start does not wait for endpoints that are a little later than the first.
        self.waits_for_late = True
        self._tally, self._numbers = Tally(), itertools.count(1)
        # Two clients may run in processes of the same number, in two containers, say.
        self._name = os.urandom(3).hex()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        state = "stopped" if self._started_client is None else f"{len(self._started_client)} GPUs assigned"
        return f"<GPUWorkerPoolClient: {', '.join(self._config.endpoints)}; {state}>"

    async def refresh(self) -> None:
        """Ask the endpoints again that were not asked in the last polling interval, so that the reports show them as they
        are now.
        """
        await self._started().places.refresh(waits_for_new=True)

    async def start(self) -> None:
        """Poll all endpoints. An endpoint that is down is not an error: it is tried again in the background."""
        if self._started_client is not None:
            raise RuntimeError("the client is already started")
        from .started_client import StartedClient  # noqa: PLC0415 - see above

        self._pid = os.getpid()
        started = self._started_client = StartedClient(
            self._config, self._tally, tell=self._tell, on_lost=self._on_lost, on_ending=self._on_ending
        )
        try:
            await started.start(waits_for_late=self.waits_for_late)
        except BaseException:
            self._started_client = None
            raise

    async def stop(self) -> None:
        """Release all GPUs, and stop. Stopping twice is harmless."""
        started, self._started_client = self._started_client, None
        if started is not None and os.getpid() == self._pid:  # in a forked child the GPUs are its parent's
            if self._lease is not None:
                self._lease.release_all()
            await started.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def request_gpu(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - the documented signature
        **wishes: Unpack[RequestWishes],
    ) -> Assignment:
        """Wait for GPUs, and be assigned them.

        Several `gpus` are all on one server; with `nodes`, that many on each of that many boxes of a fleet, all or nothing.
        With `memory_mb`, or `memory="8GB"`, a GPU is shared with requests that also name an amount. `among`: only these
        GPUs, by index, UUID or the beginning of one. `labels` are shown with the lease; `command` is this program's script
        unless they have a `command` or a `name`. `pid` is the process that is to use the GPU, where that is not this one:
        its death then frees the GPU. Inside a `gpu-pool run` or `batch` the request takes GPUs of that lease, once no other
        request inside it uses them; `new` asks for other GPUs. The lease ends `time_limit` after its grant
        (seconds, or `2h`, `90m`); a `preemptible` one may be ended when another request needs its GPUs. Both are told
        before, by `assignment.ending`. Raises WorkerTimeoutError after `timeout` seconds (by default the client's
        worker_timeout), RequestRefusedError where no endpoint could ever serve it. A cancelled request leaves nothing
        behind.
        """
        started = self._started()
        timeout_s: Any = self._config.worker_timeout if timeout is None else timeout
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 <= timeout_s <= 1e9:
            raise ValueError(f"timeout is {timeout!r}; it must be a number of seconds, 0 or more")
        from .asking import make_request  # noqa: PLC0415 - see above

        request = make_request(self._config, f"{self._worker_prefix()}{next(self._numbers)}", wishes)
        if self._lease is not None and not wishes.get("new"):
            return await self._take_inside(self._lease, request, timeout_s)
        lease_id = os.urandom(16).hex()
        return await started.request(lease_id, request, timeout_s)

    async def release_gpu(self, assignment: Assignment) -> None:
        """Release a GPU. ValueError where this client does not have it (any more), StaleAssignmentError where it is lost."""
        started = self._started()
        if self._lease is not None and self._lease.release(assignment):
            self._tell(_event("released", assignment))
            return
        await started.release(assignment)

    async def leases(self, *, mine: bool = False) -> list[LeaseInfo]:
        """All live leases of the servers that answer; with `mine`, those that this client requested.

        NoEndpointAnsweredError where no server answers. A server with statistics only has no leases to show.
        """
        found = await self._lister().all()
        return [lease for lease in found if lease.is_mine or not mine]

    async def lease(self, lease_id: str) -> LeaseInfo | None:
        """A lease by its id, also one that ended a while ago; None where no server knows it, ValueError for a bad id."""
        return await self._lister().one(lease_id)

    def is_multi_endpoint_mode(self) -> bool:
        """Whether GPUs have global ids, and status and metrics show endpoints."""
        return self._config.is_multi

    def get_pool_status(self) -> PoolStatus:
        """The whole pool as its servers see it, with the changes that this client made since.

        The servers are asked again in the background while this is called now and then. After a longer time, `await
        client.refresh()` before asks them first.
        """
        return self._reports().status()

    def get_detailed_metrics(self) -> dict[str, Any]:
        """Everything that is counted, for monitoring."""
        return self._reports().metrics()

    def get_endpoints_info(self) -> list[dict[str, Any]] | None:
        """Each endpoint; None where the client is not started or has a single one."""
        if self._started_client is None or not self._config.is_multi:
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
        places = self._started_multi().places
        endpoint = places.endpoints.get(endpoint_id)
        return endpoint is not None and await places.try_again(endpoint)

    async def queue_request_for_retry(self, request_func: Callable[[], Awaitable[_RetriedT]]) -> _RetriedT:
        """Call this as soon as an endpoint is up, and again where it failed because none was, for up to worker_timeout."""
        return await self._started_multi().retry(request_func)

    def _started(self) -> StartedClient:
        if self._started_client is None:
            raise RuntimeError("the client is not started: use `async with`, or call start() first")
        if os.getpid() != self._pid:
            raise RuntimeError("this client belongs to the process that started it: make another one after a fork")
        return self._started_client

    def _started_multi(self) -> StartedClient:
        started = self._started()
        if not self._config.is_multi:
            raise RuntimeError("this client has a single endpoint: give it service_endpoints for this")
        return started

    def _lister(self) -> LeaseLister:
        from .lease_list import LeaseLister  # noqa: PLC0415 - see above

        places, prefix = self._started().places, self._worker_prefix()
        return LeaseLister(places, lambda worker_id: worker_id.startswith(prefix), is_multi=self._config.is_multi)

    def _reports(self) -> Reports:
        from .reports import Reports  # noqa: PLC0415 - see above

        places = self._started().places
        places.watch_for_status()
        return Reports(self._config, places, self._tally)

    async def _take_inside(self, lease: InheritedLease, request: Request, timeout_s: float) -> Assignment:
        from .asking import take_inside  # noqa: PLC0415 - see above

        worker_id = request.holder.worker_id or ""

        def waiting() -> None:
            self._tell(ClientEvent("waiting", worker_id, lease.id, detail=lease.busy_text))

        try:
            assignment = await take_inside(
                lease, request, timeout_s, is_multi=self._config.is_multi, on_waiting=waiting
            )
        except WorkerTimeoutError as error:
            self._tell(ClientEvent("timed_out", worker_id, lease.id, detail=error.reason))
            raise
        except RequestRefusedError as error:
            self._tell(ClientEvent("failed", worker_id, lease.id, detail=str(error)))
            raise
        self._tell(_event("assigned", assignment))
        return assignment

    def _worker_prefix(self) -> str:
        return f"worker-{self._pid}-{self._name}-"

    def _tell(self, event: ClientEvent) -> None:
        for hook in self._hooks:
            call_hook("on_event", hook, event)


def _event(kind: EventKind, assignment: Assignment) -> ClientEvent:
    return ClientEvent(kind, assignment.worker_id, assignment.lease_id or "", assignment.endpoint_id, assignment.gpu_id)
