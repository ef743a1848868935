"""A request as a server reads it, and the process that it is for."""

from __future__ import annotations

import os
import socket
import sys
from functools import lru_cache
from typing import Any, Final

from gpu_worker_pool.core.model.request import Holder, Request
from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.host.identity import own_proc, pid_namespace
from gpu_worker_pool.host.processes import ProcessTable
from gpu_worker_pool.host.users import user_name

_WISHES: Final = (
    "gpus",
    "memory_mb",
    "model",
    "memory_threshold_percent",
    "utilization_threshold_percent",
    "among",
)
_HOLDER: Final = ("worker_id", "owner", "host", "pid", "pid_started", "boot_id", "pid_namespace")
_TERMS: Final = ("priority", "ttl_s", "time_limit_s", "preemptible")


def body_of(request: Request, *, is_local: bool) -> dict[str, Any]:
    """What is sent. What is not set is left out, so that the server's own default is used."""
    parts = ((request.wishes, _WISHES), (request.holder, _HOLDER), (request, _TERMS))
    values = {name: getattr(part, name) for part, names in parts for name in names}
    values["labels"] = dict(request.labels)
    if is_local and sys.platform == "linux":
        # A server on this machine knows the user: in a container the same user may have another name.
        del values["owner"]
    if request.wishes.nodes > 1:
        values["nodes"] = request.wishes.nodes
    return {name: value for name, value in values.items() if value is not None and value is not False and value != {}}


def holder(worker_id: str, pid: int | None = None) -> Holder:
    """The holder of a lease, with what a server on its machine needs to watch its process: this one, or `pid`."""
    found = _own_facts(os.getpid()) if pid is None else _facts_of(pid)
    return Holder(worker_id, found.owner, found.host, found.pid, found.pid_started, found.boot_id, found.pid_namespace)


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
