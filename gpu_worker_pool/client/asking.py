"""A request of the core, out of what a caller of the client asks for."""

from __future__ import annotations

from gpu_worker_pool.amounts import asked_mb, parse_span
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.gpu_names import as_gpu_names
from gpu_worker_pool.core.model.request import Request, Wishes

from .backends.lease_request import holder
from .command_label import with_own_label
from .options import RequestWishes, with_defaults


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
