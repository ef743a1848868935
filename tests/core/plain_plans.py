"""What the owners of a second pool may have, what is kept from a waiter, and when GPUs are free for it, written as plainly as
possible: it is worked out from all leases, each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.core.plain_gpus import FOREVER, Key, Lease, PlainGpus

WHOLE = 1000
WARNING_S = 60.0
FAR_AHEAD_S = 3600.0
HALF_LIFE_S = 7 * 24 * 3600.0
SURE, GUESSED = "declared", "predicted"


class Reserved(NamedTuple):
    lease_id: str
    gpus: tuple[Key, ...]
    date: float
    basis: str


def warning_s(lease: Lease) -> float:
    declared_s = lease.request.time_limit_s
    return WARNING_S if declared_s is None else min(WARNING_S, float(declared_s) / 2)


@dataclass
class PlainPlans(PlainGpus):
    wall: float = 0.0
    quotas: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    bookings: dict[str, Any] = field(default_factory=dict)
    # What owners used: the core's numbers, after they were checked against `used_by`.
    used: dict[str | None, float] = field(default_factory=dict)
    # (weight, from, to) by owner, on the wall clock.
    spans: dict[str | None, list[tuple[int, float, float]]] = field(default_factory=dict)
    lasted: dict[str | None, list[float]] = field(default_factory=dict)
    all_lasted: list[float] = field(default_factory=list)
    busy: dict[Key, float] = field(default_factory=dict)
    # The waiters whose clients have left, or have not called since the take-over.
    away: set[str] = field(default_factory=set)
    # As of the last event that said so.
    reservation: Any = None
    claims: dict[Key, str] = field(default_factory=dict)

    # Which waiter is first

    def queue(self) -> list[Lease]:
        return sorted(self.waiting(), key=self.place)

    def place(self, lease: Lease) -> tuple[Any, ...]:
        preemptible, priority, seq = lease.arrival
        used = 0.0
        if self.settings.fair_share:
            quota = self.quota(lease.owner)
            used = self.used.get(lease.owner, 0.0) / (quota.weight if quota else 1.0)
        return (preemptible, priority, used, seq)

    def used_by(self, owner: str | None) -> float:
        """The GPU time of an owner, each second of it worth half as much after a half-life."""
        wall_now, total = self.now + self.wall, 0.0
        running = [
            (x.weight, x.granted_at, wall_now) for x in self.leases.values() if x.state == "active" and x.owner == owner
        ]
        for weight, begin, end in (*self.spans.get(owner, ()), *running):
            left = [2.0 ** (-(wall_now - at) / HALF_LIFE_S) for at in (begin, end)]
            total += weight * (left[1] - left[0]) * HALF_LIFE_S / 0.6931471805599453
        return total

    # What an owner may have

    def quota(self, owner: str | None) -> Any:
        return self.quotas.get(owner or "") or self.quotas.get("*")

    def held(self, owner: str | None, *, firm: bool) -> int:
        return sum(
            x.weight
            for x in self.leases.values()
            if x.state == "active" and x.owner == owner
            if not (firm and x.request.preemptible)
        )

    def limit_s(self, request: Any) -> float | None:
        quota = self.quota(request.holder.owner)
        longest = [self.settings.max_time_limit_s, quota.max_time_limit_s if quota else None]
        declared = request.time_limit_s or self.settings.default_time_limit_s
        return min((limit for limit in (declared, *longest) if limit is not None), default=None)

    def least_weight(self, wishes: Any) -> int:
        sizes = [total_mb for _, name, total_mb in self.inventory.values() if self.is_of_model(name, wishes)]
        known = [mb for mb in sizes if mb]
        is_unknown = wishes.memory_mb is not None and not known
        return int(wishes.gpus * wishes.nodes * (1 if is_unknown else self.weight(max(known, default=0.0), wishes)))

    def weight(self, total_mb: float | None, wishes: Any) -> int:
        """What a lease weighs on a GPU: a share, its part of the memory."""
        if wishes.memory_mb is None or not total_mb:
            return WHOLE
        return max(1, min(WHOLE, round(WHOLE * float(wishes.memory_mb) / total_mb)))

    def too_heavy(self, lease: Lease) -> set[Key]:
        """The GPUs on which a share would be more than its owner may have."""
        wishes, left = lease.request.wishes, self.left(lease)
        if wishes.memory_mb is None:
            return set()
        return {
            key
            for key, reading in self.readings.items()
            if self.weight(reading.memory_total_mb, wishes) * wishes.gpus * wishes.nodes > left
        }

    def may_have_more(self, lease: Lease) -> bool:
        """An owner has at most its quota, and a group together its own."""
        return self.least_weight(lease.request.wishes) <= self.left(lease)

    def left(self, lease: Lease) -> float:
        """What its owner may still have. Preemptible leases do not count."""
        if lease.request.preemptible:
            return FOREVER
        quota, left = self.quota(lease.owner), FOREVER
        if quota is not None and quota.gpus is not None:
            left = quota.gpus * WHOLE - self.held(lease.owner, firm=True)
        for group in self.groups.values():
            if lease.owner in group.members and group.quota is not None:
                together = sum(self.held(member, firm=True) for member in group.members)
                left = min(left, group.quota * WHOLE - together)
        return left

    def kept_for_groups(self, lease: Lease) -> set[Key]:
        """Where members of a group go first, and one waits that may be served there. A preemptible request makes room for those
        that are not.
        """
        found: set[Key] = set()
        for group in self.groups.values():
            for member in self.waiting() if lease.owner not in group.members else ():
                is_first = member.request.preemptible or not lease.request.preemptible
                if (
                    member.owner in group.members
                    and is_first
                    and not member.is_passed_over
                    and self.may_have_more(member)
                ):
                    found |= {key for key in group.first_right if self.may_be_had(key, member)}
        return found

    # What is kept from a waiter

    def ends_by(self, lease: Lease, date: float) -> bool:
        limit_s = self.limit_s(lease.request)
        return limit_s is not None and self.now + limit_s <= date

    def expected_s(self, owner: str | None) -> float | None:
        """How long a lease without a limit lasts, by the last two of its owner, or of all."""
        lasted = self.lasted.get(owner) or self.all_lasted
        return max(sum(lasted[-2:]) / len(lasted[-2:]), 1.0) if lasted else None

    def booked_from(self, lease: Lease, at: float | None = None, late_s: float = 0.0) -> set[Key]:
        """What bookings keep from a waiter now, or would at a later time if it is so late."""
        found: set[Key] = set()
        now, lasts_s = (
            self.now if at is None else at,
            self.limit_s(lease.request) or self.expected_s(lease.owner) or 3600.0,
        )
        if lease.request.preemptible and self.limit_s(lease.request) is None:
            lasts_s = FOREVER
        for booking in self.bookings.values():
            starts = booking.starts_at - self.wall - late_s
            is_over = booking.ends_at is not None and booking.ends_at - self.wall <= now
            makes_room = lease.request.preemptible and now < starts - self.settings.preempt_grace_s
            is_own = booking.owner is not None and booking.owner == lease.owner
            if not (is_own or is_over or makes_room or now + lasts_s <= starts):
                found |= set(booking.gpus)
        return found

    def booked_at_start(self, lease: Lease, start: float, reserved: tuple[Key, ...]) -> set[Key]:
        """The same for a waiter that starts late by what GPUs drain. Those reserved for it may drain already."""
        booked = self.booked_from(lease, start, self.settings.drain_limit_s)
        return booked if start > self.now else (booked - set(reserved)) | self.booked_from(lease, start)

    def kept_by(self, reservation: Any, owner: str | None) -> set[Key]:
        """What a reservation keeps from an owner: not what that owner has booked for now."""
        wall_now = self.now + self.wall
        own = {
            key
            for booking in self.bookings.values()
            if owner is not None and booking.owner == owner and booking.starts_at <= wall_now
            if booking.ends_at is None or wall_now < booking.ends_at
            for key in booking.gpus
        }
        return set(reservation.gpus) - own

    def is_overstayed(self, key: Key, owner: str | None, at: float) -> bool:
        """Whether a GPU is booked for another owner before this time, whose leases may last for longer."""
        return any(
            key in booking.gpus and booking.owner not in {None, owner} and booking.starts_at - self.wall < at
            for booking in self.bookings.values()
        )

    # When GPUs are free

    def end_of(self, lease: Lease) -> tuple[float, str]:
        if lease.state == "draining":
            return self.now, SURE
        if lease.ending is not None:
            return max(lease.ending[1], self.now), SURE
        if lease.limit is not None:
            return max(lease.limit, self.now + warning_s(lease) / 6), SURE
        # A limit that came after the grant does not bind it.
        lasts = self.expected_s(lease.owner)
        if lasts is None:
            return FOREVER, "unknown"
        so_far = max(self.now + self.wall - lease.granted_at, 0.0)
        while lasts <= so_far:
            lasts *= 2
        return self.now - so_far + lasts, GUESSED

    def free_at(self, key: Key, wishes: Any) -> tuple[float, str]:
        """When enough leases have left a GPU."""
        if self.is_usable(key, wishes):
            return self.now, SURE
        left, basis = self.on(key), SURE
        for (at, told), _, lease in sorted((self.end_of(lease), lease.id, lease) for lease in self.on(key)):
            left.remove(lease)
            basis = max(basis, told)
            if at < FOREVER and self.would_do(key, wishes, left):
                return at, basis
        return FOREVER, "unknown"

    def plan_on(self, node: str, lease: Lease, reserved: tuple[Key, ...]) -> Reserved | None:
        """The GPUs of a node that are free first, at the first time at which enough are."""
        wishes = lease.request.wishes
        found = []
        kept = self.kept_for_groups(lease)
        for key, reading in self.readings.items():
            at, basis = self.free_at(key, wishes)
            if key.node == node and at < FOREVER and key not in kept:
                found.append((at, reading.gpu.place, key, basis))
        ends = [booking.ends_at - self.wall for booking in self.bookings.values() if booking.ends_at is not None]
        for start in sorted({*(entry[0] for entry in found), *(at for at in ends if at > self.now)}):
            booked = self.booked_at_start(lease, start, reserved)
            first = sorted(entry for entry in found if entry[0] <= start and entry[2] not in booked)[: wishes.gpus]
            if len(first) == wishes.gpus:
                keys = tuple(key for _, _, key, _ in sorted(first, key=lambda entry: entry[1]))
                is_guessed = any(self.is_overstayed(key, lease.owner, start) for key in keys)
                basis = max(GUESSED if is_guessed else SURE, *(basis for _, _, _, basis in first))
                return Reserved(lease.id, keys, start, basis)
        return None

    def plan_on_all(self, nodes: list[str], lease: Lease, reserved: tuple[Key, ...] = ()) -> Reserved | None:
        """The soonest plan on as many of these nodes as are wished for; its date is that of the last of them."""
        plans = [plan for plan in (self.plan_on(node, lease, reserved) for node in nodes) if plan is not None]
        first = sorted(plans, key=lambda plan: (plan.date, plan.gpus))[: lease.request.wishes.nodes]
        if len(first) < lease.request.wishes.nodes:
            return None
        keys = [key for plan in sorted(first, key=lambda plan: plan.gpus[0].node) for key in plan.gpus]
        return Reserved(lease.id, tuple(keys), first[-1].date, max(plan.basis for plan in first))

    def may_reserve(self, lease: Lease) -> bool:
        return bool(lease.asked_at - self.wall + self.settings.reserve_after_s <= self.now)

    def reserve(self, lease: Lease) -> Reserved | None:
        """What is reserved for the first waiter that cannot be served; it keeps to the nodes that it has."""
        wishes, current = lease.request.wishes, self.reservation
        if current is not None and current.lease_id == lease.id:
            plan = self.plan_on_all(sorted({key.node for key in current.gpus}), lease, current.gpus)
            if plan is not None:
                return plan
            was_seen_lately = self.now < current.seen + self.settings.drain_limit_s
            if was_seen_lately and all(self.may_come_free(key, lease) for key in current.gpus):
                return Reserved(lease.id, current.gpus, current.date, str(current.basis))
        plan = self.plan_on_all([node for node in self.nodes() if self.has_enough(node, wishes)], lease)
        is_far = plan is not None and plan.basis == GUESSED and plan.date > self.now + FAR_AHEAD_S
        return None if is_far else plan

    def may_be_had(self, key: Key, lease: Lease) -> bool:
        """Whether a waiter could have a GPU, whatever it is used for."""
        reading = self.readings.get(key)
        is_known = reading is not None and not reading.other_server and key not in self.excluded
        return is_known and self.could_do(key, lease.request.wishes)

    def may_come_free(self, key: Key, lease: Lease) -> bool:
        """Whether a GPU may be free once its leases end, whatever the readings say now."""
        if not self.may_be_had(key, lease) or key in self.kept_for_groups(lease):
            return False
        ends = max((self.end_of(other)[0] for other in self.on(key)), default=self.now)
        times = [booking.ends_at - self.wall for booking in self.bookings.values() if booking.ends_at is not None]
        starts = [at for at in (ends, *times) if ends <= at < FOREVER]
        return any(key not in self.booked_at_start(lease, at, (key,)) for at in starts)
