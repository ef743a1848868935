"""EASY backfilling with exact time limits: the rule of batch schedulers such as Slurm, where every job declares how long it
runs. It is the reference for our queue: it knows each run time, and the pool knows only what is declared.

The first waiter that cannot be served has a reservation: the earliest time at which it can start, if the tasks that run now
end when they do and no other starts. A later waiter starts now if that does not move this date: it ends before, or it takes
what the first one does not need then. The date is found again after each start and each end. It never becomes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from benchmarks.replay.fragmentation import Kind
from benchmarks.replay.line import LinePool
from benchmarks.replay.openb import GPU_MILLI, Node, Task
from benchmarks.replay.policies import Policy
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes, matches_model
from gpu_worker_pool.core.queue.placement import Placer


class Use(NamedTuple):
    """What a task takes of a GPU, and until when."""

    until: float
    milli: int


class Start(NamedTuple):
    """When a waiter can start at the earliest, and on which GPUs."""

    at: float
    gpus: tuple[GpuKey, ...]


class EasyPool(LinePool):
    """The core behind a line whose first waiter has a reservation. `promised` has the first date that each was given."""

    def __init__(self, nodes: Sequence[Node], kinds: tuple[Kind, ...], policy: Policy, seed: int) -> None:
        super().__init__(nodes, kinds, policy, seed)
        self.promised: dict[str, float] = {}
        self.uses: dict[GpuKey, dict[str, Use]] = {key: {} for key in self.gpus}

    def leave(self, lease_id: str, now: float) -> list[str]:
        for key in self.gpus_of(lease_id):
            del self.uses[key][lease_id]
        return super().leave(lease_id, now)

    def begin(self, lease_id: str, gpus: tuple[GpuKey, ...], now: float) -> None:
        task = self.line[lease_id]
        super().begin(lease_id, gpus, now)
        for key in gpus:
            self.uses[key][lease_id] = Use(now + task.duration_s, task.gpu_milli)

    def next_of(self, now: float) -> tuple[str, tuple[GpuKey, ...]] | None:
        if not self.line:
            return None
        placer = Placer(self.state, max(now, self.state.clock))
        (first_id, first), *later = self.line.items()
        gpus = placer.place(first.wishes)
        if gpus is not None:
            return first_id, gpus
        start = self.earliest(first, now)
        self.promised.setdefault(first_id, start.at)
        failed: set[tuple[Wishes, bool]] = set()
        for lease_id, task in later:
            ends_before = now + task.duration_s <= start.at
            if (task.wishes, ends_before) in failed:
                continue
            gpus = placer.place(task.wishes)
            if gpus is not None and not ends_before and self.earliest(first, now, gpus, task.gpu_milli).at > start.at:
                gpus = placer.place(task.wishes, frozenset(start.gpus))
            if gpus is not None:
                return lease_id, gpus
            failed.add((task.wishes, ends_before))
        return None

    def earliest(self, task: Task, now: float, taken: Sequence[GpuKey] = (), taken_milli: int = 0) -> Start:
        """Return when a task can start if no other starts, except for one that takes so much of these GPUs for ever."""

        def free_from(key: GpuKey) -> float:
            uses = sorted(self.uses[key].values())
            free_milli = GPU_MILLI - sum(use.milli for use in uses) - (taken_milli if key in taken else 0)
            for use in (Use(now, 0), *uses):
                free_milli += use.milli
                if free_milli >= task.gpu_milli:
                    return max(use.until, now)
            return inf

        found: list[Start] = []
        for name, node in self.nodes.items():
            if node.gpus >= task.gpus and matches_model(task.wishes.model, node.model):
                soonest = sorted((free_from(key), key) for key in self.gpus_on[name])[: task.gpus]
                found.append(Start(soonest[-1][0], tuple(key for _, key in soonest)))
        return min(found)
