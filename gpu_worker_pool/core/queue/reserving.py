"""Which waiter has the one reservation, and of which GPUs.

The first waiter in line that cannot be served and has waited for `reserve_after_s` gets GPUs of the node where it can
start soonest, or of the so many nodes of a gang. It keeps to these nodes: chosen again in every pass, the date would slip
for ever. On each node, the GPUs that are free first are reserved, so a lease that ends early brings the date forward.
While readings do not tell (one is late, or shows the load of a process that has gone), the GPUs stay reserved for as long
as a GPU may drain.

A date that rests on a prediction and is more than an hour away reserves nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from math import inf

from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.reservation import Basis, Reservation
from gpu_worker_pool.core.model.state import PoolState

from .attempts import Attempts
from .forecast import Forecast, Plan
from .keeps import Keeps, just_before
from .placement import NOTHING, Grant
from .quotas import obstacle
from .waiting import Line

PREDICTED_AHEAD_S = 3600.0
# The time between two attempts to find a date for the same wishes while nothing happens.
TRY_AGAIN_S = 60.0
# An attempt takes all GPUs into account. So many GPUs a pass are looked at again whenever something happened. In a larger
# pool only the first waiter is tried again then, and not within so long for each GPU.
AT_ONCE_GPUS = 500
PAUSE_S = 0.001
# The GPUs that one pass takes into account for it, at most; the first attempt is always made. No caller is answered
# meanwhile, so the waiters behind are tried in later passes.
MOST_GPUS = 4_000
TRY_NEXT_S = 5.0


class Reserving:
    """Finds the reservation of one pass. `changes_at` is when it must be looked at again, though nothing happens."""

    def __init__(self, state: PoolState, now: float, keeps: Keeps) -> None:
        self._state = state
        self._now = now
        self._keeps = keeps
        self._forecast = Forecast(state, now)
        self._plans = Attempts(lambda wishes, _: self._forecast.plan(wishes))
        self._looked_at = 0
        self._looked_again_at = 0
        self._tried: set[Wishes | Line] = set()
        self.undated = dict(state.undated)  # to copy a dict hashes no wishes
        self.changes_at = inf
        if state.undated:
            for wishes in [wishes for wishes, at in state.undated.items() if at <= now]:
                del self.undated[wishes]
            self.changes_at = just_before(min(self.undated.values(), default=inf))

    @property
    def is_any_due(self) -> bool:
        """Whether a waiter has waited so long that GPUs may be reserved for it."""
        first = self._first_to_come()
        return first is not None and reserves_at(self._state, first) <= self._now

    def look_again_when_due(self, grants: Iterable[Grant]) -> None:
        """Look again when the first waiter is due that is not served now."""
        first = self._first_to_come({grant.lease_id for grant in grants})
        if first is not None:
            self._look_again(reserves_at(self._state, first))

    def _first_to_come(self, but: Container[str] = ()) -> QueuedLease | None:
        """The waiter that came first of those whose owners may have more; not one of these."""
        state = self._state
        for _, lease_id in state.queue.arrivals:
            if lease_id not in but:
                lease = state.queued(lease_id)
                if not state.quotas or obstacle(state, state.queue.line_of(lease)) is None:
                    return lease
        return None

    def is_due(self, lease: QueuedLease) -> bool:
        """Whether a waiter that cannot be served has waited so long that GPUs may be reserved for it."""
        due_at = reserves_at(self._state, lease)
        if due_at > self._now:
            self._look_again(due_at)
        return due_at <= self._now

    def reserve(self, lease: QueuedLease, line: Line) -> Reservation | None:
        """The reservation of a waiter that cannot be served and is due; None if there is none for it."""
        state, wishes, unbooked = self._state, lease.request.wishes, self._keeps.unbooked(line)
        current = state.reservation
        if current is not None and current.lease_id == lease.id and current.nodes <= state.capacity.nodes:
            still_unbooked = self._keeps.unbooked(line, current.gpus)
            plan = self._forecast.plan_on_all(current.nodes, wishes, still_unbooked)
            if plan is not None:
                return self._reservation(lease, plan)
            given_up = current.seen + state.settings.drain_limit_s
            may_be_free = (self._forecast.may_be_free(key, wishes, still_unbooked) for key in current.gpus)
            if self._now < given_up and all(may_be_free):
                self._look_again(given_up)
                return current
        if not self.will_look(line):
            return None
        self._tried.add(line if unbooked else wishes)
        number = len(state.slots_for(wishes))
        must_fail = unbooked is None and self._plans.must_fail(wishes, NOTHING)
        if wishes in self.undated and not must_fail:
            self._looked_again_at += number
        elif not must_fail:
            if self._looked_at and self._looked_at + number > MOST_GPUS:
                self._try_later(wishes, TRY_NEXT_S)
                return None
            self._looked_at += number
        plan = self._forecast.plan(wishes, unbooked) if unbooked else self._plans.make(wishes, NOTHING)
        if plan is None or (plan.start.basis is Basis.PREDICTED and plan.start.at > self._now + PREDICTED_AHEAD_S):
            self._try_later(wishes, TRY_AGAIN_S)
            return None
        return self._reservation(lease, plan)

    def _reservation(self, lease: QueuedLease, plan: Plan) -> Reservation:
        if plan.start.at > self._now:
            self._look_again(plan.start.at)  # a prediction is then overrun
        return Reservation(lease.id, plan.gpus, plan.start.at, plan.start.basis, plan.start.after, self._now)

    def will_look(self, line: Line) -> bool:
        """Whether a date is looked for in this pass, for a waiter of this line without a reservation."""
        wishes, state = line.wishes, self._state
        number = len(state.slots_for(wishes))
        if line in self._tried or wishes in self._tried or not self._is_any_read:
            return False
        if wishes not in self.undated or self._looked_again_at + number <= AT_ONCE_GPUS:
            return True
        return not self._looked_again_at and self._now >= self.undated[wishes] - TRY_AGAIN_S + PAUSE_S * number

    @property
    def _is_any_read(self) -> bool:
        """Whether a GPU was read since the take-over; before that, no date can be told."""
        return any(slot.reading is not None for slot in self._state.slots.values())

    def _try_later(self, wishes: Wishes, after_s: float) -> None:
        self.undated[wishes] = self._now + after_s
        self._look_again(self.undated[wishes])

    def _look_again(self, at: float) -> None:
        self.changes_at = min(self.changes_at, just_before(at))


def reserves_at(state: PoolState, lease: QueuedLease) -> float:
    """When a waiter has waited so long that GPUs may be reserved for it."""
    return lease.requested_at - state.wall_offset_s + state.settings.reserve_after_s
