"""The queue's rule that the pool had before: every waiter that cannot be served holds what it could use.

A waiter holds the free GPUs it could use, up to its number, on the node where it can use the most. If only leases that
share a GPU keep the first waiter from it, the waiter holds that GPU too. No later waiter takes what is held.
"""

from __future__ import annotations

from operator import itemgetter

from benchmarks.replay.line import LinePool
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import memory_use
from gpu_worker_pool.core.queue.placement import Placer


class HoldingPool(LinePool):
    """The core behind a line in which every waiter holds GPUs."""

    def next_of(self, now: float) -> tuple[str, tuple[GpuKey, ...]] | None:
        placer = Placer(self.state, max(now, self.state.clock))
        held: set[GpuKey] = set()
        failed: set[Wishes] = set()
        has_reserver = False
        for lease_id, task in self.line.items():
            wishes = task.wishes
            if wishes in failed:
                continue
            gpus = placer.place(wishes, held)
            if gpus is not None:
                return lease_id, gpus
            kept = _free(placer, wishes, held)
            if not has_reserver:
                shared = _held_by_sharers(placer, wishes, held, kept)
                has_reserver = bool(shared)
                kept += shared
            held.update(kept)
            if not kept:
                failed.add(wishes)  # later waiters with the same wishes find even less
        return None


def _free(placer: Placer, wishes: Wishes, held: set[GpuKey]) -> list[GpuKey]:
    """The GPUs that a waiter for several could use now, on the suitable node where it can use the most."""
    if wishes.gpus == 1:
        return []  # a usable GPU would have been granted
    state = placer.state
    thresholds = state.settings.thresholds_for(wishes)
    usable = (
        [key for key in node.gpus if key not in held and placer.is_eligible(key, wishes)]
        for _, node in sorted(state.facts.nodes.items(), key=itemgetter(0))
        if state.facts.could_serve(node, wishes, thresholds, in_service=True)
    )
    return max(usable, key=len, default=[])


def _held_by_sharers(placer: Placer, wishes: Wishes, held: set[GpuKey], free: list[GpuKey]) -> list[GpuKey]:
    """GPUs that only sharing leases keep from this waiter, up to its number: on the node where it holds GPUs already,
    else on the node of the least committed GPU.
    """
    state = placer.state
    thresholds = state.settings.thresholds_for(wishes)
    kept = [
        slot
        for slot in state.slots.values()
        if slot.is_shared
        and slot.key not in held
        and placer.judge(slot, wishes).code in {"leased", "no_room"}
        and state.facts.could_serve(state.facts.nodes[slot.key.node], wishes, thresholds, in_service=True)
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
