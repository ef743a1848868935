"""Which preemptible leases end so that a waiter that is not preemptible can be served.

Only as many as are needed, the youngest first, and none while GPUs that are being freed already will do. The GPUs that
a waiter will get that way are its *claim*; no later waiter takes those that are free already.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from math import inf
from typing import NamedTuple

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import GpuSlot, Occupants
from gpu_worker_pool.core.model.state import PoolState

from .forecast import would_do
from .placement import Survey


class Claim(NamedTuple):
    """The GPUs a waiter will have, and the leases that must be ended for it."""

    gpus: tuple[GpuKey, ...]
    victims: tuple[str, ...]


def claim(survey: Survey, wishes: Wishes, avoiding: AbstractSet[GpuKey]) -> Claim | None:
    """What a waiter gets by preemption; None if even that is not enough."""
    state = survey.state
    thresholds = state.settings.thresholds_for(wishes)
    nodes = {key.node for lease_id in state.preemptible for key in state.leases[lease_id].gpus}  # type: ignore[union-attr]
    best: tuple[tuple[int, float, str], Claim] | None = None
    for node in sorted(nodes):
        if not state.capacity.could_serve_on(node, wishes, thresholds):
            continue
        offers = [
            (*offer, slot.key)
            for slot in map(state.slots.__getitem__, state.capacity.gpus_of(node))
            if slot.key not in avoiding and (offer := _offer(survey, slot, wishes)) is not None
        ]
        if len(offers) < wishes.gpus:
            continue
        chosen = sorted(offers, key=lambda offer: (len(offer[0]), -offer[1], offer[2]))[: wishes.gpus]
        victims = tuple(dict.fromkeys(victim for offer in chosen for victim in offer[0]))
        rank = (len(victims), -min((offer[1] for offer in chosen), default=0.0), node)
        if best is None or rank < best[0]:
            best = rank, Claim(tuple(offer[2] for offer in chosen), victims)
    return best[1] if best else None


def _offer(survey: Survey, slot: GpuSlot, wishes: Wishes) -> tuple[tuple[str, ...], float] | None:
    """The leases that must be ended so that this GPU would do, and when the oldest of them was granted. None if others
    keep it.
    """
    if survey.score(slot, wishes) is not None:
        return (), inf
    state = survey.state
    left = Occupants(slot.occupants)
    for lease_id in slot.occupants:
        if _is_leaving(state, lease_id):
            del left[lease_id]
    if len(left) < len(slot.occupants) and would_do(state, slot, wishes, left, survey.now):
        return (), inf
    young_first = sorted(
        (lease_id for lease_id in left if lease_id in state.preemptible),
        key=lambda lease_id: -_active(state, lease_id).granted_at,
    )
    victims: list[str] = []
    for lease_id in young_first:
        victims.append(lease_id)
        del left[lease_id]
        if would_do(state, slot, wishes, left, survey.now):
            return tuple(victims), _active(state, lease_id).granted_at
    return None


def _is_leaving(state: PoolState, lease_id: str) -> bool:
    lease = state.leases[lease_id]
    return isinstance(lease, DrainingLease) or (isinstance(lease, ActiveLease) and lease.ending is not None)


def _active(state: PoolState, lease_id: str) -> ActiveLease:
    lease = state.leases[lease_id]
    assert isinstance(lease, ActiveLease), lease  # noqa: S101 - a broken invariant must not go on
    return lease
