"""A GPU with its state and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import GpuSlot, attribute_processes, memory_use
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import judge
from gpu_worker_pool.core.queue.verdicts import Verdict
from gpu_worker_pool.core.queue.withheld import Withheld
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.wire.pool import GpuState, PoolGpu, PoolProcess

from .lease_view import verdict_view

# The state for each verdict on an ordinary request: one GPU, exclusive.
_STATES: dict[str, GpuState] = {
    "eligible": "free",
    "leased": "leased",
    "no_room": "leased",
    "sharers_full": "leased",
    "draining": "draining",
    "excluded": "out_of_service",
    "unhealthy": "unhealthy",
    "reading_unknown": "unknown",
    "reading_stale": "unknown",
    "other_server": "outside",
    "in_use_outside": "outside",
    "over_memory": "busy",
    "over_utilization": "busy",
    "held": "held",
    "booked": "held",
}
STATES: tuple[GpuState, ...] = (*dict.fromkeys(_STATES.values()), "shared")
ORDINARY = Wishes()


def gpu_states(pool: Pool) -> Iterator[tuple[GpuSlot, GpuState]]:
    now = pool.now()
    for slot in list(pool.state.slots.values()):
        is_known = _why_unknown(pool, slot) is None
        yield slot, _word(slot, _newcomers_verdict(pool.state, slot, now)) if is_known else "unknown"


def gpu_view(pool: Pool, slot: GpuSlot) -> PoolGpu:
    """One GPU. Its state is unknown while the events of its leases are not written."""
    view, why = _known_gpu(pool.state, slot, _newcomers_verdict(pool.state, slot, pool.now())), _why_unknown(pool, slot)
    if why is None:
        return view
    written = tuple(filter(pool.is_written, slot.occupants)) if pool.is_open else view.leases
    return replace(view, state="unknown", reason=why, leases=written)


def _why_unknown(pool: Pool, slot: GpuSlot) -> str | None:
    """Why the leases on a GPU are not known; None if they are."""
    if not pool.is_open:
        return f"its leases are not known: {pool.trouble}"
    if not all(map(pool.is_written, slot.occupants)):
        return "its last event is being written"
    return None


def _newcomers_verdict(state: PoolState, slot: GpuSlot, now: float) -> Verdict:
    """The verdict on an ordinary request that comes now."""
    verdict = judge(state, slot, ORDINARY, now)
    kept = Withheld(state, now).why_kept_from_newcomer(slot.key) if verdict.is_eligible else None
    return kept or verdict


def _word(slot: GpuSlot, verdict: Verdict) -> GpuState:
    word = _STATES.get(verdict.code, "unknown")
    if word != "leased" or not slot.is_shared:
        return word
    return "shared" if slot.without_draining().is_shared else word


def _known_gpu(state: PoolState, slot: GpuSlot, verdict: Verdict) -> PoolGpu:
    """A GPU whose leases are known, with this verdict on a newcomer."""
    reading, use = slot.reading, memory_use(slot, state.ignored_processes)
    return PoolGpu(
        node=slot.key.node,
        gpu_id=slot.gpu.index if slot.gpu else None,
        uuid=slot.key.uuid,
        name=slot.gpu.name if slot.gpu else None,
        state=_word(slot, verdict),
        reason=str(verdict),
        verdict=verdict_view(verdict),
        leases=tuple(slot.occupants),
        is_out_of_service=slot.key in state.excluded,
        memory_total_mb=reading.memory_total_mb if reading else None,
        memory_used_mb=reading.memory_used_mb if reading else None,
        memory_committed_mb=round(use.committed_mb, 1) if use else None,
        memory_outside_mb=round(use.outside_mb, 1) if use else None,
        utilization_percent=reading.utilization_percent if reading else None,
        temperature_c=reading.temperature_c if reading else None,
        power_draw_w=reading.power_draw_w if reading else None,
        processes=None
        if reading is None or reading.processes is None
        else tuple(
            PoolProcess(
                pid=process.id.pid,
                name=process.name,
                user=process.user,
                used_mb=process.memory_mb,
                lease_ids=tuple(ownership.lease_ids),
                is_outside=ownership.is_outside,
                is_ignored=ownership.is_ignored,
            )
            for process, ownership in attribute_processes(slot, state.ignored_processes)
        ),
    )


def slot_order(slot: GpuSlot) -> tuple[str, float, str]:
    return (slot.key.node, slot.gpu.index if slot.gpu else float("inf"), slot.key.uuid)
