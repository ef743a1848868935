"""Bookings: GPUs that are kept for an owner, or out of service, from a date on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason
from gpu_worker_pool.core.model.request import Wishes, matches_model
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
        return "it would be over before it begins; give an end that is later"
    if booking.ends_at is not None and booking.ends_at <= now + state.wall_offset_s:
        return "its end has passed already; give an end that is later than now"
    if (why := _why_too_many(state, booking)) is not None:
        return why
    if wishes.nodes > 1 and not booking.gpus:
        return f"{wishes} {was_or_were(wishes)} asked for; a booking has GPUs of one node. Book each node by itself"
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
            f"{', '.join(late)} may still hold one of these GPUs then: nothing ends that lease before. Give a later start "
            "or other GPUs; an operator or an administrator may book all the same"
        )
    return booked


def _why_too_many(state: PoolState, booking: Booking) -> str | None:
    if booking.is_drain or booking.id in state.bookings:
        return None
    others = [other for other in state.bookings.values() if not other.is_drain]
    if len(others) >= MOST_BOOKINGS:
        return f"there are {MOST_BOOKINGS} bookings already, which is the limit; cancel one of them first"
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
    return ends is None or ends > booking.starts_at - state.wall_offset_s


def is_repeated(state: PoolState, known: Booking, booking: Booking, wishes: Wishes) -> bool:
    """Whether a booking is the same as one that is known, and so are the GPUs that are wished for."""
    if booking.gpus:
        return booking == known
    if replace(booking, gpus=known.gpus) != known or (len(known.gpus), 1) != (wishes.gpus, wishes.nodes):
        return False
    if wishes.node is not None and any(key.node != wishes.node for key in known.gpus):
        return False
    if wishes.among is not None and not state.facts.named(wishes.among) >= set(known.gpus):
        return False
    read = [state.slots[key].reading for key in known.gpus if key in state.slots]
    return all(matches_model(wishes.model, reading.gpu.name) for reading in read if reading is not None)


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
        starts = booking.starts_at - state.wall_offset_s
        grace_s = state.settings.preempt_grace_s
        if now < starts - grace_s:
            continue
        if booking.ends_at is not None and booking.ends_at - state.wall_offset_s <= now:
            events.append(ended(booking.id, now))
            continue
        in_the_way = {
            lease_id
            for key in booking.gpus
            for lease_id in (state.slots[key].occupants if key in state.slots else ())
            if lease_id in state.preemptible and not _is_ending(state, lease_id)
            if is_in_the_way(state, lease_id, booking, now)
        }
        for lease_id in sorted(in_the_way):
            limit, ends = getattr(state.leases[lease_id], "limit", None), max(starts, now + grace_s)
            ends = ends if limit is None else min(ends, limit)
            events.append(ev.LeaseWarned(now, lease_id, EndReason.PREEMPTED, ends))
        if booking.is_drain and starts <= now:
            events += [ev.Configured(now, "excluded", key, booking.reason) for key in booking.gpus]
            events.append(ended(booking.id, now))
    return events


def ended(booking_id: str, now: float) -> ev.Configured:
    return ev.Configured(now, "bookings", (booking_id,), None)


def is_in_the_way(state: PoolState, lease_id: str, booking: Booking, now: float) -> bool:
    """Whether a preemptible lease must make room for a booking that begins or has begun."""
    lease = state.leases[lease_id]
    if booking.owner is not None and lease.request.holder.owner == booking.owner:
        return False
    ends_at, starts = booking.ends_at, booking.starts_at - state.wall_offset_s
    if now < starts - state.settings.preempt_grace_s or (ends_at is not None and ends_at - state.wall_offset_s <= now):
        return False
    limit = getattr(lease, "limit", None)
    if limit is not None and limit <= starts:
        return False  # it ends in time by itself
    return not set(booking.gpus).isdisjoint(getattr(lease, "gpus", ()))


def _is_ending(state: PoolState, lease_id: str) -> bool:
    return getattr(state.leases[lease_id], "ending", None) is not None
