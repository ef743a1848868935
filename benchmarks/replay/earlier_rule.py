"""The queue's rule that the pool had before: every waiter that cannot be served holds what it could use.

A waiter holds the free GPUs it could use, up to its number, on the node where it can use the most. If only leases that
share a GPU keep the first waiter from it, the waiter holds that GPU too. No later waiter takes what is held.
"""

from __future__ import annotations

from benchmarks.replay.line import LinePool
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import memory_use
from gpu_worker_pool.core.queue.placement import Survey
from gpu_worker_pool.core.queue.verdicts import Leased, NoRoom


class HoldingPool(LinePool):
    """The core behind a line in which every waiter holds GPUs."""

    def next_of(self, now: float) -> tuple[str, tuple[GpuKey, ...]] | None:
        survey = Survey(self.state, max(now, self.state.clock))
        held: set[GpuKey] = set()
        failed: set[Wishes] = set()
        has_reserver = False
        for lease_id, task in self.line.items():
            wishes = task.wishes
            if wishes in failed:
                continue
            gpus = survey.place(wishes, held)
            if gpus is not None:
                return lease_id, gpus
            kept = _free(survey, wishes, held)
            if not has_reserver:
                shared = _held_by_sharers(survey, wishes, held, kept)
                has_reserver = bool(shared)
                kept += shared
            held.update(kept)
            if not kept:
                failed.add(wishes)  # later waiters with the same wishes find even less
        return None


def _free(survey: Survey, wishes: Wishes, held: set[GpuKey]) -> list[GpuKey]:
    """The GPUs that a waiter for several could use now, on the suitable node where it can use the most."""
    if wishes.gpus == 1:
        return []  # a usable GPU would have been granted
    state = survey.state
    thresholds = state.settings.thresholds_for(wishes)
    usable = (
        [slot.key for slot, _ in survey.usable_on(node, wishes, held)]
        for node in sorted(state.capacity.nodes)
        if state.capacity.could_serve_on(node, wishes, thresholds)
    )
    return max(usable, key=len, default=[])


def _held_by_sharers(survey: Survey, wishes: Wishes, held: set[GpuKey], free: list[GpuKey]) -> list[GpuKey]:
    """GPUs that only sharing leases keep from this waiter, up to its number: on the node where it holds GPUs already,
    else on the node of the least committed GPU.
    """
    state = survey.state
    thresholds = state.settings.thresholds_for(wishes)
    kept = [
        slot
        for slot in state.slots.values()
        if slot.is_shared
        and slot.key not in held
        and isinstance(survey.judge(slot, wishes), Leased | NoRoom)
        and state.capacity.could_serve_on(slot.key.node, wishes, thresholds)
    ]
    if not kept:
        return []

    def committed_mb(key: GpuKey) -> float:
        use = memory_use(state.slots[key], state.ignored_processes)
        return use.committed_mb if use else 0.0

    keys = sorted((slot.key for slot in kept), key=lambda key: (committed_mb(key), key))
    node = free[0].node if free else keys[0].node
    if wishes.gpus == 1:
        return keys[:1]
    return [key for key in sorted(keys) if key.node == node][: wishes.gpus - len(free)]
