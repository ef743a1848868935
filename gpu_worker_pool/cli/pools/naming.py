"""How people call the GPUs of an endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker_pool.wire.leases import GpuRef, ObstacleView
from gpu_worker_pool.wire.pool import PoolGpu


@dataclass(frozen=True, slots=True)
class Naming:
    """How people call the GPUs of an endpoint: `2`, or `server1:2` where there are several endpoints. Those of a whole
    fleet are called by their node: `gpu-01:2`.
    """

    endpoint: str
    is_multi: bool
    is_fleet: bool = False

    def id_of(self, gpu: GpuRef | PoolGpu | ObstacleView) -> str:
        """The name of one GPU: its index, or its UUID where there is no index yet."""
        local = gpu.uuid or "?" if gpu.gpu_id is None else str(gpu.gpu_id)
        if self.is_fleet and gpu.node is not None:
            return f"{gpu.node}:{local}"
        return f"{self.endpoint}:{local}" if self.is_multi else local


def show_gpus(ids: Sequence[str]) -> str:
    return f"GPU{'s' if len(ids) > 1 else ''} {', '.join(ids)}"


def short_ids(ids: Sequence[str]) -> str:
    """The GPUs of each node after its name, which is said once: `gpu-01:0,3 gpu-02:0,3`."""
    found: dict[str, list[str]] = {}
    for id_ in ids:
        where, colon, local = id_.rpartition(":")
        found.setdefault(where + colon, []).append(local)
    return " ".join(where + ",".join(locals_) for where, locals_ in found.items())
