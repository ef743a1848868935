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
from gpu_worker_pool.core.model.configured import ALL, AccessToken, Group, row_key
from gpu_worker_pool.core.model.events import RefusalCode, Refused
from gpu_worker_pool.core.model.gpu import GpuKey, ProcessId, Reading
from gpu_worker_pool.core.model.lease import FULL_WEIGHT, ActiveLease, EndedLease, EndReason, QueuedLease, custodian
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.bookings import book, due_bookings, is_repeated
from gpu_worker_pool.core.queue.idleness import idle_warnings, withdrawn
from gpu_worker_pool.core.queue.owners import quota_of, time_limit_of, weight_of, why_beyond_limits, why_no_group
from gpu_worker_pool.core.queue.placement import Grant
from gpu_worker_pool.core.queue.refusal import why_unservable
from gpu_worker_pool.core.queue.serve import QueuePass, serve_queue

from .decide_nodes import announce_node, ended_lease, forget_node, joined_by, silence_node, take_over
from .recovering import end_kept, recover_lease

# Names a caller without a name, so that its release is told from the holder's own.
UNNAMED = "an unnamed caller"

# The leases that one tick ends at most. While a decision lasts, no caller is answered.
MOST_DUE = 256
# A restart loses at most this much of what active leases were seen to use.
MEASURED_EVERY_S = 60.0


def decide(state: PoolState, command: cmd.Command, now: float) -> list[ev.Event]:
    """The events that a command leads to. The same state, command and time give the same events."""
    return _DECIDERS[type(command)](state, command, max(now, state.clock))


def _request_lease(state: PoolState, command: cmd.RequestLease, now: float) -> list[ev.Event]:
    lease_id, request = command.lease_id, command.request
    known = state.find(lease_id)
    if known is not None:
        if known.request != request:
            return [Refused(now, RefusalCode.CONFLICT, lease_id)]
        is_heard = isinstance(known, QueuedLease) or lease_id in state.untaken
        return [ev.LeasesRenewed(now, (lease_id,))] if is_heard else []
    refused = why_refused(state, request)
    if refused is not None:
        return [Refused(now, refused[0], lease_id, refused[1])]
    newcomer = QueuedLease(lease_id, request, state.next_seq, now + state.wall_offset_s)
    # It is granted at once, or queued. Where others are still to be served first, it waits for that.
    found = serve_queue(state, now, newcomer=newcomer) if state.is_settled_at(now) else QueuePass()
    return served(state, found, now, newcomer)


def why_refused(state: PoolState, request: Request) -> tuple[RefusalCode, str] | None:
    """Why the pool does not take this request: it can never be served, or there are too many, of its owner or of all."""
    if why := why_unservable(state, request.wishes) or why_beyond_limits(state, request):
        return RefusalCode.UNSERVABLE, why
    owner, settings = request.holder.owner, state.settings
    most = settings.max_leases_per_owner
    if state.live_count.get(owner, 0) >= most:
        whose = f"{owner} has" if owner else "Callers that named no owner have"
        why = f"{whose} {most} leases already, active or waiting, which is the limit; release some first"
        return RefusalCode.TOO_MANY_LEASES, why
    if len(state.queue) >= settings.max_queued:
        return RefusalCode.QUEUE_FULL, f"{settings.max_queued} requests are waiting, which is the limit; try later"
    most, own_most = settings.max_queued_per_owner, quota_of(state, owner).max_queued
    most = most if own_most is None else min(most, own_most)
    if state.queue.length_of(owner) >= most:
        whose = owner or "callers that named no owner"
        return RefusalCode.OWNERS_QUEUE_FULL, f"{most} requests of {whose} are waiting, which is the limit; try later"
    return None


def _renew(state: PoolState, command: cmd.Renew, now: float) -> list[ev.Event]:
    renewed: list[str] = []
    refused: list[ev.Event] = []
    for lease_id in dict.fromkeys(command.lease_ids):
        lease = state.find(lease_id)
        if lease is None:
            refused.append(Refused(now, RefusalCode.UNKNOWN_LEASE, lease_id))
        elif isinstance(lease, EndedLease):
            refused.append(Refused(now, RefusalCode.ENDED, lease_id, lease.reason))
        elif lease_id in state.untaken:
            renewed.append(lease_id)  # it is taken up, in a fleet too, and late too: it was not withdrawn yet
        elif state.epoch > 0 and isinstance(lease, ActiveLease):
            refused.append(Refused(now, RefusalCode.KEPT_BY_BOX, lease_id, custodian(lease)))
        elif (due_at := state.ttl_due.due_at(lease_id)) is not None and due_at <= state.live(now):
            refused.append(Refused(now, RefusalCode.ENDED, lease_id, EndReason.EXPIRED))
        else:
            renewed.append(lease_id)
    return [*([ev.LeasesRenewed(now, tuple(renewed))] if renewed else []), *refused]


def _report_absence(state: PoolState, command: cmd.ReportAbsence, now: float) -> list[ev.Event]:
    is_queued = isinstance(state.leases.get(command.lease_id), QueuedLease)
    return [ev.ClientLeft(now, command.lease_id)] if is_queued and command.lease_id not in state.away else []


