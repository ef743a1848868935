"""Which waiter has the one reservation, and of which GPUs.

The first waiter in line that cannot be served and has waited for `reserve_after_s` gets GPUs of the node where it can
start soonest, or of the so many nodes of a gang. It keeps to these nodes: chosen again in every pass, the date would slip
for ever. On each node, the GPUs that are free first are reserved, so a lease that ends early brings the date forward.

A date that rests on a prediction and is more than an hour away reserves nothing.
"""

from __future__ import annotations

from math import inf

from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.reservation import Basis, Reservation
from gpu_worker_pool.core.model.state import PoolState

from .attempts import Attempts
from .forecast import Forecast, Plan
from .keeps import Keeps, just_before
from .waiting import Line

PREDICTED_AHEAD_S = 3600.0
# The time between two attempts to find a date for the same wishes: each takes all GPUs into account.
TRY_AGAIN_S = 60.0
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
        self._plans = Attempts(self._forecast.plan)
        self._looked_at = 0
        self.undated = {wishes: at for wishes, at in state.undated.items() if at > now}
        self.changes_at = just_before(min(self.undated.values(), default=inf))

    def is_due(self, lease: QueuedLease) -> bool:
        """Whether a waiter that cannot be served has waited so long that GPUs may be reserved for it."""
        due_at = reserves_at(self._state, lease)
        if due_at > self._now:
            self._look_again(due_at)
        return due_at <= self._now

    def reserve(self, lease: QueuedLease, line: Line) -> Reservation | None:
        """The reservation of a waiter that cannot be served and is due; None if there is none for it."""
        state, wishes = self._state, lease.request.wishes
        avoiding = self._keeps.booked_from(line)
        current = state.reservation
        if current is not None and current.lease_id == lease.id and current.nodes <= state.capacity.nodes:
            plan = self._forecast.plan_on_all(current.nodes, wishes, avoiding)
            if plan is not None:
                return self._reservation(lease, plan)
        if wishes in self.undated:
            return None
        if not self._plans.must_fail(wishes, avoiding):
            if self._looked_at and self._looked_at + len(state.slots) > MOST_GPUS:
                self._try_later(wishes, TRY_NEXT_S)
                return None
            self._looked_at += len(state.slots)
        plan = self._plans.make(wishes, avoiding)
        if plan is None or (plan.start.basis is Basis.PREDICTED and plan.start.at > self._now + PREDICTED_AHEAD_S):
            self._try_later(wishes, TRY_AGAIN_S)
            return None
        return self._reservation(lease, plan)

    def _reservation(self, lease: QueuedLease, plan: Plan) -> Reservation:
        if plan.start.at > self._now:
            self._look_again(plan.start.at)  # a prediction is then overrun
        return Reservation(lease.id, plan.gpus, plan.start.at, plan.start.basis, plan.start.after)

    def _try_later(self, wishes: Wishes, after_s: float) -> None:
        self.undated[wishes] = self._now + after_s
        self._look_again(self.undated[wishes])

    def _look_again(self, at: float) -> None:
        self.changes_at = min(self.changes_at, just_before(at))


def reserves_at(state: PoolState, lease: QueuedLease) -> float:
    """When a waiter has waited so long that GPUs may be reserved for it."""
    return lease.requested_at - state.wall_offset_s + state.settings.reserve_after_s
