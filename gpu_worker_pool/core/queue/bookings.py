"""Bookings: GPUs that are kept for an owner, or out of service, from a date on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState

from .eligibility import is_suitable
from .refusal import was_or_were, why_unservable

# A pass over the queue looks at all bookings. Drains that are planned do not count: maintenance must not wait.
MOST_BOOKINGS = 256
MOST_OF_ONE_OWNER = 32


def book(
    state: PoolState, booking: Booking, wishes: Wishes, now: float, *, must_be_free: bool = False
) -> Booking | str:
    """The booking with its GPUs, or why it cannot be had."""
    if booking.ends_at is not None and booking.ends_at <= booking.starts_at:
        return "it would end before it begins; give a later end"
    if booking.ends_at is not None and booking.ends_at <= now + state.wall_offset_s:
        return "its end is in the past; give a later end"
    if (why := _why_too_many(state, booking)) is not None:
        return why
    if wishes.nodes > 1 and not booking.gpus:
        return f"{wishes} {was_or_were(wishes)} asked for; a booking is for GPUs of one node; book each node by itself"
    unknown = [key for key in booking.gpus if key not in state.slots]
    if unknown:
        return f"no GPU {unknown[0].uuid} is known on node {unknown[0].node}"
    if not booking.gpus and (why := why_unservable(state, wishes)) is not None:
        return why
    chosen = booking.gpus or _choose(state, booking, wishes)
    if not chosen:
        return f"no node has {wishes} that are not booked at that time"
    for other in state.bookings.values():
        # What an owner has booked does not stop maintenance.
        if booking.is_drain and not other.is_drain:
            continue
        if other.id != booking.id and _overlap(booking, other) and set(chosen) & set(other.gpus):
            return (
                f"booking {other.id} has one of these GPUs at that time, for {other.owner or 'maintenance'}; choose another "
                "time or other GPUs, or cancel that one"
            )
    booked = replace(booking, gpus=chosen)
    if must_be_free and (late := late_leases(state, booked)):
        return (
            f"{', '.join(late)} may still hold one of these GPUs then, because nothing ends that lease earlier. "
            "Choose a later start or other GPUs; an operator or an administrator may book them anyway"
        )
    return booked


def _why_too_many(state: PoolState, booking: Booking) -> str | None:
    if booking.is_drain or booking.id in state.bookings:
        return None
    others = [other for other in state.bookings.values() if not other.is_drain]
    if len(others) >= MOST_BOOKINGS:
        return f"there are {MOST_BOOKINGS} bookings, which is the limit; cancel one of them first"
    if sum(other.owner == booking.owner for other in others) >= MOST_OF_ONE_OWNER:
        whose = booking.owner or "maintenance"
        return f"{whose} has {MOST_OF_ONE_OWNER} bookings already, which is the limit of one owner; cancel one of them first"
    return None


def late_leases(state: PoolState, booking: Booking) -> list[str]:
    """The holders on booked GPUs, other than its owner, whose leases nothing ends before the booking begins."""
    lease_ids = dict.fromkeys(
        lease_id for key in booking.gpus if key in state.slots for lease_id in state.slots[key].occupants
    )
    late = (state.leases[lease_id] for lease_id in lease_ids if _is_late(state, lease_id, booking))
    return list(dict.fromkeys(lease.request.who for lease in late))


def _is_late(state: PoolState, lease_id: str, booking: Booking) -> bool:
    lease = state.leases[lease_id]
    if not isinstance(lease, ActiveLease) or lease.request.preemptible:
        return False  # it makes room in time
    if booking.owner is not None and lease.request.holder.owner == booking.owner:
        return False
    ends = lease.ends
    return ends is None or ends > state.span_of(booking)[0]


def is_repeated(state: PoolState, known: Booking, booking: Booking, wishes: Wishes) -> bool:
    """Whether a booking is the same as one that is known, and so are the GPUs that are wished for."""
    if booking.gpus:
        return booking == known
    if replace(booking, gpus=known.gpus) != known or (len(known.gpus), 1) != (wishes.gpus, wishes.nodes):
        return False
    named, thresholds = state.facts.named(wishes), state.settings.thresholds_for(wishes)
    return all(
        wishes.node in {None, key.node}
        and (named is None or key in named)
        and state.facts.of(key).could_serve(wishes, thresholds)
        for key in known.gpus
        if key in state.slots
    )


def _choose(state: PoolState, booking: Booking, wishes: Wishes) -> tuple[GpuKey, ...]:
    """GPUs of one node that nothing keeps at that time: first those whose leases are sure to have ended by then."""
    others = (other for other in state.bookings.values() if other.id != booking.id and _overlap(booking, other))
    taken = {key for other in others for key in other.gpus}
    by_node: dict[str, list[tuple[bool, float, GpuKey]]] = defaultdict(list)
    for slot in state.slots_on(wishes.node):
        if slot.key not in taken and slot.reading is not None and is_suitable(state, slot, wishes):
            is_late = any(_is_late(state, lease_id, booking) for lease_id in slot.occupants)
            by_node[slot.key.node].append((is_late, slot.reading.gpu.place, slot.key))
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
        starts, ends = state.span_of(booking)
        grace_s, over = state.settings.preempt_grace_s, ev.Configured(now, "bookings", (booking.id,), None)
        if ends <= now:
            events.append(over)
            continue
        for lease in map(state.active, sorted(state.preemptible) if now >= starts - grace_s else ()):
            if lease.ending is None and is_in_the_way(state, lease, booking, now):
                end = max(starts, now + grace_s)
                end = end if lease.limit is None else min(end, lease.limit)
                events.append(ev.LeaseWarned(now, lease.id, EndReason.PREEMPTED, end))
        if booking.is_drain and starts <= now:
            events += [ev.Configured(now, "excluded", key, booking.reason) for key in booking.gpus]
            events.append(over)
    return events


def is_in_the_way(state: PoolState, lease: ActiveLease, booking: Booking, now: float) -> bool:
    """Whether a preemptible lease must make room for a booking that begins or has begun."""
    starts, ends = state.span_of(booking)
    if not starts - state.settings.preempt_grace_s <= now < ends:
        return False
    if booking.owner is not None and lease.request.holder.owner == booking.owner:
        return False
    if lease.limit is not None and lease.limit <= starts:
        return False  # it ends in time by itself
    return not set(booking.gpus).isdisjoint(lease.gpus)
