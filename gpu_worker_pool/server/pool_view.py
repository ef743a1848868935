"""The node at a glance: its GPUs with their state and the reason for it, the leases, the queue."""

from __future__ import annotations

from typing import Any

from gpu_worker_pool.core.eligibility import (
    Draining,
    Eligible,
    Excluded,
    Held,
    Leased,
    NoRoom,
    OverMemory,
    OverUtilization,
    ReadingStale,
    ReadingUnknown,
    Unhealthy,
    Verdict,
    judge,
)
from gpu_worker_pool.core.request import Wishes
from gpu_worker_pool.core.slot import GpuSlot, memory_use
from gpu_worker_pool.core.state import PoolState
from gpu_worker_pool.ledger.driver import Driver

from .lease_view import verdict_view

# One word for each kind of verdict on an ordinary request: one GPU, exclusive.
_STATES: dict[type[Verdict], str] = {
    Eligible: "free",
    Leased: "leased",
    NoRoom: "leased",
    Draining: "draining",
    Excluded: "out_of_service",
    Unhealthy: "unhealthy",
    ReadingUnknown: "unknown",
    ReadingStale: "unknown",
    OverMemory: "busy",
    OverUtilization: "busy",
    Held: "held",
}
ORDINARY = Wishes()


def gpu_views(driver: Driver) -> list[dict[str, Any]]:
    """All GPUs, by node and index. What is not written is not shown: such a GPU's state is unknown until it is."""
    now, views = driver.now(), []
    for slot in sorted(driver.state.slots.values(), key=_place):
        view = _gpu(driver.state, slot, now)
        if not driver.is_open:
            view |= {"state": "unknown", "reason": f"its leases are not known: {driver.trouble}"}
        elif not all(map(driver.is_written, slot.occupants)):
            written = [lease_id for lease_id in slot.occupants if driver.is_written(lease_id)]
            view |= {"state": "unknown", "reason": "what happens to it is being written down", "leases": written}
        views.append(view)
    return views


def _gpu(state: PoolState, slot: GpuSlot, now: float) -> dict[str, Any]:
    verdict = judge(state, slot, ORDINARY, now)
    held_for = state.holds.get(slot.key)
    if isinstance(verdict, Eligible) and held_for is not None:
        verdict = Held(held_for, str(state.queued(held_for).request.holder))
    reading, use = slot.reading, memory_use(slot, state.ignored_processes)
    word = _STATES.get(type(verdict), "unknown")
    if word == "leased" and slot.is_shared:
        word = "shared"
    return {
        "node": slot.key.node,
        "gpu_id": reading.gpu.index if reading else None,
        "uuid": slot.key.uuid,
        "name": reading.gpu.name if reading else None,
        "state": word,
        "reason": str(verdict),
        "verdict": verdict_view(verdict),
        "leases": list(slot.occupants),
        "is_out_of_service": slot.key in state.excluded,
        "memory_total_mb": reading.memory_total_mb if reading else None,
        "memory_used_mb": reading.memory_used_mb if reading else None,
        "memory_committed_mb": round(use.committed_mb, 1) if use else None,
        "memory_outside_mb": round(use.outside_mb, 1) if use else None,
        "utilization_percent": reading.utilization_percent if reading else None,
        "temperature_c": reading.temperature_c if reading else None,
        "power_draw_w": reading.power_draw_w if reading else None,
        "processes": None
        if reading is None or reading.processes is None
        else [
            {"pid": process.id.pid, "name": process.name, "used_mb": process.memory_mb} for process in reading.processes
        ],
    }


def _place(slot: GpuSlot) -> tuple[str, float, str]:
    return (slot.key.node, slot.reading.gpu.index if slot.reading else float("inf"), slot.key.uuid)
