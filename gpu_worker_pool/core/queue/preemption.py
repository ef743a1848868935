"""Which preemptible leases end so that a waiter that is not preemptible can be served.

As few as possible, of these the youngest, and none while GPUs that are being freed already will do. The GPUs that a
waiter will get that way are its *claim*; no later waiter takes those that are free already. A lease that was told to make
room is spared again when no waiter counts on its GPUs any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import GpuSlot, Occupants
from gpu_worker_pool.core.model.state import PoolState

from .booking import is_in_the_way
from .eligibility import stale_at
from .forecast import would_do
from .placement import Survey

# Sets of leases that one pass tries, at most. After that it takes the youngest until there is room, and spares those
# that make none. No caller is answered meanwhile.
MOST_TRIES = 2_000


class Claim(NamedTuple):
    """The GPUs a waiter will have, and the leases that must be ended for it."""

    gpus: tuple[GpuKey, ...]
    victims: tuple[str, ...]


class Preemption:
    """What waiters get by preemption, in one pass over the queue."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._tries_left = MOST_TRIES

    def claim(self, wishes: Wishes, avoiding: AbstractSet[GpuKey]) -> Claim | None:
        """What a waiter gets; None if even that is not enough."""
        capacity, thresholds = self._survey.state.capacity, self._survey.state.settings.thresholds_for(wishes)
        # A gang may also use nodes that are free.
        nodes = capacity.nodes if wishes.nodes > 1 else self._nodes_being_freed & capacity.nodes_for(wishes)
        rooms = []
        for node in sorted(nodes):
            if capacity.could_serve_on(node, wishes, thresholds):
                room = _Room(self._survey, node, wishes, avoiding)
                if room.has_enough(room.leases):
                    rooms.append(room)
        if len(rooms) < wishes.nodes:
            return None
        victims = self._of_one_node(rooms) if wishes.nodes == 1 else self._of_gang(rooms, wishes.nodes)
        chosen = [room for room in rooms if room.has_enough(victims)][: wishes.nodes]
        return Claim(tuple(key for room in chosen for key in room.first(victims)), victims)

    @cached_property
    def _nodes_being_freed(self) -> AbstractSet[str]:
        """The nodes with leases that may be ended, or that end anyway."""
        state = self._survey.state
        return {
            key.node
            for lease in state.leases.values()
            if isinstance(lease, DrainingLease)
            or (isinstance(lease, ActiveLease) and (lease.ending is not None or lease.id in state.preemptible))
            for key in lease.gpus
        }

    def _of_one_node(self, rooms: Sequence[_Room]) -> tuple[str, ...]:
        """The victims on the node where they are fewest."""
        best: tuple[str, ...] | None = None
        for room in rooms:
            if best is None or room.fewest <= len(best):
                found = self._fewest(room.leases, room.fewest, room.has_enough)
                if best is None or self._rank(found) < self._rank(best):
                    best = found
        return best or ()

    def _of_gang(self, rooms: Sequence[_Room], nodes: int) -> tuple[str, ...]:
        """The victims on so many nodes. A lease that is on several of them counts once."""
        each = sorted((self._rank(found), found) for found in (self._of_one_node([room]) for room in rooms))[:nodes]

        def is_enough(victims: Sequence[str]) -> bool:
            return sum(room.has_enough(victims) for room in rooms) >= nodes

        found = self._spare(self._young_first({victim for _, own in each for victim in own}), is_enough)
        leases = self._young_first({lease_id for room in rooms for lease_id in room.leases})
        places = sum((Counter(room.places) for room in rooms), Counter())
        lacking = sum(sorted(room.lacking for room in rooms)[:nodes])
        better = self._search(leases, _fewest_for(lacking, places), len(found), is_enough)
        return found if better is None else better

    def _fewest(self, leases: Sequence[str], least: int, is_enough: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
        found = self._search(leases, least, len(leases), is_enough)
        if found is not None:
            return found
        number = next(number for number in range(len(leases) + 1) if is_enough(leases[:number]))
        return self._spare(leases[:number], is_enough)

    def _search(
        self, leases: Sequence[str], least: int, most: int, is_enough: Callable[[Sequence[str]], bool]
    ) -> tuple[str, ...] | None:
        """The fewest of these leases that are enough, at most so many; None if none are found in time."""
        for number in range(least, most + 1):
            for chosen in _choices(leases, number, len(leases)):
                if not self._tries_left:
                    return None
                self._tries_left -= 1
                if is_enough(chosen):
                    return chosen
        return None

    @staticmethod
    def _spare(leases: Sequence[str], is_enough: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
        """These leases without those that are not needed, the oldest first."""
        kept = tuple(leases)
        for lease_id in leases[::-1]:
            others = tuple(other for other in kept if other != lease_id)
            if is_enough(others):
                kept = others
        return kept

    def _rank(self, victims: Sequence[str]) -> tuple[object, ...]:
        """Fewer come first, then those whose oldest is younger."""
        return (len(victims), [_youth(self._survey.state, victim) for victim in reversed(victims)])

    def _young_first(self, leases: AbstractSet[str]) -> list[str]:
        return sorted(leases, key=lambda lease_id: _youth(self._survey.state, lease_id))


class _Room:
    """The GPUs of one node that a waiter could have. `lacking` is how many of them must still be freed for it, `leases`
    are the leases that may be ended for that, the youngest first, and `places` on how many of these GPUs each is.
    """

    def __init__(self, survey: Survey, node: str, wishes: Wishes, avoiding: AbstractSet[GpuKey]) -> None:
        self._survey = survey
        self._wishes = wishes
        self._free: list[GpuKey] = []
        self._held: dict[GpuKey, tuple[str, ...]] = {}
        self._does: dict[tuple[GpuKey, tuple[str, ...]], bool] = {}
        state = survey.state
        for key in sorted(state.capacity.gpus_of(node) - avoiding):
            slot = state.slots[key]
            if survey.score(slot, wishes) is not None or (
                any(_is_leaving(state, lease_id) for lease_id in slot.occupants) and self._would_do(slot, ())
            ):
                self._free.append(key)
                continue
            held = tuple(
                lease_id
                for lease_id in slot.occupants
                if lease_id in state.preemptible and not _is_leaving(state, lease_id)
            )
            if held and self._would_do(slot, held):
                self._held[key] = held
        self.lacking = max(wishes.gpus - len(self._free), 0)
        self.places = Counter(lease_id for held in self._held.values() for lease_id in held)
        self.leases = sorted(self.places, key=lambda lease_id: _youth(state, lease_id))

    @property
    def fewest(self) -> int:
        """So many leases must end here at least."""
        return _fewest_for(self.lacking, self.places)

    def has_enough(self, victims: Sequence[str]) -> bool:
        return not self.lacking or sum(self._is_freed(key, victims) for key in self._held) >= self.lacking

    def first(self, victims: Sequence[str]) -> tuple[GpuKey, ...]:
        freed = [key for key in self._held if self._is_freed(key, victims)]
        return tuple([*self._free, *freed][: self._wishes.gpus])

    def _is_freed(self, key: GpuKey, victims: Sequence[str]) -> bool:
        gone = tuple(lease_id for lease_id in self._held[key] if lease_id in victims)
        if not gone:
            return False
        if (key, gone) not in self._does:
            self._does[key, gone] = self._would_do(self._survey.state.slots[key], gone)
        return self._does[key, gone]

    def _would_do(self, slot: GpuSlot, gone: Sequence[str]) -> bool:
        """Whether a GPU would do without these leases and those that are leaving."""
        state, left = self._survey.state, Occupants(slot.occupants)
        for lease_id in slot.occupants:
            if lease_id in gone or _is_leaving(state, lease_id):
                del left[lease_id]
        return would_do(state, slot, self._wishes, left, self._survey.now)


def spared(state: PoolState, awaited: AbstractSet[GpuKey], now: float) -> list[str]:
    """The leases that were told to make room, and need not: no waiter has a claim or the reservation there, no booking,
    and no GPU of theirs is to be out of service. After a restart that is not known before all GPUs have been read.
    """
    unclaimed = sorted(
        lease_id
        for lease_id in state.making_room
        if awaited.isdisjoint(_active(state, lease_id).gpus)
        and state.excluded.keys().isdisjoint(_active(state, lease_id).gpus)
        and not any(is_in_the_way(state, lease_id, booking, now) for booking in state.bookings.values())
    )
    if not unclaimed or any(slot.occupants and slot.reading is None for slot in state.slots.values()):
        return []
    return [lease_id for lease_id in unclaimed if _is_read(state, lease_id, now)]


def _is_read(state: PoolState, lease_id: str, now: float) -> bool:
    """Whether its GPUs have been read lately. No waiter can count on others."""
    readings = (state.slots[key].reading for key in _active(state, lease_id).gpus)
    return all(reading is not None and now <= stale_at(state, reading) for reading in readings)


def _choices(leases: Sequence[str], number: int, end: int) -> Iterator[tuple[str, ...]]:
    """All choices of so many of the first `end` leases; those whose oldest is younger come first."""
    if number == 0:
        yield ()
        return
    for last in range(number - 1, end):
        for others in _choices(leases, number - 1, last):
            yield (*others, leases[last])


def _fewest_for(lacking: int, places: Counter[str]) -> int:
    """The fewest leases that can free so many GPUs."""
    if lacking <= 0:
        return 0
    freed = accumulate(number for _, number in places.most_common())
    return next((number for number, total in enumerate(freed, 1) if total >= lacking), len(places))


def _youth(state: PoolState, lease_id: str) -> tuple[float, str]:
    """Sorts leases, the youngest first."""
    return (-_active(state, lease_id).granted_at, lease_id)


def _is_leaving(state: PoolState, lease_id: str) -> bool:
    lease = state.leases[lease_id]
    return isinstance(lease, DrainingLease) or (isinstance(lease, ActiveLease) and lease.ending is not None)


def _active(state: PoolState, lease_id: str) -> ActiveLease:
    lease = state.leases[lease_id]
    assert isinstance(lease, ActiveLease), lease  # noqa: S101 - a broken invariant must not go on
    return lease
