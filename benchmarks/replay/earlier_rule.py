"""The queue's rule that the pool had before: every waiter that cannot be served holds what it could use.

A waiter holds the free GPUs it could use, up to its number, on the node where it can use the most. If only leases that
share a GPU keep the first waiter from it, the waiter holds that GPU too. No later waiter takes what is held.

The waiters stand in a line outside the core. The core places each: what the rule finds for a waiter is asked for by the
names of the GPUs. So the placement is ours, and the speed is not that of the pool as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.replay.fragmentation import Kind
from benchmarks.replay.openb import Node, Task
from benchmarks.replay.policies import Policy
from benchmarks.replay.pool import SimulatedPool
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import memory_use
from gpu_worker_pool.core.queue.placement import Survey
from gpu_worker_pool.core.queue.verdicts import Leased, NoRoom


class HoldingPool(SimulatedPool):
    """The core behind a line in which every waiter holds GPUs."""

    def __init__(self, nodes: Sequence[Node], kinds: tuple[Kind, ...], policy: Policy, seed: int) -> None:
        super().__init__(nodes, kinds, policy, seed)
        self._line: dict[str, Task] = {}

    @property
    def waiting(self) -> int:
        return len(self._line)

    def ask(self, lease_id: str, task: Task, now: float) -> list[str]:
        if not self.state.capacity.could_ever_serve(task.wishes, self.state.settings.thresholds):
            self.refused.add(lease_id)
            return []
        self._line[lease_id] = task
        return self._serve(now)

    def leave(self, lease_id: str, now: float) -> list[str]:
        if self._line.pop(lease_id, None) is None:
            super().leave(lease_id, now)
        return self._serve(now)

    def pass_time(self, now: float) -> list[str]:
        super().pass_time(now)
        return self._serve(now)

    def _serve(self, now: float) -> list[str]:
        granted: list[str] = []
        while (found := self._next(now)) is not None:
            lease_id, gpus = found
            task = self._line.pop(lease_id)
            names = tuple(key.uuid for key in gpus)
            began = super().ask(lease_id, replace(task, wishes=replace(task.wishes, among=names)), now)
            assert began == [lease_id], (lease_id, gpus)
            granted += began
        return granted

    def _next(self, now: float) -> tuple[str, tuple[GpuKey, ...]] | None:
        """The first waiter that can be served, and its GPUs; None if there is none."""
        survey = Survey(self.state, max(now, self.state.clock))
        held: set[GpuKey] = set()
        failed: set[Wishes] = set()
        has_reserver = False
        for lease_id, task in self._line.items():
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
