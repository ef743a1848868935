"""The node at a glance: its GPUs with their state and the reason for it, the leases, the queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import GpuSlot, memory_use, place_processes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import (
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
STATES = (*dict.fromkeys(_STATES.values()), "shared")
ORDINARY = Wishes()


def slots_in_order(state: PoolState) -> list[GpuSlot]:
    """All GPUs, by node and index."""
    return sorted(state.slots.values(), key=_place)


def gpu_states(driver: Driver) -> Iterator[tuple[GpuSlot, str]]:
    """All GPUs with their state in a word, and nothing else of them."""
    now = driver.now()
    for slot in list(driver.state.slots.values()):
        is_known = _why_unknown(driver, slot) is None
        yield slot, _word(slot, _verdict(driver.state, slot, now)) if is_known else "unknown"


def slot_view(driver: Driver, slot: GpuSlot) -> dict[str, Any]:
    """One GPU. What is not written is not shown: its state is unknown until it is."""
    view = _gpu(driver.state, slot, driver.now())
    why = _why_unknown(driver, slot)
    if why is not None:
        view |= {"state": "unknown", "reason": why}
        if driver.is_open:
            view["leases"] = [lease_id for lease_id in slot.occupants if driver.is_written(lease_id)]
    return view


def _why_unknown(driver: Driver, slot: GpuSlot) -> str | None:
    if not driver.is_open:
        return f"its leases are not known: {driver.trouble}"
    if not all(map(driver.is_written, slot.occupants)):
        return "what happens to it is being written down"
    return None


def _verdict(state: PoolState, slot: GpuSlot, now: float) -> Verdict:
    """What an ordinary request would meet."""
    verdict = judge(state, slot, ORDINARY, now)
    held_for = state.holds.get(slot.key)
    if isinstance(verdict, Eligible) and held_for is not None:
        return Held(held_for, str(state.queued(held_for).request.holder))
    return verdict


def _word(slot: GpuSlot, verdict: Verdict) -> str:
    word = _STATES.get(type(verdict), "unknown")
    return "shared" if word == "leased" and slot.without_draining().is_shared else word


def _gpu(state: PoolState, slot: GpuSlot, now: float) -> dict[str, Any]:
    verdict = _verdict(state, slot, now)
    reading, use = slot.reading, memory_use(slot, state.ignored_processes)
    return {
        "node": slot.key.node,
        "gpu_id": reading.gpu.index if reading else None,
        "uuid": slot.key.uuid,
        "name": reading.gpu.name if reading else None,
        "state": _word(slot, verdict),
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
            {
                "pid": process.id.pid,
                "name": process.name,
                "used_mb": process.memory_mb,
                "lease_ids": list(place.lease_ids),
                "is_outside": place.is_outside,
                "is_ignored": place.is_ignored,
            }
            for process, place in place_processes(slot, state.ignored_processes)
        ],
    }


def _place(slot: GpuSlot) -> tuple[str, float, str]:
    return (slot.key.node, slot.reading.gpu.index if slot.reading else float("inf"), slot.key.uuid)
