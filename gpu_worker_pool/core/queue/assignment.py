"""The queue's rule: which waiter is served next.

One pass goes over the waiters in order (see order.py) and serves those that can be. A later waiter may be served while
an earlier one waits, if it takes nothing that is kept from it (see keeps.py). Only one waiter has a reservation: the
first that cannot be served and has waited long (see reserving.py). So wide requests do not starve, and few wait for them.

A GPU that drains because the process that released it still holds memory there is free to that same process (see
reclaim.py), unless a waiter ahead needs such a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import inf

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.reservation import Reservation
from gpu_worker_pool.core.model.state import PoolState

from .attempts import Attempts
from .keeps import Keeps, just_before
from .order import Order
from .placement import Grant, Survey
from .preemption import Preemption, spared
from .quotas import obstacle
from .reclaim import reclaim
from .reserving import Reserving, reserves_at
from .turns import EveryTurn, HopefulTurns, Turns
from .waiting import Line


@dataclass(slots=True)
class QueuePass:
    """The result of a pass over the queue: the grants, the preemptible leases to end, the GPUs that become a waiter's
    that way, the leases that need not end after all, the reservation, and how long that stays true if no event happens.
    `settled_until` is None if it has not changed, or if another pass is due after these grants.
    """

    grants: list[Grant] = field(default_factory=list)
    victims: list[str] = field(default_factory=list)
    claims: dict[GpuKey, str] = field(default_factory=dict)
    spared: list[str] = field(default_factory=list)
    reservation: Reservation | None = None
    undated: dict[Wishes, float] = field(default_factory=dict)
    settled_until: float | None = None


def serve_queue(state: PoolState, now: float) -> QueuePass:
    """Find the waiters that can be served.

    If the only change since the last pass is one new waiter, only that one can be. If nothing changed for all waiters,
    only processes that left memory on a GPU can be.
    """
    if now <= state.settled_until and not state.newcomers:
        outcome = QueuePass()
    elif now <= state.settled_until and len(state.newcomers) == 1:
        outcome = _admit(state, state.queued(state.newcomers[0]), now) or _pass_over_queue(state, now)
    elif len(state.queue) == 0 and not (state.undated or state.bookings or state.making_room):
        outcome = QueuePass(settled_until=inf)  # no waiter, no date to look at again, and no lease that could be spared
    else:
        outcome = _pass_over_queue(state, now)
    may_reclaim = state.reclaimable or state.capacity.used_outside_by
    if not outcome.grants and may_reclaim and (grant := reclaim(state, now)) is not None:
        return QueuePass([grant], outcome.victims, spared=outcome.spared)
    return outcome


def _pass_over_queue(state: PoolState, now: float) -> QueuePass:
    survey, order, keeps = Survey(state, now), Order(state, now), Keeps(state, now)
    reserving, preemption = Reserving(state, now, keeps), Preemption(survey)
    found = QueuePass(undated=reserving.undated)
    # GPUs that no later waiter may take: granted in this pass, or claimed by an earlier waiter.
    gone: set[GpuKey] = set()
    places, room = Attempts(survey.place), Attempts(preemption.claim)
    served: dict[Line, int] = {}
    is_hope_enough = not state.preemptible and not reserving.is_any_due
    turns: Turns = HopefulTurns(survey, order, served) if is_hope_enough else EveryTurn(state, order)
    while (turn := turns.next()) is not None:
        line, lease_id = turn.line, turn.lease_id
        if obstacle(state, line) is not None:
            continue
        wishes, kept = line.wishes, keeps.kept_from(line)
        gpus = places.make(wishes, kept, gone)
        if gpus is not None:
            gpus = survey.with_home(gpus, state.queued(lease_id), kept, gone)
            found.grants.append(Grant(lease_id, gpus))
            gone.update(gpus)
            if wishes.is_shared or state.settings.workers_per_gpu > 1 or state.queue.splits_owners:
                # Another waiter may still share this GPU, or another owner be first. That can be told only afterwards.
                return found
            if not is_hope_enough:  # else these turns are those of the whole pass
                served[line] = served.get(line, 0) + 1
            turns.was_served(turn)
            continue
        can_claim = state.preemptible and not line.preemptible
        claimed = room.make(wishes, kept, gone) if can_claim else None
        if claimed is not None:
            found.victims += claimed.victims
            if claimed.victims:
                return found  # who else needs one is told with these on their way out
            found.claims.update(dict.fromkeys(claimed.gpus, lease_id))
            gone.update(claimed.gpus)
            turns.was_served(turn)
            continue
        if keeps.reservation is None and reserving.is_due(state.queued(lease_id)):
            if found.grants and reserving.will_look(line):
                return found  # what is free, and when, is told with these granted
            keeps.reservation = reserving.reserve(state.queued(lease_id), line)
            if keeps.reservation is not None and not state.preemptible:
                turns = HopefulTurns(survey, order, served)  # no other waiter gets a reservation
                continue
        turns.was_not_served(turn, partial(places.can_make, kept=kept, taken=gone))
    if is_hope_enough:
        reserving.look_again_when_due(found.grants)
    found.reservation = keeps.reservation
    found.spared = _spared(state, found, now)
    until = min(survey.holds_until, reserving.changes_at, keeps.change_at())
    # What is free, and when, is told with those going on that are spared.
    found.settled_until = None if found.spared else until
    return found


def _spared(state: PoolState, found: QueuePass, now: float) -> list[str]:
    if not state.making_room:
        return []
    return spared(state, {*found.claims, *(found.reservation.gpus if found.reservation else ())}, now)


def _admit(state: PoolState, newcomer: QueuedLease, now: float) -> QueuePass | None:
    """Serve one new waiter in a queue in which no other could be served; None if it takes a whole pass to tell.

    What it takes matters to no other waiter: none could have it, or the reservation admits it. If it gets nothing, the
    others are where they were.
    """
    settled = QueuePass(
        claims=state.claims, reservation=state.reservation, undated=state.undated, settled_until=state.settled_until
    )
    line = state.queue.line_of(newcomer)
    if obstacle(state, line) is not None:
        return settled
    survey, keeps, ahead = Survey(state, now), Keeps(state, now), _kept_for_ahead(state, newcomer, now)
    if state.reservation is not None and state.reservation.lease_id in ahead:
        keeps.reservation = state.reservation
    kept = keeps.kept_from(line)
    if ahead:
        kept = kept.union(key for key, claimer in state.claims.items() if claimer in ahead)
    gpus = survey.place(line.wishes, kept)
    if gpus is not None:
        if line.wishes.has_thresholds and (line.wishes.is_shared or state.settings.workers_per_gpu > 1):
            return None  # others may share a GPU that was too busy for them, now that a lease accounts for that
        is_last = keeps.reservation is state.reservation and ahead.issuperset(state.claims.values())
        settled.grants.append(Grant(newcomer.id, survey.with_home(gpus, newcomer, kept)))
        return settled if is_last else None
    if state.preemptible and not line.preemptible and Preemption(survey).claim(line.wishes, kept) is not None:
        return None
    # Behind the reservation, no waiter has another.
    due_at = inf if keeps.reservation is not None else just_before(reserves_at(state, newcomer))
    settled.settled_until = min(state.settled_until, survey.holds_until, due_at)
    return settled if settled.settled_until >= now else None


def _kept_for_ahead(state: PoolState, newcomer: QueuedLease, now: float) -> set[str]:
    """The waiters ahead of a new one for which GPUs are kept."""
    waiters = set(state.claims.values())
    if state.reservation is not None:
        waiters.add(state.reservation.lease_id)
    if not waiters:
        return waiters
    order = Order(state, now)
    own = order.place_of(newcomer)
    return {lease_id for lease_id in waiters if order.place_of(state.queued(lease_id)) < own}
