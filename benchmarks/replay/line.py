"""A line of waiters outside the core, for queues that are not ours.

A rule says which waiter is next, and on which GPUs. The line asks the core for these GPUs by their names. So the placement
is ours, and the speed is not that of the pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.replay.fragmentation import Kind
from benchmarks.replay.openb import Node, Task
from benchmarks.replay.policies import Policy
from benchmarks.replay.pool import SimulatedPool
from gpu_worker_pool.core.model.gpu import GpuKey


class LinePool(SimulatedPool, ABC):
    """The core behind a line. `line` has the tasks that wait, in the order in which they came."""

    def __init__(self, nodes: Sequence[Node], kinds: tuple[Kind, ...], policy: Policy, seed: int) -> None:
        super().__init__(nodes, kinds, policy, seed)
        self.line: dict[str, Task] = {}

    @property
    def waiting(self) -> int:
        return len(self.line)

    def ask(self, lease_id: str, task: Task, now: float) -> list[str]:
        if not self.state.facts.could_ever_serve(task.wishes, self.state.settings.thresholds):
            self.refused.add(lease_id)
            return []
        self.line[lease_id] = task
        return self._serve(now)

    def leave(self, lease_id: str, now: float) -> list[str]:
        if self.line.pop(lease_id, None) is None:
            super().leave(lease_id, now)
        return self._serve(now)

    def pass_time(self, now: float) -> list[str]:
        super().pass_time(now)
        return self._serve(now)

    @abstractmethod
    def next_of(self, now: float) -> tuple[str, tuple[GpuKey, ...]] | None:
        """Return the first waiter that can be served, and its GPUs; None if there is none."""

    def begin(self, lease_id: str, gpus: tuple[GpuKey, ...], now: float) -> None:
        """Let a waiter begin on these GPUs."""
        task = self.line.pop(lease_id)
        names = tuple(key.uuid for key in gpus)
        began = super().ask(lease_id, replace(task, wishes=replace(task.wishes, among=names)), now)
        assert began == [lease_id], (lease_id, gpus)

    def _serve(self, now: float) -> list[str]:
        granted: list[str] = []
        while (found := self.next_of(now)) is not None:
            self.begin(*found, now)
            granted.append(found[0])
        return granted
