"""A request of the core, out of what a caller of the client asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from gpu_worker_pool.amounts import asked_mb, parse_span
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.gpu_names import as_gpu_names
from gpu_worker_pool.core.model.request import Request, Wishes

from .backends.server_leases import holder
from .command_label import with_own_label

# The number of GPUs, their memory in either of two ways, their model, and the number of nodes.
What = tuple[int, float | None, str | float | None, str | None, int]


def make_request(
    config: ClientConfig,
    worker_id: str,
    what: What,
    *,
    among: Iterable[int | str] | None,
    priority: int,
    labels: Mapping[str, str] | None,
    pid: int | None,
    time_limit: float | str | None,
    preemptible: bool,
) -> Request:
    """The request. ValueError where something is not allowed; see `GPUWorkerPoolClient.request_gpu`."""
    asked = *what, config.asked_memory_threshold, config.asked_utilization_threshold
    names = None if among is None else as_gpu_names(among)
    try:
        wishes = _wishes(*asked, names)
    except TypeError:  # it cannot be kept, and is refused in words
        wishes = _wishes.__wrapped__(*asked, names)
    labelled = tuple(sorted(with_own_label(labels or {}).items()))
    limit_s = None if time_limit is None else parse_span(time_limit)
    if not isinstance(preemptible, bool):
        raise ValueError(f"preemptible is {preemptible!r}; it must be True or False")  # noqa: TRY004 - as all others
    return Request(
        wishes,
        holder(worker_id, pid),
        priority,
        config.ttl_s,
        labelled,
        time_limit_s=limit_s,
        preemptible=preemptible,
    )


# A program asks again and again for the same. By type too: True is not a number of GPUs, though it equals 1.
@lru_cache(maxsize=64, typed=True)
def _wishes(  # noqa: PLR0917 - the keys of the cache
    gpus: int,
    memory_mb: float | None,
    memory: str | float | None,
    model: str | None,
    nodes: int,
    memory_threshold_percent: float | None,
    utilization_threshold_percent: float | None,
    among: tuple[str, ...] | None,
) -> Wishes:
    return Wishes(
        gpus,
        asked_mb(memory_mb, memory),
        model,
        memory_threshold_percent,
        utilization_threshold_percent,
        among,
        nodes,
    )
