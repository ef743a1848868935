"""The queue's rule: which waiter is served next.

Higher priority first, then first come, first served. A waiter that cannot be served yet *holds* the free GPUs it could
use, up to its number, on the node where it can use the most. No later waiter takes those. A later waiter passes only
onto GPUs that no earlier one holds: wide requests do not starve, and a request for a T4 does not wait behind one for an
A100.

If only leases that *share* a GPU now keep the first waiter from it, the waiter holds that GPU too: no lease may join
them any more. Otherwise an endless stream of small shares would keep it out forever. One such waiter at a time is
enough, because every waiter becomes the first.

A GPU that drains because the process that released it still holds memory there is free to that same process (see
reclaim.py), unless a waiter ahead needs such a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState

from .eligibility import Leased, NoRoom
from .placement import Grant, Survey
from .reclaim import reclaim


@dataclass(slots=True)
class QueuePass:
    """The result of a pass over the queue: the grants, which GPUs are held for which waiter, which waiter reserves GPUs
    that others share, and how long that stays true if no event happens. `settled_until` is None if it has not changed,
    or if another pass is due after these grants.
    """

    grants: list[Grant]
    holds: Mapping[GpuKey, str]
    reserver: str | None
    settled_until: float | None


def serve_queue(state: PoolState, now: float) -> QueuePass:
    """Find the waiters that can be served.

    If the only change since the last pass is one new waiter, only that one can be. If nothing changed for all waiters,
    only processes that left memory on a GPU can be.
    """
    if now <= state.settled_until and not state.newcomers:
        outcome = QueuePass([], state.holds, state.reserver, None)
    elif now <= state.settled_until and len(state.newcomers) == 1:
        outcome = _admit(state, state.queued(state.newcomers[0]), now) or _pass_over_queue(state, now)
    else:
        outcome = _pass_over_queue(state, now)
    may_reclaim = state.reclaimable or state.capacity.used_outside_by
    if not outcome.grants and may_reclaim and (grant := reclaim(state, now)) is not None:
        return QueuePass([grant], outcome.holds, outcome.reserver, None)
    return outcome


def _pass_over_queue(state: PoolState, now: float) -> QueuePass:
    survey = Survey(state, now)
    # GPUs that no later waiter may take: granted in this pass, or held by an earlier waiter.
    gone: dict[GpuKey, str] = {}
    grants: list[Grant] = []
    holds: dict[GpuKey, str] = {}
    lines = state.queue.by_wishes
    heads = [(line[0], 0, wishes) for wishes, line in lines.items()]
    heapify(heads)
    reserver: str | None = None
    failed = _FailedWishes()
    while heads:
        (_, _, lease_id), index, wishes = heappop(heads)
        may_reserve = reserver is None and state.capacity.has_shared_gpus
        if not may_reserve and failed.covers(wishes):
            continue
        gpus = survey.place(wishes, gone.keys())
        if gpus is not None:
            grants.append(Grant(lease_id, gpus))
            gone.update(dict.fromkeys(gpus, lease_id))
            if wishes.is_shared or state.settings.workers_per_gpu > 1:
                # Another waiter may still share this GPU. That can be told only after this grant.
                return QueuePass(grants, holds, reserver, None)
        else:
            failed.add(wishes)
            kept = _free(survey, wishes, gone)
            if may_reserve:
                reserved = _held_by_sharers(survey, wishes, gone, kept)
                reserver = lease_id if reserved else None
                kept += reserved
            if not kept:
                continue  # later waiters with the same wishes find even less
            holds.update(dict.fromkeys(kept, lease_id))
            gone.update(dict.fromkeys(kept, lease_id))
        if index + 1 < len(lines[wishes]):
            heappush(heads, (lines[wishes][index + 1], index + 1, wishes))
    return QueuePass(grants, holds, reserver, survey.holds_until)


class _FailedWishes:
    """Wishes that failed in one pass. GPUs taken in a pass stay taken until its end. So a waiter that wants as much or
    more of the same GPUs, or of some of them, need not try, and a queue of many different wishes costs little more than
    one of few.
    """

    def __init__(self) -> None:
        self._least_mb: dict[tuple[object, ...], float] = {}

    def add(self, wishes: Wishes) -> None:
        """Record a failure. One for several GPUs says nothing about a single GPU, so it is not recorded."""
        if wishes.gpus == 1:
            kind = (*_terms(wishes), wishes.model, wishes.among)
            self._least_mb[kind] = min(wishes.memory_mb or 0.0, self._least_mb.get(kind, inf))

    def covers(self, wishes: Wishes) -> bool:
        """Whether a wish for less has failed."""
        terms = _terms(wishes)
        least_mb = min(
            self._least_mb.get((*terms, wishes.model, wishes.among), inf), self._least_mb.get((*terms, None, None), inf)
        )
        return (wishes.memory_mb or 0.0) >= least_mb


def _terms(wishes: Wishes) -> tuple[object, ...]:
    return wishes.is_shared, wishes.memory_threshold_percent, wishes.utilization_threshold_percent


def _admit(state: PoolState, newcomer: QueuedLease, now: float) -> QueuePass | None:
    """Serve one new waiter in a queue in which no other could be served; None if it affects the others.

    The GPUs it takes or holds matter to later waiters only if they held them. Earlier waiters are not affected.
    """
    ahead = {key: id_ for key, id_ in state.holds.items() if state.queued(id_).order < newcomer.order}
    survey = Survey(state, now)
    wishes = newcomer.request.wishes
    gpus = survey.place(wishes, ahead.keys())
    kept = [] if gpus is not None else _free(survey, wishes, ahead)
    if any(key in state.holds for key in gpus or kept):
        return None
    settled_until = min(state.settled_until, survey.holds_until)
    if gpus is not None:
        # An earlier waiter may have to reserve a GPU that is shared from now on.
        until = None if wishes.is_shared else settled_until
        return QueuePass([Grant(newcomer.id, gpus)], state.holds, state.reserver, until)
    if state.reserver not in ahead.values() and _held_by_sharers(survey, wishes, ahead, kept):
        return None
    return QueuePass([], {**state.holds, **dict.fromkeys(kept, newcomer.id)}, state.reserver, settled_until)


def _free(survey: Survey, wishes: Wishes, gone: Mapping[GpuKey, str]) -> list[GpuKey]:
    """The GPUs a waiter could use now, on the suitable node where it can use the most (of equals, the first by name)."""
    if wishes.gpus == 1:
        return []  # a usable GPU would have been granted
    most: list[GpuKey] = []
    state, capacity = survey.state, survey.state.capacity
    thresholds = state.settings.thresholds_for(wishes)
    for count, node in capacity.nodes_by_room(wishes, include_loaded=survey.is_lax(wishes)):
        if count < max(len(most), 1) or (count == len(most) and node > most[0].node):
            break  # nodes with equally many open GPUs are sorted by name
        not_gone = [slot for slot in capacity.open_slots_of(node, shared=wishes.is_shared) if slot.key not in gone]
        if len(not_gone) < max(len(most), 1) or not capacity.could_serve_on(node, wishes, thresholds):
            continue
        usable = [slot.key for slot in not_gone if survey.score(slot, wishes) is not None]
        if len(usable) > len(most) or (usable and len(usable) == len(most) and node < most[0].node):
            most = usable
    return most


def _held_by_sharers(survey: Survey, wishes: Wishes, gone: Mapping[GpuKey, str], free: list[GpuKey]) -> list[GpuKey]:
    """GPUs that only sharing leases keep from this waiter, up to its number: on the node where it holds GPUs already,
    else on the node of the least committed GPU.
    """
    state = survey.state
    thresholds = state.settings.thresholds_for(wishes)

    def is_kept_by_sharers(key: GpuKey) -> bool:
        slot = state.slots[key]
        if key in gone or not slot.is_shared:
            return False
        is_in_the_way = isinstance(survey.judge(slot, wishes), Leased | NoRoom)
        return is_in_the_way and state.capacity.could_serve_on(key.node, wishes, thresholds)

    if free:
        node = free[0].node
    else:
        least = next(filter(is_kept_by_sharers, state.capacity.shared_gpus_by_commitment(wishes)), None)
        if least is None or wishes.gpus == 1:
            return [least] if least else []
        node = least.node
    slots = state.capacity.open_slots_of(node, shared=True)
    return [slot.key for slot in slots if is_kept_by_sharers(slot.key)][: wishes.gpus - len(free)]
