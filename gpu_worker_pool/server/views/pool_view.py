"""The node at a glance: its GPUs with state and reason, the leases, the queue, and what may be expected: when a request that is made
now would start, and until when leases last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, starmap
from math import inf
from typing import cast

from gpu_worker_pool.core.decider.forecast import Forecast, Forecasts, When, usual_wishes
from gpu_worker_pool.core.model.configured import Booking, Group
from gpu_worker_pool.core.model.gpu import GpuProcess
from gpu_worker_pool.core.model.lease import FULL_WEIGHT, ActiveLease, QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import GpuSlot, ProcessOwnership, attribute_processes, memory_use
from gpu_worker_pool.core.model.state import OwnerUse, PoolState
from gpu_worker_pool.core.queue.bookings import late_leases
from gpu_worker_pool.core.queue.eligibility import judge
from gpu_worker_pool.core.queue.planner import Planner
from gpu_worker_pool.core.queue.verdicts import Verdict
from gpu_worker_pool.core.queue.withheld import Withheld
from gpu_worker_pool.host.clock import iso_time, machine_fingerprint
from gpu_worker_pool.host.pauses import LoopShare
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.encoding import shared_fields
from gpu_worker_pool.server.views.lease_view import gpu_refs, listed_leases, verdict_view
from gpu_worker_pool.server.views.target import ShownPool, Target
from gpu_worker_pool.wire.leases import DateBasis, LeaseView
from gpu_worker_pool.wire.plans import (
    BookingView,
    ForecastStart,
    ForecastView,
    GroupView,
    ModelForecast,
    ReservationView,
)
from gpu_worker_pool.wire.pool import ExpectedEnd, GpuState, PoolGpu, PoolProcess, PoolView, ThresholdsView

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
    "first_right": "held",
}
STATES: tuple[GpuState, ...] = (*dict.fromkeys(_STATES.values()), "shared")
ORDINARY = Wishes()


def gpu_states(pool: ShownPool) -> Iterator[tuple[GpuSlot, GpuState]]:
    now = pool.now()
    for slot in list(pool.state.slots.values()):
        is_known = _why_unknown(pool, slot) is None
        yield slot, _word(slot, _newcomers_verdict(pool.state, slot, now)) if is_known else "unknown"


def gpu_view(pool: ShownPool, slot: GpuSlot) -> PoolGpu:
    """One GPU. Its state is unknown while the events of its leases are not written."""
    view, why = _known_gpu(pool.state, slot, _newcomers_verdict(pool.state, slot, pool.now())), _why_unknown(pool, slot)
    if why is None:
        return view
    written = tuple(filter(pool.is_written, slot.occupants)) if pool.is_open else view.leases
    return replace(view, state="unknown", reason=why, leases=written)


def _why_unknown(pool: ShownPool, slot: GpuSlot) -> str | None:
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
    processes = None
    if reading is not None and reading.processes is not None:
        processes = tuple(starmap(_process, attribute_processes(slot, state.ignored_processes)))
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
        memory_committed_mb=round(use.committed_mb, 1) if use else None,
        memory_outside_mb=round(use.outside_mb, 1) if use else None,
        **(shared_fields(PoolGpu, reading) if reading else {}) | {"processes": processes},
    )


def _process(process: GpuProcess, ownership: ProcessOwnership) -> PoolProcess:
    found = {**shared_fields(PoolProcess, process), **shared_fields(PoolProcess, ownership)}
    return PoolProcess(pid=process.id.pid, used_mb=process.memory_mb, **found)


def slot_order(slot: GpuSlot) -> tuple[str, float, str]:
    return (slot.key.node, slot.gpu.index if slot.gpu else float("inf"), slot.key.uuid)


async def pool_view(
    pool: ShownPool, target: Target, most_queued: int | None = None, most_leases: int | None = None
) -> PoolView:
    """What a target has, with at most this many waiters and other leases. It yields to other work in between."""
    await pool.caught_up()
    state, share = pool.state, LoopShare()
    others, waiting = target.holders(state), target.waiters(state, pool.now())
    queue: list[LeaseView] = []
    leases: list[LeaseView] = []
    async for lease, view in listed_leases(pool, [*islice(waiting, most_queued), *islice(others, most_leases)], share):
        # By its present state, so that each lease is in exactly one list, whatever happens in between.
        (queue if isinstance(lease, QueuedLease) else leases).append(view)
    gpus: list[PoolGpu] = []
    for slot in sorted(state.slots_on(target.node), key=slot_order):
        gpus.append(gpu_view(pool, slot))
        await share.yield_if_due()
    limits = state.settings.thresholds
    return PoolView(
        node=target.name(pool.node),
        gpus=tuple(gpus),
        thresholds=ThresholdsView(memory_percent=limits.memory_percent, utilization_percent=limits.utilization_percent),
        queue_length=len(waiting),
        server_id=pool.id,
        pool_id=pool.pool_id,
        # A box passes calls on to the leader, which is on another machine.
        machine=machine_fingerprint() if target.node in {None, pool.node} and not target.is_fleet else None,
        ignored_processes=tuple(sorted(state.ignored_processes)),
        can_grant=pool.trouble is None,
        trouble=pool.trouble,
        now=iso_time(pool.wall_now()) if pool.is_open else None,
        timestamp=pool.snapshot.timestamp,
        source=pool.snapshot.source,
        leases=tuple(leases),
        queue=tuple(queue),
        reservation=_reservation_view(state, target),
        bookings=booking_views(state, target),
        fleet=pool.fleet(),
        groups=group_views(state),
    )


def booking_views(state: PoolState, target: Target) -> tuple[BookingView, ...]:
    return tuple(booking_view(state, booking) for booking in target.bookings(state))


def booking_view(state: PoolState, booking: Booking) -> BookingView:
    return BookingView(
        id=booking.id,
        gpus=gpu_refs(state, booking.gpus),
        starts_at=iso_time(booking.starts_at) or "",
        ends_at=iso_time(booking.ends_at),
        owner=booking.owner,
        reason=booking.reason,
        booked_by=booking.by,
        late_holders=tuple(late_leases(state, booking)),
    )


def _reservation_view(state: PoolState, target: Target) -> ReservationView | None:
    """The reservation, if it is of GPUs of the target."""
    reservation = state.reservation
    if reservation is None or target.node not in {None, *reservation.nodes}:
        return None
    after = state.find(reservation.after) if reservation.after else None
    return ReservationView(
        lease_id=reservation.lease_id,
        holder=state.queued(reservation.lease_id).request.who,
        gpus=gpu_refs(state, reservation.gpus),
        starts_at=iso_time(reservation.date + state.wall_offset_s) or "",
        basis=str(reservation.basis),  # type: ignore[arg-type]
        after=after.request.who if after else None,
    )


def group_views(state: PoolState) -> tuple[GroupView, ...]:
    return tuple(group_view(state, name, group) for name, group in sorted(state.groups.items()))


def group_view(state: PoolState, name: str, group: Group) -> GroupView:
    held = sum(state.usage.get(member, OwnerUse()).held for member in group.members)
    return GroupView(
        name=name,
        named=group.named,
        members=group.members,
        quota=group.quota,
        first_right=gpu_refs(state, group.first_right),
        held_gpus=round(held / FULL_WEIGHT, 3),
        queued=sum(state.queue.length_of(member) for member in group.members),
    )


async def forecast_view(
    pool: Pool, target: Target, *, gpus: int | None = None, model: str | None = None, owner: str | None = None
) -> ForecastView:
    """What a request of this owner may expect; of the usual sizes and all models unless some are given. It yields to other work
    in between.
    """
    await pool.caught_up()
    found: list[Forecast] = []
    if pool.trouble is None:
        sizes = {} if gpus is None else {"sizes": (gpus,)}
        usual = usual_wishes(pool.state, **sizes) if model is None else _sized(model, usual_wishes(pool.state, **sizes))
        forecasts, share = Forecasts(pool.state, pool.now(), [_on(target, each) for each in usual], owner), LoopShare()
        for _ in forecasts.steps():
            await share.yield_if_due()
        found = forecasts.found
    counts = _counts(pool, target)
    # A pool of one model has forecasts for any model only.
    by_model = {
        name: [each for each in found if each.wishes.model == (name if len(counts) > 1 else None)] for name in counts
    }
    is_one = gpus is not None or model is not None
    now = iso_time(pool.wall_now()) if pool.is_open else None
    return ForecastView(
        node=target.name(pool.node),
        now=now,
        can_grant=pool.trouble is None,
        starts=_starts(pool, [each for each in found if each.wishes.model == model], now, is_one=is_one),
        models=()
        if is_one
        else tuple(
            ModelForecast(model=name, gpus=total, free=free, starts=_starts(pool, by_model[name], now, is_one=False))
            for name, (total, free) in counts.items()
        ),
    )


def _sized(model: str, usual: Sequence[Wishes]) -> list[Wishes]:
    return [replace(each, model=model) for each in usual if each.model is None]


def _on(target: Target, wishes: Wishes) -> Wishes:
    return wishes if target.node is None else replace(wishes, node=target.node)


def _counts(pool: Pool, target: Target) -> dict[str | None, tuple[int, int]]:
    """How many GPUs there are of each model, and how many of them are free; most GPUs first."""
    total: Counter[str | None] = Counter()
    free: Counter[str | None] = Counter()
    for slot, state in gpu_states(pool):
        if target.node in {None, slot.key.node}:
            name = slot.gpu.name if slot.gpu else None
            total[name] += 1
            free[name] += state == "free"
    return {name: (number, free[name]) for name, number in total.most_common()}


def _starts(pool: Pool, found: Sequence[Forecast], now: str | None, *, is_one: bool) -> tuple[ForecastStart, ...]:
    """The starts; what would be refused is left out, unless it was asked for."""
    return tuple(_start(pool, each, now) for each in found if is_one or each.when is not When.NEVER)


def _start(pool: Pool, found: Forecast, now: str | None) -> ForecastStart:
    start = partial(ForecastStart, gpus=found.wishes.gpus, why=found.why)
    if found.when is When.NOW:
        return start(at=now, basis="declared")
    if found.start is None:
        return start(at=None, basis="unknown")
    at = iso_time(found.start.at + pool.state.wall_offset_s)
    return start(at=at, basis=cast("DateBasis", str(found.start.basis)))


def predicted_ends(pool: Pool, target: Target) -> tuple[ExpectedEnd, ...]:
    """Until when the leases without a time limit will probably last; those that nothing tells of are left out."""
    state, now = pool.state, pool.now()
    planner = Planner(state, now, Withheld(state, now))
    found = []
    for lease_id in target.holders(state):
        lease = state.leases[lease_id]
        if isinstance(lease, ActiveLease) and lease.ends is None and (end := planner.end_of(lease_id).at) < inf:
            found.append(ExpectedEnd(lease_id=lease_id, at=iso_time(end + state.wall_offset_s)))
    return tuple(found)
