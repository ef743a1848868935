"""Mutants of the core without one of the queue's rules."""

from __future__ import annotations

from tests.core.mutant import read_mutants

QUEUE_MUTANTS = read_mutants(
    """
the queue is served again when leases are predicted to last less long: evolve
-if state.quotas or state.groups or state.preemptible or state.bookings:
+if state.quotas or state.groups or state.preemptible:
nothing is reserved before a waiter has waited long: reserving
-self._due_after_s = state.settings.reserve_after_s - state.wall_offset_s
+self._due_after_s = -state.wall_offset_s
a prediction admits no request to what is reserved: withheld
-return limit_s is not None and now + limit_s <= date
+return limit_s is None or now + limit_s <= date
what ends after the date is not admitted: withheld
-return limit_s is not None and now + limit_s <= date
+return limit_s is not None
what is reserved is kept from later waiters: withheld
-return kept if self.reservation is None else kept | self.reserved_from(request_class, self.reservation)
+return kept
the first that cannot be served has the reservation: serve
-may_reserve = self._withheld.reservation is None and self._reserving
+may_reserve = self._reserving
a waiter of a lower priority may have waited for longer: serve
-if may_reserve and self._reserving.is_due(lease):
+if may_reserve and self._reserving.is_due(self._state.queued(Order(self._state, self._now).lease_ids()[0])):
a reservation keeps to its node: reserving
-if current is not None and current.lease_id == lease.id and current.nodes <= state.facts.nodes.keys():
+if False:
a prediction far ahead reserves nothing: reserving
-if plan is None or (plan.start.basis is Basis.PREDICTED and
+if plan is None or (False and
what drains admits no later waiter: planner
-            return FreeAt(self._now, Basis.DECLARED, lease_id)
-
+            return FreeAt(state.ttl_due.due_at(lease_id) or self._now, Basis.DECLARED, lease_id)
+
what is reserved stays so while readings do not tell: reserving
-if self._now < given_up and all(
+if False and all(
a booking that ends is a date: planner
-                at = self._state.span_of(booking)[1]
-
+                return inf, passed
+
a reservation keeps no booked GPU from the booking's owner: withheld
-if not self._is_booked_by(request_class.owner, key))
+if True)
shares count for a quota: withheld
-too_heavy(self._state, request_class).union(booked, first)
+frozenset(booked).union(first)
a time limit is enforced: decide
-for lease_id in islice(state.limit_due.due(now), MOST_DUE):
+for lease_id in ():
a time limit is warned of first: decide
-    if lease.ending is not None:
-        return ended_lease(state, lease, lease.ending.reason, now)
-
+    return ended_lease(state, lease, EndReason.TIME_LIMIT, now)
+
a warning is durable: events
-class LeaseWarned(DurableEvent):
+class LeaseWarned(VolatileEvent):
a late warning leaves some time: lease
-return max(now if self.limit is None else self.limit, now + self.warning_s * LEAST_WARNING)
+return now if self.limit is None else self.limit
the youngest lease makes room: preemption
-return (-state.active(lease_id).granted_at, lease_id)
+return (state.active(lease_id).granted_at, lease_id)
no lease makes room while another is leaving: preemption
-any(_is_leaving(state, lease_id) for lease_id in slot.occupants) and self._would_do(slot, ())
+False
also: preemption
-    if not state.preempt_warned:
-
+    if True:
+
a reservation binds no waiter ahead of it: withheld
-self.reservation: Reservation | None = None
+self.reservation: Reservation | None = state.reservation
no preemptible request has another make room: serve
-if is_new and state.preemptible and not request_class.preemptible:
+if is_new and state.preemptible:
preemptible requests come last: lease
-return (self.request.preemptible, -self.request.priority, self.seq)
+return (False, -self.request.priority, self.seq)
an owner has no more than its quota: owners
-held = _held(state, owner)
-
+held = 0
+
an owner has no more than its quota, whatever its process left: serve
-        if not self._unserved.get(request_class, True):
-            return False
-
+
a fair share goes by weight: owners
-used / quota_of(self._state, owner).weight
+used
the owner that used less comes first: owners
-used = use.used_at(self._now) if use else 0.0
+used = 0.0
what is held counts as it runs: model/state
-left = float(2.0 ** (-(now - self.as_of) / HALF_LIFE_S))
+left = 1.0
use is kept by compaction: condense
-for owner, use in state.usage.items():
+for owner, use in ():
a booking counts before its date: withheld
-return now + late_s + lasts_s > starts
+return now > starts
a booking ends: bookings
-        if ends <= now:
-
+        if False:
+
preemptible leases make room for a booking: bookings
-if lease.ending is None and is_in_the_way(
+if False and is_in_the_way(
a date leaves room before a booking for draining: planner
-late_s = self._state.settings.drain_limit_s if is_late else 0.0
+late_s = 0.0
a date stays while its GPUs drain: planner
-is_late = at > self._now or key not in reserved
+is_late = True
memory alone is not use: evolve_nodes
-is_busy = load_percent is None or
+is_busy = bool(reading.memory_used_mb) or load_percent is None or
unknown load is not idle: evolve_nodes
-is_busy = load_percent is None or load_percent >=
+is_busy = (load_percent or 0.0) >=
the warning of a holder that computes again is withdrawn: idleness
-elif lease.ending is not None and lease.ending.reason is EndReason.IDLE and is_busy:
+elif False:
a group goes first where it has the right: withheld
-union(booked, first)
+union(booked)
a preemptible member goes before a preemptible request of others: withheld
-(each.preemptible or not request_class.preemptible)
+not request_class.preemptible
others use preemptibly what a group waits for: withheld
-(each.preemptible or not request_class.preemptible)
+True
others use what no member waits for: withheld
-any(is_suitable(self._state, slot, wishes) for wishes in asked)
+True
a group has at most its quota together: owners
-sum(_held(state, member) for member in group.members)
+_held(state, owner)
who may have no more keeps nothing from others: withheld
-[each for each in classes if over_quota(state, each) is None]
+classes
nothing is reserved that a group waits for: planner
-free = NEVER if slot.reading is None or slot.key in kept else
+free = NEVER if slot.reading is None else
no two groups have first right on one GPU: owners
-        if other is not None:
-
+        if False:
+
a group has members: owners
-    if not group.members:
-
+    if False:
+
"""
)
