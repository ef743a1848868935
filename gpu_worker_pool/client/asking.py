"""A request of the core, out of what a caller of the client asks for."""

from __future__ import annotations

from gpu_worker_pool.amounts import asked_mb, parse_span
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.gpu_names import as_gpu_names
from gpu_worker_pool.core.model.request import Request, Wishes

from .backends.server_leases import holder
from .command_label import with_own_label
from .options import RequestWishes, check_wishes


def make_request(config: ClientConfig, worker_id: str, asked: RequestWishes) -> Request:
    """The request. ValueError where something is not allowed; see `GPUWorkerPoolClient.request_gpu`."""
    check_wishes(asked)
    among, time_limit = asked.get("among"), asked.get("time_limit")
    wishes = Wishes(
        asked.get("gpus", 1),
        asked_mb(asked.get("memory_mb"), asked.get("memory")),
        asked.get("model"),
        config.asked_memory_threshold,
        config.asked_utilization_threshold,
        None if among is None else as_gpu_names(among),
        asked.get("nodes", 1),
    )
    preemptible = asked.get("preemptible", False)
    if not isinstance(preemptible, bool):
        raise ValueError(f"preemptible is {preemptible!r}; it must be True or False")  # noqa: TRY004 - as all others
    return Request(
        wishes,
        holder(worker_id, asked.get("pid")),
        asked.get("priority", 0),
        config.ttl_s,
        tuple(sorted(with_own_label(asked.get("labels") or {}).items())),
        time_limit_s=None if time_limit is None else parse_span(time_limit),
        preemptible=preemptible,
    )
