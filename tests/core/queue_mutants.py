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
        "self._with_reserved[case] = booked.union(reserved)",
        "self._with_reserved[case] = booked",
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
        "index = min(lower, _index_of_reserved(state, keys, index + 1)) - 1",
        "index = _index_of_reserved(state, keys, index + 1) - 1",
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
        "                    if found.grants and reserving.will_look(line):\n",
        "                    if False:\n",
    ),
    Mutant(
        "what drains admits no later waiter",
        "forecast",
        "            return FreeTime(self._now, Basis.DECLARED, lease_id)\n",
        "            return FreeTime(state.deadlines.due_at(lease_id) or self._now, Basis.DECLARED, lease_id)\n",
    ),
    Mutant(
        "a date is looked for again when something happens",
        "reserving",
        "if wishes not in self.undated or self._looked_again_at + number <= AT_ONCE_GPUS:",
        "if wishes not in self.undated:",
        also=("reserving", "PAUSE_S = 0.001", "PAUSE_S = 1e9"),
    ),
    Mutant(
        "what is reserved stays so while readings do not tell",
        "reserving",
        "if self._now < given_up and all(",
        "if False and all(",
    ),
    Mutant(
        "a booking that ends is a date",
        "keeps",
        "            free = FreeTime(booking.ends_at - offset_s, free.basis)\n",
        "            return NEVER\n",
    ),
    Mutant(
        "a reservation keeps no booked GPU from the booking's owner",
        "keeps",
        "if not self._is_booked_by(line.owner, key)]",
        "if True]",
    ),
    Mutant(
        "shares count for the ceiling",
        "keeps",
        "booked = self.booked_from(line) | too_heavy(self._state, line)",
        "booked = self.booked_from(line)",
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
        "    if lease.ending is not None:\n        return [*all_ended(state, lease, lease.ending.reason, now)]\n",
        "    return [*all_ended(state, lease, EndReason.TIME_LIMIT, now)]\n",
    ),
    Mutant("a warning is durable", "events", "class LeaseWarned(DurableEvent):", "class LeaseWarned(VolatileEvent):"),
    Mutant(
        "a late warning leaves some time",
        "lease",
        "return max(now if self.limit is None else self.limit, now + self.warning_s * LEAST_WARNING)",
        "return now if self.limit is None else self.limit",
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
        "is_last = self.request.preemptible and self.request.parent is None",
        "is_last = False",
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