def _release(state: PoolState, command: cmd.Release, now: float) -> list[ev.Event]:
    is_queued = isinstance(state.leases.get(command.lease_id), QueuedLease)
    reason = EndReason.CANCELLED if is_queued else EndReason.RELEASED
    by = None if command.is_holder else command.by or UNNAMED
    return _end(state, cmd.EndLease(command.lease_id, reason, by, command.why), now)


def _end(state: PoolState, command: cmd.EndLease, now: float) -> list[ev.Event]:
    """End a lease; one that has ended stays as it ended."""
    lease = state.find(command.lease_id)
    if lease is None:
        return [Refused(now, RefusalCode.UNKNOWN_LEASE, command.lease_id)]
    if isinstance(lease, EndedLease):
        return []
    return [ended_lease(state, lease, command.reason, now, command.by, command.why)]


def _withdraw(state: PoolState, command: cmd.WithdrawGrant, now: float) -> list[ev.Event]:
    is_granted = isinstance(state.leases.get(command.lease_id), ActiveLease)
    return [ev.GrantWithdrawn(now, command.lease_id, by_box=True)] if is_granted else []


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
                isinstance(lease, EndedLease)
                and lease.drains_since is not None
                and reading.at >= lease.drains_since
                and _has_left(lease, members.get(lease_id, ()), reading, state.settings.context_mb)
            ):
                events.append(ev.GpuDrained(now, lease_id, slot.key))
    if state.lease_uses and now - state.measured >= MEASURED_EVERY_S:
        events.append(ev.LeasesMeasured(now, tuple(state.lease_uses.values())))
    return [*events, *idle_warnings(state, readings, now)]


def _has_left(lease: EndedLease, left: Collection[ProcessId], reading: Reading, context_mb: float) -> bool:
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
    for lease_id in islice(state.ttl_due.due(state.live(now)), MOST_DUE):
        lease = state.leases[lease_id]
        if isinstance(lease, ActiveLease) and lease_id in state.untaken and _is_used(state, lease):
            # It is taken up by that, and lives on.
            events.append(ev.LeasesRenewed(now, (lease_id,)))
            continue
        over.add(lease_id)
        if isinstance(lease, EndedLease):
            # The drain limit has passed: what is left of the lease is outside the pool from here on.
            events += [ev.GpuDrained(now, lease_id, key) for key in lease.draining]
        elif lease_id in state.untaken:
            events.append(ev.GrantWithdrawn(now, lease_id))
        else:
            events.append(ended_lease(state, lease, EndReason.EXPIRED, now))
    for lease_id in islice(state.limit_due.due(now), MOST_DUE):
        if lease_id not in over:
            over.add(lease_id)
            events.append(_at_limit(state, lease_id, now))
    return events + [event for event in due_bookings(state, now) if getattr(event, "lease_id", None) not in over]


def _is_used(state: PoolState, lease: ActiveLease) -> bool:
    """Whether its processes are seen on a GPU."""
    return any(state.slots[key].members.get(lease.id) for key in lease.gpus)


def _at_limit(state: PoolState, lease_id: str, now: float) -> ev.LeaseWarned | ev.LeaseEnded:
    """Warn a lease of its time limit, or end it. Its holder is warned first, even if the server was away meanwhile."""
    lease = state.active(lease_id)
    if lease.ending is not None:
        return ended_lease(state, lease, lease.ending.reason, now)
    return ev.LeaseWarned(now, lease_id, EndReason.TIME_LIMIT, lease.end_if_warned(now))


def _serve_queue(state: PoolState, _: cmd.ServeQueue, now: float) -> list[ev.Event]:
    if state.is_settled_at(now):
        return []
    found = serve_queue(state, now)
    return served(state, found, now)


def served(state: PoolState, found: QueuePass, now: float, newcomer: QueuedLease | None = None) -> list[ev.Event]:
    """The events of a pass over the queue. A newcomer that was not served is queued."""
    events: list[ev.Event] = []
    if newcomer is not None and (found.grant is None or found.grant.lease_id != newcomer.id):
        events.append(ev.LeaseQueued(now, newcomer.id, newcomer.request, newcomer.seq, newcomer.requested_at))
    if found.grant is not None:
        events += [_granted(state, found.grant, now, newcomer), *_absorb_draining(state, found.grant, now)]
    events += [preempted(state, lease_id, now) for lease_id in found.victims]
    events += [withdrawn(state.active(lease_id), now) for lease_id in found.spared]
    if found.settled_until is not None:
        events.append(ev.QueueSettled(now, found.settled_until, found.reservation, tuple(found.claims.items())))
    return events


