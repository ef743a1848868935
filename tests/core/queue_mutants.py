"""Mutants of the core without one of the queue's rules."""

from __future__ import annotations

from tests.core.mutant import Mutant

QUEUE_MUTANTS = (
    Mutant(
        "nothing is reserved before a waiter has waited long",
        "reserving",
        "return due_at <= self._now",
        "return True",
    ),
    Mutant(
        "a prediction admits no request to what is reserved",
        "keeps",
        "return limit_s is not None and now + limit_s <= date",
        "return limit_s is None or now + limit_s <= date",
    ),
    Mutant(
        "what ends after the date is not admitted",
        "keeps",
        "return limit_s is not None and now + limit_s <= date",
        "return limit_s is not None",
    ),
    Mutant(
        "what is reserved is kept from later waiters",
        "keeps",
        "self._with_reserved[booked] = booked.union(reservation.gpus)",
        "self._with_reserved[booked] = booked",
    ),
    Mutant(
        "the first that cannot be served has the reservation",
        "assignment",
        "elif keeps.reservation is not None:",
        "elif False:",
    ),
    Mutant(
        "a waiter of a lower priority may have waited for longer",
        "assignment",
        'index = bisect_left(keys, (place[0], place[2] + 1, 0, "")) - 1',
        "index = len(keys)",
    ),
    Mutant(
        "a reservation keeps to its node",
        "reserving",
        "if current is not None and current.lease_id == lease.id and current.nodes <= state.capacity.nodes:",
        "if False:",
    ),
    Mutant(
        "a prediction far ahead reserves nothing",
        "reserving",
        "if plan is None or (plan.start.basis is Basis.PREDICTED and",
        "if plan is None or (False and",
    ),
    Mutant(
        "what is granted in a look is not taken for free in it",
        "assignment",
        "                    if found.grants and line.wishes not in reserving.undated:\n",
        "                    if False:\n",
    ),
    Mutant(
        "a time limit is enforced",
        "decide",
        "for lease_id in islice(state.timetable.due(now), MOST_DUE):",
        "for lease_id in ():",
    ),
    Mutant(
        "a time limit is warned of first",
        "decide",
        "    if lease.ending is not None:\n        return [*_all_ended(state, lease, lease.ending.reason, now)]\n",
        "    return [*_all_ended(state, lease, EndReason.TIME_LIMIT, now)]\n",
    ),
    Mutant("a warning is durable", "events", "class LeaseWarned(DurableEvent):", "class LeaseWarned(VolatileEvent):"),
    Mutant(
        "a late warning leaves some time",
        "lease",
        "return max(now if self.limit is None else self.limit, now + self.warning_s * LEAST_WARNING)",
        "return now if self.limit is None else self.limit",
    ),
    Mutant(
        "time limits go by the wall clock over a reboot",
        "evolve",
        "_set_clock_forward(state, state.wall_offset_s - event.wall_offset_s)",
        "_set_clock_forward(state, event.wall_offset_s - state.wall_offset_s)",
    ),
    Mutant(
        "the youngest lease makes room",
        "preemption",
        "return (-_active(state, lease_id).granted_at, lease_id)",
        "return (_active(state, lease_id).granted_at, lease_id)",
    ),
    Mutant(
        "no lease makes room while another is leaving",
        "preemption",
        "any(_is_leaving(state, lease_id) for lease_id in slot.occupants) and self._would_do(slot, ())",
        "False",
        # Otherwise it would be warned and spared for ever.
        also=("assignment", "if not state.making_room:", "if True:"),
    ),
    Mutant(
        "no preemptible request has another make room",
        "assignment",
        "can_claim = state.preemptible and not line.preemptible",
        "can_claim = state.preemptible",
        also=("assignment", "if state.preemptible and not line.preemptible and", "if state.preemptible and"),
    ),
    Mutant(
        "preemptible requests come last",
        "lease",
        "return (self.request.preemptible, -self.request.priority",
        "return (False, -self.request.priority",
    ),
    Mutant(
        "an owner borrows only with a time limit",
        "quotas",
        "    if time_limit_of(state, line.owner, line.time_limit_s) is not None:\n",
        "    if True:\n",
    ),
    Mutant(
        "an owner has no more than its ceiling",
        "quotas",
        "if quota.ceiling is not None and _with_one_more(",
        "if False and _with_one_more(",
    ),
    Mutant(
        "an owner has no more than its ceiling, whatever its process left",
        "reclaim",
        "if obstacle(state, state.queue.line_of(lease)) is not None or",
        "if",
    ),
    Mutant(
        "owners within their quota come first",
        "order",
        "(preemptible, borrows(self._state, line), negative_priority",
        "(preemptible, False, negative_priority",
    ),
    Mutant(
        "a fair share goes by weight",
        "order",
        "used / quota_of(self._state, owner).weight",
        "used",
    ),
    Mutant(
        "the owner that used less comes first",
        "order",
        "used = use.used_at(self._now) if use else 0.0",
        "used = 0.0",
    ),
    Mutant(
        "what is held counts as it runs",
        "fair_share",
        "left = float(2.0 ** (-(now - self.as_of) / HALF_LIFE_S))",
        "left = 1.0",
    ),
    Mutant(
        "use is kept by compaction",
        "condense",
        "for owner, use in state.owners.items()]",
        "for owner, use in ()]",
    ),
    Mutant(
        "a booking counts before its date",
        "keeps",
        "return not ends_by(state, line, now, starts)",
        "return starts <= now and not ends_by(state, line, now, starts)",
    ),
    Mutant(
        "a booking ends",
        "queue/booking",
        "        if booking.ends_at is not None and booking.ends_at - state.wall_offset_s <= now:\n",
        "        if False:\n",
    ),
    Mutant(
        "preemptible leases make room for a booking",
        "queue/booking",
        "if lease_id in state.preemptible and not",
        "if False and not",
    ),
    Mutant(
        "memory alone is not use",
        "evolve",
        "if slot.busy is None or load_percent is None or",
        "if slot.busy is None or reading.memory_used_mb or load_percent is None or",
    ),
    Mutant(
        "unknown load is not idle",
        "evolve",
        "if slot.busy is None or load_percent is None or load_percent >=",
        "if slot.busy is None or (load_percent or 0.0) >=",
    ),
    Mutant(
        "the warning of a holder that computes again is withdrawn",
        "idleness",
        "elif lease.ending is not None and lease.ending.reason is EndReason.IDLE and is_busy:",
        "elif False:",
    ),
)
