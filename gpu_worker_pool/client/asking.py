"""A request of the core, out of what a caller of the client asks for, and one that the lease around it serves."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

from gpu_worker_pool.amounts import asked_mb, parse_span
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.request import Holder, Request, Wishes, as_gpu_names
from gpu_worker_pool.errors import RequestRefusedError, WorkerTimeoutError
from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.host.processes import ProcessTable, own_proc, pid_namespace
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.models import Assignment

from .command_label import with_own_label
from .inherited_lease import InheritedLease
from .options import RequestWishes, check_names

# How soon a request inside a lease looks again whether its GPUs are free; each time a little later.
_FIRST_LOOK_S: Final = 0.01
_LAST_LOOK_S: Final = 0.25


def make_request(config: ClientConfig, worker_id: str, wishes: RequestWishes, holder: Holder | None = None) -> Request:
    """The request. ValueError where something is not allowed; see `GPUWorkerPoolClient.request_gpu`. Without a `holder`, that is
    this process, or the one of `pid`.
    """
    check_names("request_gpu", wishes, RequestWishes)
    time_limit, preemptible, labels = wishes.get("time_limit"), wishes.get("preemptible", False), wishes.get("labels")
    if not isinstance(preemptible, bool):
        raise ValueError(f"preemptible is {preemptible!r}; it must be True or False")  # noqa: TRY004 - as all others
    if labels is not None and not _are_labels(labels):
        raise ValueError(f"labels is {labels!r}; it must be a mapping of texts to texts, such as {{'name': 'sweep'}}")
    return Request(
        Wishes(
            wishes.get("gpus", 1),
            asked_mb(wishes.get("memory_mb"), wishes.get("memory")),
            wishes.get("model"),
            config.asked_memory_threshold,
            config.asked_utilization_threshold,
            among=_names(wishes.get("among"), "among"),
            nodes=wishes.get("nodes", 1),
            min_memory_mb=asked_mb(wishes.get("min_memory_mb"), wishes.get("min_memory"), "min_memory"),
            exclude=_names(wishes.get("exclude"), "exclude"),
        ),
        replace(holder or _holder(wishes.get("pid")), worker_id=worker_id),
        wishes.get("priority", 0),
        config.ttl_s,
        tuple(sorted(with_own_label(labels or {}).items())),
        time_limit_s=None if time_limit is None else parse_span(time_limit),
        preemptible=preemptible,
    )


def _holder(pid: int | None) -> Holder:
    """A process, this one by default, with what a server on its machine needs to watch it."""
    return _own_facts(os.getpid()) if pid is None else _facts_of(pid)


def _facts_of(pid: int) -> Holder:
    namespace = pid_namespace()
    return Holder(
        owner=user_name(),
        host=socket.gethostname(),
        pid=pid,
        pid_started=ProcessTable(proc).started(pid) if (proc := own_proc()) else None,
        boot_id=boot_id() if namespace else None,  # without /proc a server cannot watch the process
        pid_namespace=namespace,
    )


# Read once a process. A forked child has another pid, so it does not use its parent's.
_own_facts = lru_cache(maxsize=1)(_facts_of)


def _names(gpus: Iterable[int | str] | None, wish: str) -> tuple[str, ...] | None:
    return None if gpus is None else as_gpu_names(gpus, wish)


def _are_labels(labels: object) -> bool:
    return isinstance(labels, Mapping) and all(isinstance(text, str) for item in labels.items() for text in item)


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
