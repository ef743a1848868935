"""Bookings: GPUs that an administrator keeps for an owner, or out of service, from a date on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.booking import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import Wishes, matches_model
from gpu_worker_pool.core.model.state import PoolState

from .eligibility import is_suitable
from .forecast import Forecast
from .refusal import was_or_were

# A pass over the queue looks at all bookings.
MOST_BOOKINGS = 256


def book(state: PoolState, booking: Booking, wishes: Wishes, now: float) -> Booking | str:
    """The booking with its GPUs, or why it cannot be had."""
    wall_now = now + state.wall_offset_s
    if booking.ends_at is not None and booking.ends_at <= max(booking.starts_at, wall_now):
        return "it would be over before it begins; give an end that is later"
    if len(state.bookings) >= MOST_BOOKINGS and booking.id not in state.bookings:
        return f"there are {MOST_BOOKINGS} bookings already, which is the limit; cancel one of them first"
    if wishes.nodes > 1 and not booking.gpus:
        return f"{wishes} {was_or_were(wishes)} asked for; a booking has GPUs of one node. Book each node by itself"
    unknown = [key for key in booking.gpus if key not in state.slots]
    if unknown:
        return f"no GPU {unknown[0].uuid} is known on node {unknown[0].node}"
    chosen = booking.gpus or _choose(state, booking, wishes, now)
    if not chosen:
        return f"no node has {wishes} that are not booked at that time"
    for other in state.bookings.values():
        if other.id != booking.id and _overlap(booking, other) and set(chosen) & set(other.gpus):
            return f"booking {other.id} ({other.reason}) has one of these GPUs at that time"
    return replace(booking, gpus=chosen)


def is_repeated(state: PoolState, known: Booking, booking: Booking, wishes: Wishes) -> bool:
    """Whether a booking is the same as one that is known, and so are the GPUs that are wished for."""
    if booking.gpus:
        return booking == known
    if replace(booking, gpus=known.gpus) != known or (len(known.gpus), 1) != (wishes.gpus, wishes.nodes):
        return False
    if wishes.among is not None and not state.capacity.named(wishes.among) >= set(known.gpus):
        return False
    read = [state.slots[key].reading for key in known.gpus if key in state.slots]
    return all(matches_model(wishes.model, reading.gpu.name) for reading in read if reading is not None)


def _choose(state: PoolState, booking: Booking, wishes: Wishes, now: float) -> tuple[GpuKey, ...]:
    """GPUs of one node that nothing keeps at that time: first those whose leases are sure to have ended by then."""
    others = (other for other in state.bookings.values() if other.id != booking.id and _overlap(booking, other))
    taken = {key for other in others for key in other.gpus}
    starts = booking.starts_at - state.wall_offset_s
    forecast = Forecast(state, now)
    by_node: dict[str, list[tuple[bool, float, GpuKey]]] = defaultdict(list)
    for slot in state.slots.values():
        if slot.key not in taken and slot.reading is not None and is_suitable(state, slot, wishes):
            is_late = any(forecast.end_of(lease_id).at > starts for lease_id in slot.occupants)
            by_node[slot.key.node].append((is_late, slot.reading.gpu.index, slot.key))
    chosen = [sorted(found)[: wishes.gpus] for _, found in sorted(by_node.items()) if len(found) >= wishes.gpus]
    if not chosen:
        return ()
    return tuple(key for _, _, key in min(chosen, key=lambda gpus: sum(is_late for is_late, _, _ in gpus)))


def _overlap(one: Booking, other: Booking) -> bool:
    return (other.ends_at is None or one.starts_at < other.ends_at) and (
        one.ends_at is None or other.starts_at < one.ends_at
    )


def due_bookings(state: PoolState, now: float) -> list[ev.Event]:
    """What bookings bring about: preemptible leases make room before one begins, and one without an end becomes an
    exclusion.
    """
    events: list[ev.Event] = []
    for booking in state.bookings.values():
        starts = booking.starts_at - state.wall_offset_s
        grace_s = state.settings.preempt_grace_s
        if now < starts - grace_s:
            continue
        if booking.ends_at is not None and booking.ends_at - state.wall_offset_s <= now:
            events.append(ev.BookingEnded(now, booking.id))
        elif booking.ends_at is None and booking.owner is None and starts <= now:
            events += [ev.GpuExcluded(now, key, booking.reason) for key in booking.gpus]
            events.append(ev.BookingEnded(now, booking.id))
        else:
            in_the_way = {
                lease_id
                for key in booking.gpus
                for lease_id in (state.slots[key].occupants if key in state.slots else ())
                if lease_id in state.preemptible and not _is_ending(state, lease_id)
                if is_in_the_way(state, lease_id, booking, now)
            }
            events += [
                ev.LeaseWarned(now, lease_id, EndReason.PREEMPTED, max(starts, now + grace_s))
                for lease_id in sorted(in_the_way)
            ]
    return events


def is_in_the_way(state: PoolState, lease_id: str, booking: Booking, now: float) -> bool:
    """Whether a preemptible lease must make room for a booking that begins or has begun."""
    lease = state.leases[lease_id]
    if booking.owner is not None and lease.request.holder.owner == booking.owner:
        return False
    ends_at, starts = booking.ends_at, booking.starts_at - state.wall_offset_s
    if now < starts - state.settings.preempt_grace_s or (ends_at is not None and ends_at - state.wall_offset_s <= now):
        return False
    return not set(booking.gpus).isdisjoint(getattr(lease, "gpus", ()))


def _is_ending(state: PoolState, lease_id: str) -> bool:
    return getattr(state.leases[lease_id], "ending", None) is not None
