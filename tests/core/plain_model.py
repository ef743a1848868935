"""The queue's rule of a second pool, written as plainly as possible (its GPUs are in plain_gpus.py).

The tests hold the core against it: whatever the core grants must be what the rules say, and a waiter that it lets wait
must have to wait. Which waiter is first, what is kept from it, which leases must make room for it and what is reserved for it
is worked out here from all leases, each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tests.core.plain_gpus import FOREVER, Key, Lease, PlainGpus

WHOLE = 1000
WARNING_S = 60.0
FAR_AHEAD_S = 3600.0
TRIED_AGAIN_AFTER_S = 60.0
HALF_LIFE_S = 7 * 24 * 3600.0
SURE, GUESSED = "declared", "predicted"


class Reserved(NamedTuple):
    lease_id: str
    gpus: tuple[Key, ...]
    date: float
    basis: str


def _youth(lease: Lease) -> tuple[float, str]:
    return (-lease.granted_at, lease.id)


def warning_s(lease: Lease) -> float:
    declared_s = lease.request.time_limit_s
    return WARNING_S if declared_s is None else min(WARNING_S, float(declared_s) / 2)


@dataclass
class Outcome:
    """What a look at the whole queue finds. `served` is the first waiter that can be, with the sets of GPUs that it may
    be given some of (one set a node). `victims` make room for the first waiter that needs it, `wanting`, with the GPUs
    that it then has.
    """

    served: tuple[Lease, list[set[Key]]] | None = None
    victims: tuple[str, ...] = ()
    wanting: tuple[Lease, tuple[Key, ...]] | None = None
    claims: dict[Key, str] = field(default_factory=dict)
    reserved: Reserved | None = None
    no_date_until: dict[Any, float] = field(default_factory=dict)
    # The leases that need not make room after all; None if that was not asked.
    spared: list[str] | None = None


@dataclass
class Model(PlainGpus):
    wall: float = 0.0
    quotas: dict[str, Any] = field(default_factory=dict)
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
    no_date_until: dict[Any, float] = field(default_factory=dict)

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
        sizes = [total_mb for _, name, total_mb in self.inventory.values() if (wishes.model or "") in name]
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
        quota, wishes = self.quota(lease.owner), lease.request.wishes
        if quota is None or quota.gpus is None or wishes.memory_mb is None or lease.request.preemptible:
            return set()
        left = quota.gpus * WHOLE - self.held(lease.owner, firm=True)
        return {
            key
            for key, reading in self.readings.items()
            if self.weight(reading.memory_total_mb, wishes) * wishes.gpus * wishes.nodes > left
        }

    def may_have_more(self, lease: Lease) -> bool:
        """An owner has at most its quota. Preemptible leases do not count."""
        quota = self.quota(lease.owner)
        if quota is None or quota.gpus is None or lease.request.preemptible:
            return True
        with_this = self.held(lease.owner, firm=True) + self.least_weight(lease.request.wishes)
        return bool(with_this <= quota.gpus * WHOLE)

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
        for key, reading in self.readings.items():
            at, basis = self.free_at(key, wishes)
            if key.node == node and at < FOREVER:
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

    def reserve(self, lease: Lease, no_date_until: dict[Any, float]) -> Reserved | None:
        """What is reserved for the first waiter that cannot be served; it keeps to the nodes that it has."""
        wishes, current = lease.request.wishes, self.reservation
        if current is not None and current.lease_id == lease.id:
            plan = self.plan_on_all(sorted({key.node for key in current.gpus}), lease, current.gpus)
            if plan is not None:
                return plan
            was_seen_lately = self.now < current.seen + self.settings.drain_limit_s
            if was_seen_lately and all(self.may_come_free(key, lease) for key in current.gpus):
                return Reserved(lease.id, current.gpus, current.date, str(current.basis))
        if not self.readings:
            return None
        plan = self.plan_on_all([node for node in self.nodes() if self.has_enough(node, wishes)], lease)
        if plan is None or (plan.basis == GUESSED and plan.date > self.now + FAR_AHEAD_S):
            no_date_until[wishes] = self.now + TRIED_AGAIN_AFTER_S
            return None
        return plan

    def may_come_free(self, key: Key, lease: Lease) -> bool:
        """Whether a GPU may be free once its leases end, whatever the readings say now."""
        reading = self.readings.get(key)
        is_known = reading is not None and not reading.other_server and key not in self.excluded
        if not is_known or not self.could_do(key, lease.request.wishes):
            return False
        ends = max((self.end_of(other)[0] for other in self.on(key)), default=self.now)
        times = [booking.ends_at - self.wall for booking in self.bookings.values() if booking.ends_at is not None]
        starts = [at for at in (ends, *times) if ends <= at < FOREVER]
        return any(key not in self.booked_at_start(lease, at, (key,)) for at in starts)

    # Which leases make room

    def room_for(self, lease: Lease, gone: set[Key]) -> tuple[tuple[Key, ...], tuple[str, ...]] | None:
        """The GPUs that a waiter gets if preemptible leases end, and which: on each node the youngest that it takes, without
        those that are not needed; of the nodes those where they are fewest, and then youngest.
        """
        wishes = lease.request.wishes
        keys = [key for key in self.readings if key not in gone and self.has_enough(key.node, wishes)]

        def is_enough(victims: list[Lease], node: str | None = None) -> bool:
            usable = [key for key in keys if node in {None, key.node} and self.would_be_usable(key, wishes, victims)]
            return self.are_enough(usable, wishes if node is None else replace(wishes, nodes=1))

        of_nodes = []
        for node in sorted({key.node for key in keys}):
            young = [x for x in self.preemptible_on(None) if not self.is_leaving(x)]
            young = [x for x in young if self.helps_on(x, node, keys, wishes)]
            young.sort(key=_youth)
            numbers = [number for number in range(len(young) + 1) if is_enough(young[:number], node)]
            if numbers:
                chosen = self.needed(young[: numbers[0]], lambda some, node=node: is_enough(some, node))  # type: ignore[misc]
                of_nodes.append((len(chosen), [_youth(x) for x in reversed(chosen)], node, chosen))
        if len(of_nodes) < wishes.nodes:
            return None
        together = {
            x.id: x for *_, chosen in sorted(of_nodes, key=lambda each: each[:3])[: wishes.nodes] for x in chosen
        }
        victims = self.needed(sorted(together.values(), key=_youth), is_enough)
        usable = [key for key in keys if self.would_be_usable(key, wishes, victims)]
        return self.first_of(usable, wishes, victims), tuple(x.id for x in victims)

    def helps_on(self, lease: Lease, node: str, keys: list[Key], wishes: Any) -> bool:
        """Whether a GPU of a node would do if all preemptible leases there ended, and this lease is one of them."""
        there = [x for x in self.preemptible_on(None) if not self.is_leaving(x)]
        return any(
            key.node == node
            and key in lease.gpus
            and not self.would_be_usable(key, wishes, [])
            and self.would_be_usable(key, wishes, there)
            for key in keys
        )

    @staticmethod
    def needed(leases: list[Lease], is_enough: Callable[[list[Lease]], bool]) -> list[Lease]:
        """These leases without those that are not needed; the oldest is spared first."""
        kept = list(leases)
        for lease in reversed(leases):
            others = [x for x in kept if x is not lease]
            if is_enough(others):
                kept = others
        return kept

    def would_be_usable(self, key: Key, wishes: Any, victims: list[Lease]) -> bool:
        """Whether a GPU does, or will when those that leave and these have left."""
        left = [x for x in self.on(key) if not self.is_leaving(x) and x not in victims]
        return self.is_usable(key, wishes) or (len(left) < len(self.on(key)) and self.would_do(key, wishes, left))

    def first_of(self, usable: list[Key], wishes: Any, victims: list[Lease]) -> tuple[Key, ...]:
        """As many of these GPUs and nodes as are wished for, first those that need no victim."""
        found: list[Key] = []
        for node in sorted({key.node for key in usable}):
            own = sorted(key for key in usable if key.node == node)
            own.sort(key=lambda key: not self.would_be_usable(key, wishes, []))
            if len(own) >= wishes.gpus and len(found) < wishes.gpus * wishes.nodes:
                found += own[: wishes.gpus]
        return tuple(found)

    def is_spared(self, lease: Lease, claims: dict[Key, str], reserved: Any) -> bool:
        """Whether nothing needs what a lease was told to make room on, as far as all GPUs have been read."""
        taken = {key for x in self.leases.values() for key in x.gpus}
        now = self.now
        if not taken <= set(self.readings) or set(lease.gpus) & (set(claims) | self.excluded):
            return False
        if reserved is not None and set(lease.gpus) & set(reserved.gpus):
            return False
        if any(now > self.readings[key].at + self.settings.stale_after_s for key in lease.gpus):
            return False
        for booking in self.bookings.values():
            is_due = booking.starts_at - self.wall - self.settings.preempt_grace_s <= now
            is_own = booking.owner is not None and booking.owner == lease.owner
            is_over = lease.limit is not None and lease.limit <= booking.starts_at - self.wall
            if is_due and not is_own and not is_over and set(lease.gpus) & set(booking.gpus):
                return False
        return True

    def is_leaving(self, lease: Lease) -> bool:
        return lease.state == "draining" or lease.ending is not None

    # The queue's rule

    def look(self, *, as_settled: bool = False) -> Outcome:
        """Go over the whole queue until a waiter can be served. What is kept is worked out here; or, as settled, it is what
        the last look found: while nothing happens, that stays.
        """
        found = Outcome(no_date_until={wishes: at for wishes, at in self.no_date_until.items() if at > self.now})
        gone: set[Key] = set()
        binding = self.reservation if as_settled else None
        # The waiters so far that cannot be served.
        ahead: list[Lease] = []
        for lease in self.queue():
            if lease.is_passed_over:
                continue
            if not self.may_have_more(lease):
                ahead.append(lease)
                continue
            wishes = lease.request.wishes
            kept = gone | self.booked_from(lease) | self.too_heavy(lease)
            if as_settled:
                kept |= {key for key, claimer in self.claims.items() if claimer != lease.id}
            if binding is not None and self.is_behind(lease, binding) and not self.ends_by(lease, binding.date):
                kept |= self.kept_by(binding, lease.owner) - (self.claimed_by(lease) if as_settled else set())
            usable = [set(self.usable_on(node, wishes, kept)) for node in self.nodes()]
            options = [keys for keys in usable if len(keys) >= wishes.gpus]
            if len(options) >= wishes.nodes:
                found.served = lease, options
                return found
            own = {key for key in self.readings if key not in kept and self.is_left_to(key, lease, ahead)}
            if own:
                found.served = lease, [own]
                return found
            room = None
            # Where no lease is preemptible, there is nothing to claim.
            if not lease.request.preemptible and self.preemptible_on(None):
                room = self.room_for(lease, kept)
            if room is not None:
                keys, victims = room
                if victims:
                    found.victims, found.wanting = victims, (lease, keys)
                    return found
                found.claims |= dict.fromkeys(keys, lease.id)
                gone |= set(keys)
                continue
            ahead.append(lease)
            if not as_settled and found.reserved is None and self.may_reserve(lease):
                found.reserved = binding = self.reserve(lease, found.no_date_until)
        return found

    def preemptible_on(self, node: str | None) -> list[Lease]:
        active = [x for x in self.leases.values() if x.state == "active"]
        return [x for x in active if x.request.preemptible and node in {None, x.gpus[0].node}]

    def is_behind(self, lease: Lease, reservation: Any) -> bool:
        if lease.id == reservation.lease_id:
            return False
        first, own = self.place(self.leases[reservation.lease_id]), self.place(lease)
        # Uses fade, and so the order of requests that are alike but for their owners changes while nothing happens.
        return first[:2] <= own[:2] if self.settings.fair_share else first < own

    def claimed_by(self, lease: Lease) -> set[Key]:
        """What the last look claimed for a waiter that was ahead of the reservation then, wherever it is by its use now."""
        return {key for key, claimer in self.claims.items() if claimer == lease.id and self.settings.fair_share}

    def next_served(self, *, as_settled: bool = False) -> tuple[Lease, list[set[Key]]] | None:
        """The first waiter that can be served, with the sets of GPUs that it may be given some of."""
        return self.look(as_settled=as_settled).served

    # What would be if a lease were released

    def wanted_by(self, lease: Lease) -> Lease | None:
        """Release it, ask for the same again, look: which other waiter is served before, or keeps these GPUs from it?"""
        model = self.released(lease)
        again, found, gpus = model.leases[lease.id], model.look(), set(lease.gpus)
        others = [] if found.served is None else [found.served[0]]
        others += [model.leases[claimer] for key, claimer in found.claims.items() if key in gpus]
        if found.wanting is not None and gpus & set(found.wanting[1]):
            others.append(found.wanting[0])
        reserved = found.reserved
        if (
            reserved is not None
            and not model.ends_by(again, reserved.date)
            and gpus & model.kept_by(reserved, lease.owner)
        ):
            others.append(model.leases[reserved.lease_id])
        return next((other for other in others if other is not again), None)

    def released(self, lease: Lease) -> Model:
        """The pool without a lease, whose request is the last of those that count: not later ones, nor any like it."""
        leases = {x.id: x for x in self.leases.values() if x is not lease}
        lasted_s = max(self.now + self.wall - lease.granted_at, 0.0)
        model = replace(
            self,
            leases=leases,
            readings={key: self.read_without(key, lease) for key in self.readings},
            members={(key, other): own for (key, other), own in self.members.items() if other != lease.id},
            lasted={**self.lasted, lease.owner: [*self.lasted.get(lease.owner, ()), lasted_s]},
            all_lasted=[*self.all_lasted, lasted_s],
        )
        latest = 1 + max(x.seq for x in self.leases.values())
        again = leases[lease.id] = Lease(lease.id, lease.request, latest, FOREVER, self.now + self.wall)
        for waiter in model.waiting():
            if waiter is not again and (model.is_alike(waiter, again) or model.place(again) < model.place(waiter)):
                leases[waiter.id] = replace(waiter, is_passed_over=True)
        return model

    @staticmethod
    def is_alike(one: Lease, other: Lease) -> bool:
        terms = ("wishes", "priority", "labels", "time_limit_s", "preemptible")
        is_same = [getattr(one.request, name) == getattr(other.request, name) for name in terms]
        return one.owner == other.owner and all(is_same)

    def read_without(self, key: Key, lease: Lease) -> Any:
        """What a GPU is read as when a lease has gone, with its processes, its memory and the load."""
        reading = self.readings[key]
        if key not in lease.gpus or reading.memory_used_mb is None:
            return reading
        others = {member for x in self.on(key) if x is not lease for member in self.members.get((key, x.id), set())}
        own, outside = self.members.get((key, lease.id), set()) - others, self.memory(key)[1]
        if self.is_faceless(key, lease) and not any(self.is_faceless(key, x) for x in self.on(key) if x is not lease):
            # Each process that is no other lease's may be its own.
            own |= {tuple(p.id) for p in reading.processes if p.name not in self.ignored} - others
            # Memory that was read before the grant is counted as outside, with that of these.
            outside = max(outside - sum(p.memory_mb for p in reading.processes if tuple(p.id) in own), 0.0)
        left = tuple(p for p in reading.processes if tuple(p.id) not in own)
        explained = sum(p.memory_mb for p in left if tuple(p.id) in others or p.name in self.ignored)
        load = None if reading.utilization_percent is None else 0.0
        return replace(reading, processes=left, memory_used_mb=explained + outside, utilization_percent=load)

    def is_left_to(self, key: Key, waiter: Lease, ahead: list[Lease]) -> bool:
        """Whether nothing but what the waiter's own process left there keeps a GPU from it, and no waiter ahead needs it."""
        others, process, wishes = self.on(key), self.process_on(key, waiter), waiter.request.wishes
        if process is None or (wishes.gpus, wishes.nodes) != (1, 1) or not self.is_suitable(key, wishes):
            return False
        if not others and not self.is_used_by(key, process):
            return False
        if any(x.state != "draining" or x.how != "released" or self.process_on(key, x) != process for x in others):
            return False
        if any(x.owner != waiter.owner for x in others):
            return False
        if any(self.could_do(key, x.request.wishes) for x in ahead):
            return False
        # As if they had gone, and their processes with them.
        reading = self.readings[key]
        own = {member for lease in others for member in self.members.get((key, lease.id), set())}
        if not others:
            own = {tuple(p.id) for p in self.outside_processes(key) or []}
        left = [p for p in reading.processes if tuple(p.id) not in own]
        gone_mb = sum(p.memory_mb for p in reading.processes if tuple(p.id) in own)
        utilization = 0.0 if own and not left else reading.utilization_percent
        used = None if reading.memory_used_mb is None else max(reading.memory_used_mb - gone_mb, 0.0)
        empty = PlainGpus(self.settings, self.now, inventory=self.inventory)
        empty.excluded, empty.ignored = self.excluded, self.ignored
        empty.readings[key] = replace(
            reading, processes=tuple(left), memory_used_mb=used, utilization_percent=utilization
        )
        return empty.is_usable(key, wishes)

    def could_do(self, key: Key, wishes: Any) -> bool:
        memory_mb = self.thresholds(wishes)[0] * self.readings[key].memory_total_mb / 100
        return self._fits(key, wishes) and (wishes.memory_mb or 0.0) <= memory_mb

    # Idle holders

    def idle_s(self, lease: Lease) -> float | None:
        """How long its GPUs have computed nothing; None if that is not known."""
        unread = [key for key in lease.gpus if key not in self.readings]
        if unread or any(self.now > self.readings[key].at + self.settings.stale_after_s for key in lease.gpus):
            return None
        times = [self.busy.get(key) for key in lease.gpus]
        return None if None in times else self.now - max(at for at in times if at is not None)
