"""Facts in, decisions out: `decide` says what happens and changes nothing.

The time is an argument. A time before the pool's clock counts as the clock's time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey, ProcessId, Reading
from gpu_worker_pool.core.model.lease import (
    FULL_WEIGHT,
    ActiveLease,
    DrainingLease,
    EndedLease,
    EndReason,
    LiveLease,
    QueuedLease,
    custodian,
)
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.assignment import serve_queue
from gpu_worker_pool.core.queue.booking import book, due_bookings, is_repeated
from gpu_worker_pool.core.queue.idleness import idle_warnings, withdrawn
from gpu_worker_pool.core.queue.placement import Grant
from gpu_worker_pool.core.queue.quotas import quota_of, time_limit_of, weight_of, why_beyond_limits
from gpu_worker_pool.core.queue.refusal import why_unservable
from gpu_worker_pool.core.queue.sub_leases import serve_inside, why_refused_inside

from .decide_nodes import announce_node, forget_node, joined_by, rename_node, silence_node, take_over
from .lease_ends import all_ended
from .recovering import recover_lease

# Names a caller without a name, so that its release is told from the holder's own.
UNNAMED = "an unnamed caller"

# So many leases end by one tick. While a decision lasts, no caller is answered.
MOST_DUE = 256


def decide(state: PoolState, command: cmd.Command, now: float) -> list[ev.Event]:
    """The events that a command leads to. The same state, command and time give the same events."""
    return _DECIDERS[type(command)](state, command, max(now, state.clock))


def _request_lease(state: PoolState, command: cmd.RequestLease, now: float) -> list[ev.Event]:
    lease_id, request = command.lease_id, command.request
    known = state.find(lease_id)
    if known is not None:
        if known.request != request:
            return [ev.LeaseConflicted(now, lease_id)]
        return [ev.LeasesRenewed(now, (lease_id,))] if isinstance(known, QueuedLease) else []
    if request.parent is not None:
        why = why_refused_inside(state, request)
    else:
        why = why_unservable(state, request.wishes) or why_beyond_limits(state, request)
    if why:
        return [ev.LeaseRefused(now, lease_id, why)]
    owner, settings = request.holder.owner, state.settings
    if state.owned.get(owner, 0) >= settings.max_leases_per_owner:
        return [ev.TooManyLeases(now, lease_id, settings.max_leases_per_owner, owner)]
    queued = ev.LeaseQueued(now, lease_id, request, state.next_seq, now + state.wall_offset_s)
    if request.parent is not None:
        limit = settings.max_queued_per_owner
        is_full = len(state.inside.waiting_in(request.parent)) >= limit
        return [ev.QueueFull(now, lease_id, limit, is_owners_limit=True, owner=owner) if is_full else queued]
    if len(state.queue) >= settings.max_queued:
        return [ev.QueueFull(now, lease_id, settings.max_queued, is_owners_limit=False, owner=owner)]
    quota = quota_of(state, owner)
    limit = settings.max_queued_per_owner
    limit = limit if quota.max_queued is None else min(limit, quota.max_queued)
    if state.queue.length_of(owner) >= limit:
        return [ev.QueueFull(now, lease_id, limit, is_owners_limit=True, owner=owner)]
    return [queued]


def _renew(state: PoolState, command: cmd.Renew, now: float) -> list[ev.Event]:
    renewed: list[str] = []
    refused: list[ev.Event] = []
    for lease_id in dict.fromkeys(command.lease_ids):
        lease = state.find(lease_id)
        if lease is None:
            refused.append(ev.LeaseUnknown(now, lease_id))
        elif isinstance(lease, DrainingLease):
            refused.append(ev.RenewalRefused(now, lease_id, lease.ended.reason))
        elif isinstance(lease, EndedLease):
            refused.append(ev.RenewalRefused(now, lease_id, lease.reason))
        elif state.epoch > 0 and isinstance(lease, ActiveLease):
            refused.append(ev.KeptByBox(now, lease_id, custodian(lease)))
        elif (due_at := state.deadlines.due_at(lease_id)) is not None and due_at <= state.live(now):
            refused.append(ev.RenewalRefused(now, lease_id, EndReason.EXPIRED))
        else:
            renewed.append(lease_id)
    return [*([ev.LeasesRenewed(now, tuple(renewed))] if renewed else []), *refused]


def _release(state: PoolState, command: cmd.Release, now: float) -> list[ev.Event]:
    is_queued = isinstance(state.leases.get(command.lease_id), QueuedLease)
    reason = EndReason.CANCELLED if is_queued else EndReason.RELEASED
    by = None if command.is_holder else command.by or UNNAMED
    return _end(state, command.lease_id, reason, now, by=by, why=command.why)


def _revoke(state: PoolState, command: cmd.Revoke, now: float) -> list[ev.Event]:
    return _end(state, command.lease_id, EndReason.REVOKED, now, by=command.by, why=command.why)


def _report_death(state: PoolState, command: cmd.ReportDeath, now: float) -> list[ev.Event]:
    return _end(state, command.lease_id, EndReason.HOLDER_DIED, now)


def _expire_lease(state: PoolState, command: cmd.ExpireLease, now: float) -> list[ev.Event]:
    return _end(state, command.lease_id, EndReason.EXPIRED, now)


def _end(
    state: PoolState, lease_id: str, reason: EndReason, now: float, *, by: str | None = None, why: str | None = None
) -> list[ev.Event]:
    """End a lease; one that has ended stays as it ended."""
    lease = state.find(lease_id)
    if lease is None:
        return [ev.LeaseUnknown(now, lease_id)]
    if isinstance(lease, (DrainingLease, EndedLease)):
        return []
    return [*all_ended(state, lease, reason, now, by, why)]


def _observe(state: PoolState, command: cmd.Observe, now: float) -> list[ev.Event]:
    readings = _newest(state, command.readings, now)
    if not readings:
        return []
    events: list[ev.Event] = [*joined_by(state, readings, now), ev.GpusObserved(now, readings)]
    for reading in readings:
        slot = state.slots.get(reading.gpu.key)
        if slot is None or not slot.occupants:
            continue
        members: Mapping[str, tuple[ProcessId, ...]] = slot.members
        if reading.processes is not None:
            members = slot.attribute(reading.processes)
            for lease_id, seen in members.items():
                known = slot.members.get(lease_id, ())
                if seen != known and set(seen) != set(known):
                    events.append(ev.ProcessesAttributed(now, lease_id, slot.key, seen))
        for lease_id in slot.occupants:
            lease = state.leases[lease_id]
            if (
                isinstance(lease, DrainingLease)
                and reading.at >= lease.since
                and _has_left(lease, members.get(lease_id, ()), reading, state.settings.context_mb)
            ):
                events.append(ev.GpuDrained(now, lease_id, slot.key))
    return [*events, *idle_warnings(state, readings, now)]


def _has_left(lease: DrainingLease, left: Collection[ProcessId], reading: Reading, context_mb: float) -> bool:
    """Whether an ended lease has left the GPU. A process that released it itself and runs on keeps a context there."""
    if not left:
        return True
    if not lease.was_left_by_holder or reading.processes is None:
        return False
    held_mb = [process.memory_mb for process in reading.processes if process.id in left]
    return len(held_mb) == len(left) and all(mb is not None and mb <= context_mb for mb in held_mb)


def _newest(state: PoolState, readings: tuple[Reading, ...], now: float) -> tuple[Reading, ...]:
    """The latest reading of each GPU, unless it is older than the known one. A reading that began before the take-over
    may have missed what the driver before granted; so may one of a node that has not announced itself since.
    """
    newest: dict[GpuKey, Reading] = {}
    for reading in readings:
        if reading.gpu.key.node not in state.announced or reading.at < state.taken_over:
            continue
        known = newest.get(reading.gpu.key)
        if known is None and (slot := state.slots.get(reading.gpu.key)) is not None:
            known = slot.reading
        at = min(reading.at, now)  # a reading from the future would never become stale
        if known is None or at >= known.at:
            newest[reading.gpu.key] = reading if at == reading.at else replace(reading, at=at)
    return tuple(newest.values())


def _tick(state: PoolState, _: cmd.Tick, now: float) -> list[ev.Event]:
    events: list[ev.Event] = []
    over: set[str] = set()
    # The others stay due: the next tick, at once, ends them.
    for lease_id in islice(state.deadlines.due(state.live(now)), MOST_DUE):
        lease: LiveLease = state.leases[lease_id]
        if isinstance(lease, DrainingLease):
            # The drain limit has passed: what is left of the lease is outside the pool from here on.
            events += [ev.GpuDrained(now, lease_id, key) for key in lease.gpus]
        else:
            ended = [event for event in all_ended(state, lease, EndReason.EXPIRED, now) if event.lease_id not in over]
            over.update(event.lease_id for event in ended)
            events += ended
    for lease_id in islice(state.timetable.due(now), MOST_DUE):
        if lease_id not in over:
            on_time = [event for event in _on_timetable(state, lease_id, now) if event.lease_id not in over]
            over.update(event.lease_id for event in on_time)
            events += on_time
    return events + [event for event in due_bookings(state, now) if getattr(event, "lease_id", None) not in over]


def _lose_time(_: PoolState, command: cmd.LoseTime, now: float) -> list[ev.Event]:
    return [ev.TimeLost(now, command.lost_s)]


def _set_wall_time(_: PoolState, command: cmd.SetWallTime, now: float) -> list[ev.Event]:
    return [ev.WallTimeSet(now, command.offset_s)]


def _on_timetable(state: PoolState, lease_id: str, now: float) -> list[ev.LeaseWarned | ev.LeaseEnded]:
    """Warn a lease of its time limit, or end it. Its holder is warned first, even if the server was away meanwhile."""
    lease = _active(state, lease_id)
    if lease.ending is not None:
        return [*all_ended(state, lease, lease.ending.reason, now)]
    return [ev.LeaseWarned(now, lease_id, EndReason.TIME_LIMIT, lease.end_if_warned(now))]


def _serve_queue(state: PoolState, _: cmd.ServeQueue, now: float) -> list[ev.Event]:
    found = serve_queue(state, now)
    inside = serve_inside(state)
    fences: dict[str, int] = {}
    events: list[ev.Event] = [ev.SubLeasesSettled(now, inside.settled)] if inside.settled else []
    for grant in (*inside.grants, *found.grants):
        fence = 1 + max([fences.get(key.node, state.fences.get(key.node, 0)) for key in grant.gpus])
        for key in grant.gpus:
            fences[key.node] = fence
        request = state.queued(grant.lease_id).request
        events.append(_granted(state, request, grant, fence, now))
        if request.parent is None:
            events += _taken_over(state, grant, now)
    for lease_id in found.victims:
        events.append(_preempted(state, lease_id, now))
    for lease_id in found.spared:
        events.append(withdrawn(_active(state, lease_id), now))
    if found.settled_until is not None:
        claims, undated = tuple(found.claims.items()), tuple(found.undated.items())
        events.append(ev.QueueSettled(now, found.settled_until, found.reservation, claims, undated))
    return events


def _granted(state: PoolState, request: Request, grant: Grant, fence: int, now: float) -> ev.LeaseGranted:
    # A lease inside another ends with it: limits that are not its own bind the other.
    is_inside = request.parent is not None
    limit_s = request.time_limit_s if is_inside else time_limit_of(state, request.holder.owner, request.time_limit_s)
    limit = None if limit_s is None else now + limit_s
    weight = 0
    for key in grant.gpus:
        reading = state.slots[key].reading
        weight += weight_of(reading.memory_total_mb if reading else None, request.wishes)
    is_usual = weight == FULL_WEIGHT * len(grant.gpus)
    granted_at = now + state.wall_offset_s
    return ev.LeaseGranted(now, grant.lease_id, grant.gpus, fence, granted_at, limit, None if is_usual else weight)


def _preempted(state: PoolState, lease_id: str, now: float) -> ev.LeaseWarned:
    lease = _active(state, lease_id)
    ends = now + state.settings.preempt_grace_s
    return ev.LeaseWarned(now, lease_id, EndReason.PREEMPTED, min(ends, lease.limit or ends))


def _active(state: PoolState, lease_id: str) -> ActiveLease:
    lease = state.leases[lease_id]
    assert isinstance(lease, ActiveLease), lease  # noqa: S101 - a broken invariant must not go on
    return lease


def _taken_over(state: PoolState, grant: Grant, now: float) -> list[ev.Event]:
    """The end of the leases that drain on GPUs that are granted. They are of the process that gets the GPU again: what they
    left is the new lease's. So they do not pile up, however often the process asks and releases.
    """
    events: list[ev.Event] = []
    for key in grant.gpus:
        slot = state.slots[key]
        if slot.occupants.draining:
            left = [lease_id for lease_id, occupant in slot.occupants.items() if occupant.is_draining]
            members = dict.fromkeys(process for lease_id in left for process in slot.members.get(lease_id, ()))
            if members:
                events.append(ev.ProcessesAttributed(now, grant.lease_id, key, tuple(members)))
            events += [ev.GpuDrained(now, lease_id, key) for lease_id in left]
    return events


def _exclude_gpu(state: PoolState, command: cmd.ExcludeGpu, now: float) -> list[ev.Event]:
    if command.gpu not in state.slots and command.gpu not in state.excluded:
        return [ev.GpuUnknown(now, command.gpu)]
    if state.excluded.get(command.gpu) == command.reason:
        return []
    return [ev.GpuExcluded(now, command.gpu, command.reason)]


def _include_gpu(state: PoolState, command: cmd.IncludeGpu, now: float) -> list[ev.Event]:
    if command.gpu in state.excluded:
        included: list[ev.Event] = [ev.GpuIncluded(now, command.gpu)]
        return [*included, ev.NewGpusExcluded(now, None)] if _speaks_for_all(state, command.gpu) else included
    return [] if command.gpu in state.slots else [ev.GpuUnknown(now, command.gpu)]


def _speaks_for_all(state: PoolState, key: GpuKey) -> bool:
    """Whether GPUs that are first seen later come into service: of those that a server has read since its start, this is the
    last one that is out for the same reason. Before it has read any, it may not have seen all that are there.
    """
    reason = state.new_gpus_excluded
    read = {slot.key for slot in state.slots.values() if slot.reading is not None}
    return reason is not None and key in read and all(state.excluded.get(other) != reason for other in read - {key})


def _ignore_process(state: PoolState, command: cmd.IgnoreProcess, now: float) -> list[ev.Event]:
    return [] if command.name in state.ignored_processes else [ev.ProcessIgnored(now, command.name)]


def _count_process(state: PoolState, command: cmd.CountProcess, now: float) -> list[ev.Event]:
    return [ev.ProcessCounted(now, command.name)] if command.name in state.ignored_processes else []


def _set_quota(state: PoolState, command: cmd.SetQuota, now: float) -> list[ev.Event]:
    if state.quotas.get(command.owner) == command.quota:
        return []
    return [ev.QuotaChanged(now, command.owner, command.quota)]


def _add_token(state: PoolState, command: cmd.AddToken, now: float) -> list[ev.Event]:
    token, known = command.token, state.tokens.get(command.token.digest)
    if known is not None and (known.name, known.role, known.note) == (token.name, token.role, token.note):
        return []
    return [ev.TokenAdded(now, token)]


def _revoke_token(state: PoolState, command: cmd.RevokeToken, now: float) -> list[ev.Event]:
    return [ev.TokenRevoked(now, command.digest)] if command.digest in state.tokens else []


def _book_gpus(state: PoolState, command: cmd.BookGpus, now: float) -> list[ev.Event]:
    known = state.bookings.get(command.booking.id)
    if known is not None and is_repeated(state, known, command.booking, command.wishes):
        return []
    booked = book(state, command.booking, command.wishes, now, must_be_free=command.must_be_free)
    if isinstance(booked, str):
        return [ev.BookingRefused(now, command.booking.id, booked)]
    return [ev.GpusBooked(now, booked)]


def _cancel_booking(state: PoolState, command: cmd.CancelBooking, now: float) -> list[ev.Event]:
    if command.booking_id not in state.bookings:
        return [ev.BookingRefused(now, command.booking_id, "no such booking is known; it may be over")]
    return [ev.BookingEnded(now, command.booking_id)]


_DECIDERS: dict[type[cmd.Command], Callable[[PoolState, Any, float], list[ev.Event]]] = {
    cmd.TakeOver: take_over,
    cmd.AnnounceNode: announce_node,
    cmd.RenameNode: rename_node,
    cmd.SilenceNode: silence_node,
    cmd.ForgetNode: forget_node,
    cmd.RequestLease: _request_lease,
    cmd.Renew: _renew,
    cmd.Release: _release,
    cmd.Revoke: _revoke,
    cmd.ReportDeath: _report_death,
    cmd.ExpireLease: _expire_lease,
    cmd.RecoverLease: recover_lease,
    cmd.Observe: _observe,
    cmd.Tick: _tick,
    cmd.LoseTime: _lose_time,
    cmd.SetWallTime: _set_wall_time,
    cmd.ServeQueue: _serve_queue,
    cmd.ExcludeGpu: _exclude_gpu,
    cmd.IncludeGpu: _include_gpu,
    cmd.IgnoreProcess: _ignore_process,
    cmd.CountProcess: _count_process,
    cmd.SetQuota: _set_quota,
    cmd.AddToken: _add_token,
    cmd.RevokeToken: _revoke_token,
    cmd.BookGpus: _book_gpus,
    cmd.CancelBooking: _cancel_booking,
}
