"""The node at a glance: its GPUs with state and reason, the leases, the queue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from gpu_worker_pool.core.model.lease import Lease, QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import GpuSlot, attribute_processes, memory_use
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import judge
from gpu_worker_pool.core.queue.explain import Explainer
from gpu_worker_pool.core.queue.keeps import why_kept_from_newcomer
from gpu_worker_pool.core.queue.verdicts import Eligible, Verdict
from gpu_worker_pool.host.clock import iso_time, machine_fingerprint
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.http.loop_share import LoopShare
from gpu_worker_pool.server.http.response import encode, encode_with
from gpu_worker_pool.server.http.scope import Scope
from gpu_worker_pool.wire.pool import GpuState, PoolGpu, PoolProcess, PoolView, ThresholdsView

from .lease_view import brief_view, verdict_view
from .plan_view import booking_views, reservation_view
from .scoped import holders, waiters

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


async def encode_pool(
    pool: Pool, scope: Scope, most_queued: int | None, most_leases: int | None = None, *, most_gpus: int | None = None
) -> bytes:
    """Encode what a scope has, with at most so many waiters, other leases and GPUs. It yields to other work in between."""
    await pool.caught_up()
    state, loop_share = pool.state, LoopShare()
    others, waiting = holders(state, scope), waiters(state, scope, pool.now())
    queue: list[bytes] = []
    leases: list[bytes] = []
    async for lease, view in encode_leases(
        pool, [*islice(waiting, most_queued), *islice(others, most_leases)], loop_share
    ):
        # By its present state, so that each lease is in exactly one list, whatever happens in between.
        (queue if isinstance(lease, QueuedLease) else leases).append(view)
    gpus = []
    ordered = sorted(state.slots_on(scope.node), key=slot_order)
    await loop_share.yield_if_due()
    for slot in islice(ordered, most_gpus):
        gpus.append(encode(gpu_view(pool, slot)))
        await loop_share.yield_if_due()
    limits = state.settings.thresholds
    return encode_with(
        PoolView(
            node=scope.name(pool.node),
            gpus=(),
            thresholds=ThresholdsView(
                memory_percent=limits.memory_percent, utilization_percent=limits.utilization_percent
            ),
            workers_per_gpu=state.settings.workers_per_gpu,
            queue_length=len(waiting),
            server_id=pool.id,
            pool_id=pool.pool_id,
            # A box passes calls on to the leader, which is on another machine.
            machine=machine_fingerprint() if scope.node in {None, pool.node} and not scope.is_fleet else None,
            ignored_processes=tuple(sorted(state.ignored_processes)),
            can_grant=pool.trouble is None,
            trouble=pool.trouble,
            now=iso_time(pool.wall_now()) if pool.is_open else None,
            timestamp=pool.snapshot.timestamp,
            source=pool.snapshot.source,
            reservation=reservation_view(state, scope),
            bookings=booking_views(state, scope),
            fleet=pool.fleet(),
        ),
        gpus=gpus,
        leases=leases,
        queue=queue,
    )


async def encode_leases(
    pool: Pool, lease_ids: Iterable[str], loop_share: LoopShare
) -> AsyncIterator[tuple[Lease, bytes]]:
    """Encode these leases in brief; leases that are not written are left out."""
    lease_ids = list(lease_ids)
    await loop_share.yield_if_due()
    explainer, starts = Explainer(pool.state, pool.now()), pool.expected_starts()
    for lease_id in lease_ids:
        await loop_share.yield_if_due()
        lease = pool.state.leases.get(lease_id)
        if lease is not None and pool.is_written(lease_id):
            yield lease, encode(brief_view(pool.state, lease, pool.now(), explainer, starts))


def gpu_states(pool: Pool) -> Iterator[tuple[GpuSlot, GpuState]]:
    now = pool.now()
    for slot in list(pool.state.slots.values()):
        is_known = _why_unknown(pool, slot) is None
        yield slot, _word(slot, _verdict(pool.state, slot, now)) if is_known else "unknown"


def gpu_view(pool: Pool, slot: GpuSlot) -> PoolGpu:
    """One GPU. Its state is unknown while the events of its leases are not written."""
    view = _gpu(pool.state, slot, pool.now())
    why = _why_unknown(pool, slot)
    if why is None:
        return view
    written = tuple(filter(pool.is_written, slot.occupants)) if pool.is_open else view.leases
    return replace(view, state="unknown", reason=why, leases=written)


def _why_unknown(pool: Pool, slot: GpuSlot) -> str | None:
    if not pool.is_open:
        return f"its leases are not known: {pool.trouble}"
    if not all(map(pool.is_written, slot.occupants)):
        return "its last event is being written"
    return None


def _verdict(state: PoolState, slot: GpuSlot, now: float) -> Verdict:
    verdict = judge(state, slot, ORDINARY, now)
    if isinstance(verdict, Eligible):
        return why_kept_from_newcomer(state, slot.key, now) or verdict
    return verdict


def _word(slot: GpuSlot, verdict: Verdict) -> GpuState:
    word = _STATES.get(verdict.code, "unknown")
    return "shared" if word == "leased" and slot.without_draining().is_shared else word


def _gpu(state: PoolState, slot: GpuSlot, now: float) -> PoolGpu:
    verdict = _verdict(state, slot, now)
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
