"""A request of the core, out of what a caller of the client asks for, and one that the lease around it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gpu_worker_pool.amounts import asked_mb, parse_span
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.gpu_names import as_gpu_names
from gpu_worker_pool.core.model.request import Request, Wishes
from gpu_worker_pool.errors import RequestRefusedError, WorkerTimeoutError
from gpu_worker_pool.models import Assignment

from .backends.server_leases import holder
from .command_label import with_own_label
from .inherited_lease import InheritedLease
from .options import RequestWishes, with_defaults

# How soon a request inside a lease looks again whether its GPUs are free; each time a little later.
_FIRST_LOOK_S: Final = 0.01
_LAST_LOOK_S: Final = 0.25


def make_request(config: ClientConfig, worker_id: str, wishes: RequestWishes) -> Request:
    """The request. ValueError where something is not allowed; see `GPUWorkerPoolClient.request_gpu`."""
    asked = with_defaults(wishes)
    among, time_limit, preemptible = asked["among"], asked["time_limit"], asked["preemptible"]
    if not isinstance(preemptible, bool):
        raise ValueError(f"preemptible is {preemptible!r}; it must be True or False")  # noqa: TRY004 - as all others
    return Request(
        Wishes(
            asked["gpus"],
            asked_mb(asked["memory_mb"], asked["memory"]),
            asked["model"],
            config.asked_memory_threshold,
            config.asked_utilization_threshold,
            None if among is None else as_gpu_names(among),
            asked["nodes"],
        ),
        holder(worker_id, asked["pid"]),
        asked["priority"],
        config.ttl_s,
        tuple(sorted(with_own_label(asked["labels"] or {}).items())),
        time_limit_s=None if time_limit is None else parse_span(time_limit),
        preemptible=preemptible,
    )


async def take_inside(
    lease: InheritedLease,
    request: Request,
    timeout_s: float,
    *,
    is_multi: bool,
    takes_all: bool = False,
    on_waiting: Callable[[], None] = lambda: None,
) -> Assignment:
    """Take GPUs of the lease around this process; waits while others inside it use them, and calls `on_waiting` then.
    RequestRefusedError where the lease cannot serve the request, WorkerTimeoutError after `timeout_s`.
    """
    if (why := lease.why_not(request.wishes)) is not None:
        raise RequestRefusedError({lease.endpoint or lease.url.host: why})
    loop = asyncio.get_running_loop()
    began, look_s = loop.time(), _FIRST_LOOK_S
    while (taken := lease.take(request, is_multi=is_multi, takes_all=takes_all)) is None:
        waited_s = loop.time() - began
        if waited_s >= timeout_s:
            raise WorkerTimeoutError(waited_s=round(waited_s, 3), reason=lease.busy_text)
        if look_s == _FIRST_LOOK_S:
            on_waiting()
        await asyncio.sleep(min(look_s, timeout_s - waited_s))
        look_s = min(2 * look_s, _LAST_LOOK_S)
    return taken
