"""A pool in simulated time for benchmarks/replay: the real core on the nodes of a trace, with simulated readings.

A lease uses the memory it asked for (an exclusive one uses all of it), and the same share of the GPU's time. Whenever the
leases on a GPU change, the GPU is read again at once. Thresholds are at 100 % and readings never grow stale, so that only
the placement and the queue make a difference.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence

from benchmarks.replay.fragmentation import Kind, fragmented_milli
from benchmarks.replay.openb import GPU_MB, GPU_MILLI, MB_PER_MILLI, Node, Task
from benchmarks.replay.policies import Policy
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import MAX_TTL_S, Request
from gpu_worker_pool.core.model.settings import PoolSettings, Thresholds
from gpu_worker_pool.core.model.state import PoolState

SETTINGS = PoolSettings(
    thresholds=Thresholds(100.0, 100.0),
    stale_after_s=1e9,
    max_queued=1_000_000,
    max_queued_per_owner=1_000_000,
    max_leases_per_owner=1_000_000,
    remembered_ended_leases=0,
)
READ_AFTER_S = 1e-6
# At 100 % a GPU would be over its threshold.
BUSY_PERCENT = 99.0


class SimulatedPool:
    """The core on these nodes. `decisions_s` has the processor time of each step, because other processes may run too."""

    def __init__(self, nodes: Sequence[Node], kinds: tuple[Kind, ...], policy: Policy, seed: int) -> None:
        self.state = PoolState(SETTINGS, capacity=policy.capacity(random.Random(seed), kinds))
        self.kinds = kinds
        self.nodes = {node.name: node for node in nodes}
        self.capacity_milli = sum(node.gpus for node in nodes) * GPU_MILLI
        self.free_milli: dict[str, dict[int, int]] = {
            node.name: dict.fromkeys(range(node.gpus), GPU_MILLI) for node in nodes
        }
        self.allocated_milli = 0
        self.decisions_s: list[float] = []
        self._gpus: dict[GpuKey, Gpu] = {}
        self._held: dict[str, tuple[tuple[GpuKey, ...], int]] = {}
        self._asked: dict[str, Task] = {}
        for node in nodes:
            for index in range(node.gpus):
                key = GpuKey(node.name, f"GPU-{node.name}-{index}")
                self._gpus[key] = Gpu(key, index, node.model)
        step(self.state, cmd.Open("boot"), 0.0)
        step(self.state, self._look(self._gpus, 0.0), 0.0)

    @property
    def waiting(self) -> int:
        return len(self.state.queue)

    def ask(self, lease_id: str, task: Task, now: float) -> list[str] | None:
        """Ask for a task's GPUs. Returns the leases that began, which may be none; None if the request was refused."""
        self._asked[lease_id] = task
        request = Request(task.wishes, ttl_s=MAX_TTL_S)
        granted = self._do(cmd.RequestLease(lease_id, request), now)
        return granted if self.state.find(lease_id) else None

    def leave(self, lease_id: str, now: float) -> list[str]:
        """Release GPUs, or no longer wait for them. Returns the leases that began."""
        return self._do(cmd.Release(lease_id, is_holder=True), now)

    def renew(self, now: float) -> None:
        """Renew all leases."""
        step(self.state, cmd.Renew(tuple(self.state.leases)), now)

    def fragmented(self) -> float:
        """Return the share of the capacity that is free and of no use to a task of this work, on average."""
        lost_milli = sum(
            fragmented_milli(tuple(sorted(self.free_milli[name].values())), node.model, self.kinds)
            for name, node in self.nodes.items()
        )
        return lost_milli / self.capacity_milli

    def _do(self, command: cmd.Command, now: float) -> list[str]:
        granted: list[str] = []
        next_command: cmd.Command | None = command
        while next_command is not None:
            began = time.process_time()
            events = step(self.state, next_command, now)
            self.decisions_s.append(time.process_time() - began)
            changed: dict[GpuKey, None] = {}
            for event in events:
                if isinstance(event, ev.LeaseGranted):
                    granted.append(event.lease_id)
                    changed.update(dict.fromkeys(event.gpus))
                    self._take(event.lease_id, event.gpus)
                elif isinstance(event, ev.LeaseEnded):
                    assert event.reason in (EndReason.RELEASED, EndReason.CANCELLED), event
                    changed.update(dict.fromkeys(self._give_back(event.lease_id)))
            # What a grant uses can be read only after it.
            now += READ_AFTER_S
            next_command = self._look(changed, now) if changed else None
        return granted

    def _take(self, lease_id: str, gpus: tuple[GpuKey, ...]) -> None:
        milli = self._asked.pop(lease_id).gpu_milli
        self._held[lease_id] = (gpus, milli)
        for key in gpus:
            self._change_free(key, -milli)

    def _give_back(self, lease_id: str) -> tuple[GpuKey, ...]:
        self._asked.pop(lease_id, None)
        gpus, milli = self._held.pop(lease_id, ((), 0))
        for key in gpus:
            self._change_free(key, milli)
        return gpus

    def _change_free(self, key: GpuKey, milli: int) -> None:
        free = self.free_milli[key.node]
        free[self._gpus[key].index] += milli
        self.allocated_milli -= milli
        assert 0 <= free[self._gpus[key].index] <= GPU_MILLI, f"{key} is held twice"

    def _look(self, keys: Iterable[GpuKey], now: float) -> cmd.Observe:
        return cmd.Observe(tuple(self._reading(key, now) for key in keys))

    def _reading(self, key: GpuKey, now: float) -> Reading:
        gpu = self._gpus[key]
        used_milli = GPU_MILLI - self.free_milli[key.node][gpu.index]
        return Reading(gpu, now, GPU_MB, used_milli * MB_PER_MILLI, used_milli / GPU_MILLI * BUSY_PERCENT)
