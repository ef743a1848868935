"""The user's client: one endpoint or many, with leases underneath."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from gpu_worker_pool.config import Scope
from gpu_worker_pool.errors import StaleAssignmentError
from gpu_worker_pool.models import Assignment, LeaseInfo, PoolStatus

from .events import Hook
from .inherited_lease import config_inside
from .options import ClientOptions, RequestWishes

# Loaded when a client is started: a program that imports this module may never start one.
if TYPE_CHECKING:
    from .reports import Reports
    from .started_client import StartedClient


__all__ = ["Assignment", "GPUContextManager", "GPUWorkerPoolClient", "gpu_worker_pool_client"]
logger = logging.getLogger("gpu_worker_pool.client")

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
        self._config, self._lease = config_inside(
            service_endpoint,
            service_endpoints=service_endpoints,
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
        self._hooks: dict[str, Any] = {"on_event": on_event, "on_lost": on_lost, "on_ending": on_ending}
        self._started_client: StartedClient | None = None
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
        started = self._started_client = StartedClient(self._config, **self._hooks, lease=self._lease)
        try:
            await started.start()
        except BaseException:
            self._started_client = None
            raise

    async def stop(self) -> None:
        """Release all GPUs, and stop. Stopping twice is harmless."""
        started, self._started_client = self._started_client, None
        if started is not None and os.getpid() == self._pid:  # in a forked child the GPUs are its parent's
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
        With `memory_mb`, or `memory="8GB"`, a GPU is shared with requests that also name an amount. `model` is a
        word of the GPU's name, or several, separated by commas. `min_memory_mb`, or `min_memory="40GB"`: only GPUs that are
        sold with so much. `among`: only these GPUs, by index, UUID or the beginning of one; `exclude`: none of these. `labels` are shown with the lease; `command` is this program's script
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
        return await started.request(timeout_s, wishes)

    async def release_gpu(self, assignment: Assignment, *, note: str | None = None) -> None:
        """Release a GPU. `note` says how its use ended, for `gpu-pool history`. ValueError where this client does not have it
        (any more), StaleAssignmentError where it is lost.
        """
        await self._started().release(assignment, note)

    async def leases(self, *, mine: bool = False) -> list[LeaseInfo]:
        """All live leases of the servers that answer; with `mine`, those that this client requested.

        NoEndpointAnsweredError where no server answers. A server with statistics only has no leases to show.
        """
        return [lease for lease in await self._listed() if lease.is_mine or not mine]

    async def lease(self, lease_id: str) -> LeaseInfo | None:
        """A lease by its id, also one that ended a while ago; None where no server knows it, ValueError for a bad id."""
        return next(iter(await self._listed(lease_id)), None)

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

    async def _listed(self, lease_id: str | None = None) -> list[LeaseInfo]:
        from .reports import list_leases  # noqa: PLC0415 - see above

        started = self._started()
        return await list_leases(started.places, started.is_own_worker, lease_id)

    def _reports(self) -> Reports:
        from .reports import Reports  # noqa: PLC0415 - see above

        started = self._started()
        started.places.watch_for_status()
        return Reports(started.places, started.tally)


@asynccontextmanager
async def gpu_worker_pool_client(**options: Unpack[ClientOptions]) -> AsyncIterator[GPUWorkerPoolClient]:
    """A client that is started, and stopped at the end."""
    async with GPUWorkerPoolClient(**options) as client:
        yield client


class GPUContextManager:
    """Requests a GPU on entering and releases it on leaving; yields the GPU's id. Raises StaleAssignmentError at the
    end if it was lost. `assignment` is what was assigned, within the block.
    """

    def __init__(
        self, client: GPUWorkerPoolClient, timeout: float | None = None, **wishes: Unpack[RequestWishes]
    ) -> None:
        self._client = client
        self._timeout = timeout
        self._wishes = wishes
        self.assignment: Assignment | None = None

    async def __aenter__(self) -> int | str:
        if self.assignment is not None:
            raise RuntimeError("this context is entered already; make another one for another GPU")
        self.assignment = await self._client.request_gpu(self._timeout, **self._wishes)
        return self.assignment.gpu_id

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assignment, self.assignment = self.assignment, None
        if assignment is None:
            return
        try:
            await self._client.release_gpu(assignment)
        except StaleAssignmentError:
            if error is None:
                raise
        except (RuntimeError, ValueError):
            # The client was stopped, which released everything, or the GPU was released by hand: nothing is left to do.
            logger.debug("GPU %s was given back before", assignment.gpu_id)
