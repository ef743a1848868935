"""The queue's rule of a second pool, written as plainly as possible (its GPUs are in plain_gpus.py, its plans in plain_plans.py).

The tests hold the core against it: whatever the core grants must be what the rules say, and a waiter that it lets wait
must have to wait. Which waiter is first, what is kept from it, which leases must make room for it and what is reserved for it
is worked out here from all leases, each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.core.plain_gpus import Key, Lease, PlainGpus
from tests.core.plain_plans import PlainPlans, Reserved


def _youth(lease: Lease) -> tuple[float, str]:
    return (-lease.granted_at, lease.id)


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
    # The leases that need not make room after all; None if that was not asked.
    spared: list[str] | None = None


@dataclass
class Model(PlainPlans):
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
        found = Outcome()
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
            kept = gone | self.booked_from(lease) | self.too_heavy(lease) | self.kept_for_groups(lease)
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
                found.reserved = binding = self.reserve(lease)
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

    # Idle holders

    def idle_s(self, lease: Lease) -> float | None:
        """How long its GPUs have computed nothing; None if that is not known."""
        unread = [key for key in lease.gpus if key not in self.readings]
        if unread or any(self.now > self.readings[key].at + self.settings.stale_after_s for key in lease.gpus):
            return None
        times = [self.busy.get(key) for key in lease.gpus]
        return None if None in times else self.now - max(at for at in times if at is not None)
