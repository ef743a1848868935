"""Which preemptible leases end so that a waiter that is not preemptible can be served.

The youngest first, as many as it takes, and none while GPUs that are being freed already will do. The GPUs that a waiter will
get that way are its *claim*; no later waiter takes those that are free already. A lease that was told to make room is
spared again when no waiter counts on its GPUs any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.model.state import PoolState

from .bookings import is_in_the_way
from .eligibility import Departures, stale_at
from .placement import Placer


class Claim(NamedTuple):
    """The GPUs a waiter will have, and the leases that must be ended for it."""

    gpus: tuple[GpuKey, ...]
    victims: tuple[str, ...]


def find_claim(placer: Placer, wishes: Wishes, avoiding: AbstractSet[GpuKey]) -> Claim | None:
    """What a waiter gets if preemptible leases end; None if even that is not enough."""
    state, facts = placer.state, placer.state.facts
    thresholds, youth = state.settings.thresholds_for(wishes), partial(_youth, state)
    leaving = (
        lease for lease in state.leases.values() if lease.id in state.preemptible or _is_leaving(state, lease.id)
    )
    being_freed = {key.node for lease in leaving if not isinstance(lease, QueuedLease) for key in lease.gpus}
    nodes = (
        name
        for name, node in sorted(facts.nodes_for(wishes))
        # A gang may also use nodes that are free.
        if (wishes.nodes > 1 or name in being_freed) and facts.could_serve(node, wishes, thresholds, in_service=True)
    )
    rooms = [room for name in nodes if (room := _Room(placer, name, wishes, avoiding)).has_enough(room.leases)]
    if len(rooms) < wishes.nodes:
        return None

    def is_enough(victims: Sequence[str]) -> bool:
        return sum(room.has_enough(victims) for room in rooms) >= wishes.nodes

    # Fewer victims on a node come first, then those whose oldest is younger.
    each = sorted((len(own), [youth(victim) for victim in reversed(own)], own) for own in map(_victims_in, rooms))
    together = sorted({victim for *_, own in each[: wishes.nodes] for victim in own}, key=youth)
    victims = _spare(together, is_enough)
    chosen = [room for room in rooms if room.has_enough(victims)][: wishes.nodes]
    return Claim(tuple(key for room in chosen for key in room.first(victims)), victims)


def _victims_in(room: _Room) -> tuple[str, ...]:
    number = next(number for number in range(len(room.leases) + 1) if room.has_enough(room.leases[:number]))
    return _spare(room.leases[:number], room.has_enough)


def _spare(leases: Sequence[str], is_enough: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """These leases without those that are not needed, the oldest first."""
    kept = tuple(leases)
    for lease_id in leases[::-1]:
        others = tuple(other for other in kept if other != lease_id)
        if is_enough(others):
            kept = others
    return kept


class _Room:
    """The GPUs of one node that a waiter could have. `leases` are those that may be ended for that, the youngest first."""

    def __init__(self, placer: Placer, node: str, wishes: Wishes, avoiding: AbstractSet[GpuKey]) -> None:
        self._state = state = placer.state
        self._now = placer.now
        self._wishes = wishes
        self._free: list[GpuKey] = []
        self._held: dict[GpuKey, tuple[str, ...]] = {}
        for key in sorted(state.facts.nodes[node].gpus.keys() - avoiding):
            slot = state.slots[key]
            if placer.judge(slot, wishes).is_eligible or (
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
        on_it = {lease_id for held in self._held.values() for lease_id in held}
        self.leases = sorted(on_it, key=lambda lease_id: _youth(state, lease_id))

    def has_enough(self, victims: Sequence[str]) -> bool:
        lacking = self._wishes.gpus - len(self._free)
        return lacking <= 0 or sum(self._is_freed(key, victims) for key in self._held) >= lacking

    def first(self, victims: Sequence[str]) -> tuple[GpuKey, ...]:
        freed = [key for key in self._held if self._is_freed(key, victims)]
        return tuple([*self._free, *freed][: self._wishes.gpus])

    def _is_freed(self, key: GpuKey, victims: Sequence[str]) -> bool:
        gone = [lease_id for lease_id in self._held[key] if lease_id in victims]
        return bool(gone) and self._would_do(self._state.slots[key], gone)

    def _would_do(self, slot: GpuSlot, gone: Iterable[str]) -> bool:
        """Whether a GPU would do without these leases and those that are leaving."""
        departures = Departures(self._state, slot, self._wishes, self._now)
        for lease_id in slot.occupants:
            if lease_id in gone or _is_leaving(self._state, lease_id):
                departures.leave(lease_id)
        return departures.would_do()


def spared(state: PoolState, awaited: AbstractSet[GpuKey], now: float) -> list[str]:
    """The leases that were told to make room, and need not: no waiter has a claim or the reservation there, no booking,
    and no GPU of theirs is to be out of service. After a restart that is not known before all GPUs have been read.
    """
    if not state.preempt_warned:
        return []
    unclaimed = sorted(
        lease_id
        for lease_id in state.preempt_warned
        if awaited.isdisjoint(gpus := state.active(lease_id).gpus)
        and state.excluded.keys().isdisjoint(gpus)
        and not any(is_in_the_way(state, state.active(lease_id), each, now) for each in state.bookings.values())
    )
    if not unclaimed or any(slot.occupants and slot.reading is None for slot in state.slots.values()):
        return []
    return [lease_id for lease_id in unclaimed if _is_read(state, lease_id, now)]


def _is_read(state: PoolState, lease_id: str, now: float) -> bool:
    """Whether its GPUs have been read lately. No waiter can count on others."""
    readings = (state.slots[key].reading for key in state.active(lease_id).gpus)
    return all(reading is not None and now <= stale_at(state, reading) for reading in readings)


def _youth(state: PoolState, lease_id: str) -> tuple[float, str]:
    """Sorts leases, the youngest first."""
    return (-state.active(lease_id).granted_at, lease_id)


def _is_leaving(state: PoolState, lease_id: str) -> bool:
    lease = state.leases[lease_id]
    return isinstance(lease, EndedLease) or (isinstance(lease, ActiveLease) and lease.ending is not None)
