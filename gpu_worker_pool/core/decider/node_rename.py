"""The history of a node under its present name.

A node may be renamed while its GPUs stay the same. Its leases must survive that, and a fence must not go back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndedLease


def event_on_node(node: str, event: ev.DurableEvent) -> ev.DurableEvent:
    """The event with the keys of a node of this name."""
    changes: dict[str, Any] = {}
    match event:
        case ev.LeaseGranted(gpus=gpus):
            changes = {"gpus": _on_node(node, gpus)}
        case ev.LeaseEnded(draining=gpus):
            changes = {"draining": _on_node(node, gpus)}
        case (
            ev.GpuDrained(gpu=gpu) | ev.ProcessesAttributed(gpu=gpu) | ev.GpuExcluded(gpu=gpu) | ev.GpuIncluded(gpu=gpu)
        ):
            changes = {"gpu": GpuKey(node, gpu.uuid)}
        case ev.HistoryCondensed(fences=fences):
            changes = {"fences": ((node, max(fence for _, fence in fences)),) if fences else ()}
    return replace(event, **changes) if changes else event


def ended_on_node(node: str, lease: EndedLease) -> EndedLease:
    return replace(lease, gpus=_on_node(node, lease.gpus))


def _on_node(node: str, keys: tuple[GpuKey, ...]) -> tuple[GpuKey, ...]:
    return tuple(GpuKey(node, key.uuid) for key in keys)
