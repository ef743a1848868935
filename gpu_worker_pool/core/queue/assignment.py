"""The queue's rule: who is served next.

Higher priority first, then first come first served. A waiter who cannot be served yet *holds* the free GPUs he could
use, up to his number, on the node where he can use the most; nobody later takes those. So somebody later passes only
onto GPUs that no earlier waiter is holding: wide requests do not starve, and who wants a T4 does not wait behind who
wants an A100.

The first in the line whom only those keep waiting who *share* a GPU now also holds that GPU: nobody may join them any
more, or an endless stream of small shares would keep him out forever. One such waiter at a time is enough: everybody is
the first one day.

A GPU that drains because the process that gave it back still holds memory there is free to that same process (see
reclaim.py), unless somebody ahead waits for such a GPU.
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
    """What a look at the queue found: who is served, which GPUs are held for whom, who of these reserves what others
    share, and how long that stays true if nothing happens. `settled_until` is None where that is known already, or where
    another pass is due once these grants have happened.
    """

    grants: list[Grant]
    holds: Mapping[GpuKey, str]
    reserver: str | None
    settled_until: float | None


def serve_queue(state: PoolState, now: float) -> QueuePass:
    """Find who can be served. Where all that happened since the last look is that one came, only that one can be; where
    nothing happened that matters to everybody, only those who left something on a GPU.
    """
    if now <= state.settled_until and not state.newcomers:
        outcome = QueuePass([], state.holds, state.reserver, None)
    elif now <= state.settled_until and len(state.newcomers) == 1:
        outcome = _admit(state, state.queued(state.newcomers[0]), now) or _pass_over_queue(state, now)
    else:
        outcome = _pass_over_queue(state, now)
    if not outcome.grants and state.reclaimable and (grant := reclaim(state, now)) is not None:
        return QueuePass([grant], outcome.holds, outcome.reserver, None)
    return outcome


def _pass_over_queue(state: PoolState, now: float) -> QueuePass:
    """Go through the whole line, in order."""
    survey = Survey(state, now)
    # What nobody further back may take: granted in this pass, or held by somebody ahead.
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
                # Somebody else may still join him there; that can be told only after this has happened.
                return QueuePass(grants, holds, reserver, None)
        else:
            failed.add(wishes)
            kept = _free(survey, wishes, gone)
            if may_reserve:
                reserved = _held_by_sharers(survey, wishes, gone, kept)
                reserver = lease_id if reserved else None
                kept += reserved
            if not kept:
                continue  # those who wish for the same and come later find even less
            holds.update(dict.fromkeys(kept, lease_id))
            gone.update(dict.fromkeys(kept, lease_id))
        if index + 1 < len(lines[wishes]):
            heappush(heads, (lines[wishes][index + 1], index + 1, wishes))
    return QueuePass(grants, holds, reserver, survey.holds_until)


class _FailedWishes:
    """What could not be had in one pass. What is gone stays gone until its end, so whoever wants as much or more of the
    same GPUs, or of some of them, need not try: a line of many different wishes costs little more than one of few.
    """

    def __init__(self) -> None:
        self._least_mb: dict[tuple[object, ...], float] = {}

    def add(self, wishes: Wishes) -> None:
        """Nobody gets this. Of several GPUs that says nothing about one of them."""
        if wishes.gpus == 1:
            kind = (*_terms(wishes), wishes.model, wishes.among)
            self._least_mb[kind] = min(wishes.memory_mb or 0.0, self._least_mb.get(kind, inf))

    def covers(self, wishes: Wishes) -> bool:
        """Whether no GPU is left that would do, because less was asked for in vain."""
        terms = _terms(wishes)
        least_mb = min(
            self._least_mb.get((*terms, wishes.model, wishes.among), inf), self._least_mb.get((*terms, None, None), inf)
        )
        return (wishes.memory_mb or 0.0) >= least_mb


def _terms(wishes: Wishes) -> tuple[object, ...]:
    return wishes.is_shared, wishes.memory_threshold_percent, wishes.utilization_threshold_percent


def _admit(state: PoolState, newcomer: QueuedLease, now: float) -> QueuePass | None:
    """Serve somebody who has just joined a line in which nobody could be served; None where others are concerned.

    What he takes or holds is one more thing gone for those behind him, which changes nothing for them unless they
    were holding it. Those ahead of him do not notice him.
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
        # A GPU that is shared from now on is one that somebody ahead may have to reserve.
        until = None if wishes.is_shared else settled_until
        return QueuePass([Grant(newcomer.id, gpus)], state.holds, state.reserver, until)
    if state.reserver not in ahead.values() and _held_by_sharers(survey, wishes, ahead, kept):
        return None
    return QueuePass([], {**state.holds, **dict.fromkeys(kept, newcomer.id)}, state.reserver, settled_until)


def _free(survey: Survey, wishes: Wishes, gone: Mapping[GpuKey, str]) -> list[GpuKey]:
    """What a waiter who cannot be served could use now, on the node where that is the most (of equals, the first by
    name), among the nodes that have enough GPUs for him at all.
    """
    if wishes.gpus == 1:
        return []  # one that he could use would be his
    most: list[GpuKey] = []
    state, capacity = survey.state, survey.state.capacity
    thresholds = state.settings.thresholds_for(wishes)
    for count, node in capacity.nodes_by_room(wishes, include_loaded=survey.is_lax(wishes)):
        if count < max(len(most), 1) or (count == len(most) and node > most[0].node):
            break  # of nodes with as many open, those that follow come later by name
        not_gone = [slot for slot in capacity.open_slots_of(node, shared=wishes.is_shared) if slot.key not in gone]
        if len(not_gone) < max(len(most), 1) or not capacity.could_serve_on(node, wishes, thresholds):
            continue
        usable = [slot.key for slot in not_gone if survey.score(slot, wishes) is not None]
        if len(usable) > len(most) or (usable and len(usable) == len(most) and node < most[0].node):
            most = usable
    return most


def _held_by_sharers(survey: Survey, wishes: Wishes, gone: Mapping[GpuKey, str], free: list[GpuKey]) -> list[GpuKey]:
    """GPUs that only those who share them now keep from this waiter, up to his number: on the node where he holds
    others already, else on that of the least committed one.
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
