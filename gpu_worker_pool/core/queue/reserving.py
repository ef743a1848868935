"""What is reserved for the first waiter that cannot be served."""

from __future__ import annotations

from math import inf

from gpu_worker_pool.core.model.lease import Basis, QueuedLease, Reservation
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.model.waiting import RequestClass

from .planner import MOST_GPUS, Plan, Planner
from .withheld import Withheld, just_before

# A date that rests on a prediction and is more than this away reserves nothing.
PREDICTED_AHEAD_S = 3600.0
# Where nothing has a date, predictions may change that.
TRY_AGAIN_S = 60.0


class Reserving:
    """Finds the one reservation of a pass over the queue: the plan of the first waiter that cannot be served and has waited
    for `reserve_after_s`.

    It is on the node where the waiter can start soonest, or on the nodes of a gang, and keeps to these nodes: chosen again in
    every pass, the date would slip for ever. On each node, the GPUs that are free first are reserved, so a lease that ends
    early brings the date forward. While readings do not tell (one is late, or shows the load of a process that has gone), the
    GPUs stay reserved for as long as a GPU may drain.
    """

    def __init__(
        self, state: PoolState, now: float, planner: Planner, withheld: Withheld, newcomer: QueuedLease | None = None
    ) -> None:
        self._state = state
        self._now = now
        self._planner = planner
        self._withheld = withheld
        self._gpus_left = MOST_GPUS
        self._tried: set[Wishes | RequestClass] = set()
        self._due_after_s = state.settings.reserve_after_s - state.wall_offset_s
        self._look_again_at = inf
        # A newcomer asks after all others.
        first_asked_at = state.queue.first_asked_at if len(state.queue) else newcomer.requested_at if newcomer else inf
        first_due = first_asked_at + self._due_after_s
        self.is_any_due = first_due <= now
        if not self.is_any_due:
            self._look_again(first_due)

    def is_due(self, lease: QueuedLease) -> bool:
        """Whether a waiter that cannot be served has waited long enough to have GPUs reserved."""
        due_at = lease.requested_at + self._due_after_s
        if due_at > self._now:
            self._look_again(due_at)
        return due_at <= self._now

    @property
    def changes_at(self) -> float:
        """Until when nothing changes, unless something happens."""
        return just_before(self._look_again_at)

    def reserve(self, lease: QueuedLease, request_class: RequestClass) -> Reservation | None:
        """The reservation of a waiter that cannot be served and is due; None if there is none for it."""
        state, current = self._state, self._state.reservation
        if current is not None and current.lease_id == lease.id and current.nodes <= state.facts.nodes.keys():
            plan = self._planner.plan_on(current.nodes, request_class, current.gpus)
            if plan is not None:
                return self._reservation(lease, plan)
            given_up = current.seen + state.settings.drain_limit_s
            may_be_free = (self._planner.may_be_free(key, request_class) for key in current.gpus)
            if self._now < given_up and all(may_be_free):
                self._look_again(given_up)
                return current
        # What the soonest plan depends on. In one pass one is looked for, and others while few GPUs have been looked at.
        kind = request_class if self._withheld.has_bookings else request_class.wishes
        number = len(state.slots_on(request_class.wishes.node))
        if kind in self._tried or (self._tried and number > self._gpus_left):
            return None
        self._tried.add(kind)
        self._gpus_left -= number
        plan = self._planner.plan(request_class)
        if plan is None or (plan.start.basis is Basis.PREDICTED and plan.start.at > self._now + PREDICTED_AHEAD_S):
            self._look_again(self._now + TRY_AGAIN_S)
            return None
        return self._reservation(lease, plan)

    def _reservation(self, lease: QueuedLease, plan: Plan) -> Reservation:
        if plan.start.at > self._now:
            self._look_again(plan.start.at)  # a prediction is then overrun
        return Reservation(lease.id, plan.gpus, plan.start.at, plan.start.basis, plan.start.after, self._now)

    def _look_again(self, at: float) -> None:
        self._look_again_at = min(self._look_again_at, at)