def _granted(state: PoolState, grant: Grant, now: float, newcomer: QueuedLease | None) -> ev.LeaseGranted:
    is_new = newcomer is not None and newcomer.id == grant.lease_id
    waited = newcomer if newcomer is not None and is_new else state.queued(grant.lease_id)
    request, gpus = waited.request, grant.gpus
    fence = 1 + max([state.fences.get(key.node, 0) for key in gpus])
    limit_s = time_limit_of(state, request.holder.owner, request.time_limit_s)
    weight = sum(weight_of(state.facts.of(key).total_mb, request.wishes) for key in gpus)
    granted_at, take_up_s = now + state.wall_offset_s, state.settings.take_up_s
    if waited.requested_at == granted_at:
        take_up_s = None  # the answer to the request itself
    elif take_up_s is not None:
        within_s = state.settings.away_take_up_s if waited.id in state.away else take_up_s
        take_up_s = min(within_s, request.ttl_s / 2)
    return ev.LeaseGranted(
        now,
        waited.id,
        gpus,
        fence,
        granted_at,
        None if limit_s is None else now + limit_s,
        None if weight == FULL_WEIGHT * len(gpus) else weight,
        take_up_s,
        request if is_new else None,
        waited.seq if is_new else 0,
    )


def preempted(state: PoolState, lease_id: str, now: float) -> ev.LeaseWarned:
    lease = state.active(lease_id)
    ends = now + state.settings.preempt_grace_s
    return ev.LeaseWarned(now, lease_id, EndReason.PREEMPTED, min(ends, lease.limit or ends))


def _absorb_draining(state: PoolState, grant: Grant, now: float) -> list[ev.Event]:
    """The end of the leases that drain on GPUs that are granted. They are of the process that gets the GPU again: what they
    left is the new lease's. So they do not pile up, however often the process asks and releases.
    """
    events: list[ev.Event] = []
    for key in grant.gpus:
        slot = state.slots[key]
        if slot.is_draining:
            left = [lease_id for lease_id, occupant in slot.occupants.items() if occupant.is_draining]
            members = dict.fromkeys(process for lease_id in left for process in slot.members.get(lease_id, ()))
            if members:
                events.append(ev.ProcessesAttributed(now, grant.lease_id, key, tuple(members)))
            events += [ev.GpuDrained(now, lease_id, key) for lease_id in left]
    return events


def _configure(state: PoolState, command: cmd.Configure, now: float) -> list[ev.Event]:
    """Set or remove a row; nothing happens if it is so already."""
    table, key, value = command.table, command.key, command.value
    rows: Mapping[Any, Any] = getattr(state, table)
    row = rows.get(row_key(table, key))
    if table == "excluded" and GpuKey(*key) not in state.slots and row is None:
        return [Refused(now, RefusalCode.UNKNOWN_GPU, key[1], f"no GPU {key[1]} is known on node {key[0]}")]
    if table == "bookings" and row is None and value is None:
        return [Refused(now, RefusalCode.BOOKING, key[0], "no such booking is known; it may be over")]
    if isinstance(value, Group) and (why := why_no_group(state, key[0], value)) is not None:
        return [Refused(now, RefusalCode.GROUP, key[0], why)]
    if row == value or (isinstance(value, AccessToken) and isinstance(row, AccessToken) and row.says(value)):
        return []
    events: list[ev.Event] = [ev.Configured(now, table, key, value)]
    if table == "excluded" and value is None and _speaks_for_all(state, GpuKey(*key)):
        events.append(ev.Configured(now, "new_gpus", ALL, None))
    return events


def _speaks_for_all(state: PoolState, key: GpuKey) -> bool:
    """Whether GPUs that are first seen later come into service: of those that a server has read since its start, this is the
    last one that is out for the same reason. Before it has read any, it may not have seen all that are there.
    """
    reason = state.new_gpus.get(*ALL)
    read = {slot.key for slot in state.slots.values() if slot.reading is not None}
    return reason is not None and key in read and all(state.excluded.get(other) != reason for other in read - {key})


def _book_gpus(state: PoolState, command: cmd.BookGpus, now: float) -> list[ev.Event]:
    booking_id = command.booking.id
    known = state.bookings.get(booking_id)
    if known is not None and is_repeated(state, known, command.booking, command.wishes):
        return []
    booked = book(state, command.booking, command.wishes, now, must_be_free=command.must_be_free)
    if isinstance(booked, str):
        return [Refused(now, RefusalCode.BOOKING, booking_id, booked)]
    return [ev.Configured(now, "bookings", (booking_id,), booked)]


_DECIDERS: dict[type[cmd.Command], Callable[[PoolState, Any, float], list[ev.Event]]] = {
    cmd.TakeOver: take_over,
    cmd.AnnounceNode: announce_node,
    cmd.SilenceNode: silence_node,
    cmd.ForgetNode: forget_node,
    cmd.RequestLease: _request_lease,
    cmd.Renew: _renew,
    cmd.ReportAbsence: _report_absence,
    cmd.Release: _release,
    cmd.EndLease: _end,
    cmd.WithdrawGrant: _withdraw,
    cmd.RecoverLease: recover_lease,
    cmd.EndKept: end_kept,
    cmd.Observe: _observe,
    cmd.Tick: _tick,
    cmd.LoseTime: lambda _, command, now: [ev.TimeLost(now, command.lost_s)],
    cmd.SetWallTime: lambda _, command, now: [ev.WallTimeSet(now, command.offset_s)],
    cmd.ServeQueue: _serve_queue,
    cmd.Configure: _configure,
    cmd.BookGpus: _book_gpus,
}
