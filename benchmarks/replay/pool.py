"""The core on the nodes of a trace, in simulated time. GPUs show the use of the tasks that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, nextafter

from benchmarks.replay.openb import GPU_MB, GPU_MILLI, MB_PER_MILLI, Node, Task
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.bounds import MAX_TTL_S, Thresholds
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.core.model.request import Holder, Request
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState

SETTINGS = PoolSettings(
    thresholds=Thresholds(100.0, 100.0),
    stale_after_s=1e9,
    max_queued=1_000_000,
    max_queued_per_owner=1_000_000,
    max_leases_per_owner=1_000_000,
    remembered_ended_leases=0,
)
# At 100 % a GPU would be over its threshold.
BUSY_PERCENT = 99.0


class SimulatedPool:
    """The core on these nodes. Leases are named by their callers."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.state = PoolState(SETTINGS)
        self.capacity_milli = sum(node.gpus for node in nodes) * GPU_MILLI
        self.allocated_milli = 0
        self._gpus: dict[GpuKey, Gpu] = {}
        self._free_milli: dict[GpuKey, int] = {}
        self._asked: dict[str, Task] = {}
        self._held: dict[str, tuple[tuple[GpuKey, ...], int]] = {}
        for node in nodes:
            for index in range(node.gpus):
                key = GpuKey(node.name, f"GPU-{node.name}-{index}")
                self._gpus[key] = Gpu(key, index, node.model)
                self._free_milli[key] = GPU_MILLI
        step(self.state, cmd.TakeOver(0, "boot"), 0.0)
        for node in nodes:
            step(self.state, cmd.AnnounceNode(node.name, "boot"), 0.0)
        step(self.state, self._observe(self._gpus, 0.0), 0.0)

    def ask(self, lease_id: str, task: Task, now: float) -> list[str]:
        """Ask for a task's GPUs. Return the leases that began, which may be none."""
        self._asked[lease_id] = task
        request = Request(task.wishes, Holder(owner=task.owner), ttl_s=MAX_TTL_S)
        granted = self._do(cmd.RequestLease(lease_id, request), now)
        if self.state.find(lease_id) is None:
            del self._asked[lease_id]  # refused: no GPU could ever serve it
        return granted

    def leave(self, lease_id: str, now: float) -> list[str]:
        """Release GPUs, or no longer wait for them. Return the leases that began."""
        if lease_id not in self._held and lease_id not in self._asked:
            return []
        return self._do(cmd.Release(lease_id, is_holder=True), now)

    def pass_time(self, now: float) -> list[str]:
        """Do what is due. Return the leases that began."""
        return self._do(cmd.Tick(), now)

    def renew(self, now: float) -> None:
        """Renew all leases."""
        step(self.state, cmd.Renew(tuple(self.state.leases)), max(now, self.state.clock))

    def _do(self, command: cmd.Command, now: float) -> list[str]:
        granted: list[str] = []
        next_command: cmd.Command | None = command
        while next_command is not None:
            now = max(now, self.state.clock)
            changed: dict[GpuKey, None] = {}
            for event in step(self.state, next_command, now):
                if isinstance(event, ev.LeaseGranted):
                    granted.append(event.lease_id)
                    changed.update(dict.fromkeys(event.gpus))
                    self._take(event.lease_id, event.gpus)
                elif isinstance(event, ev.LeaseEnded):
                    changed.update(dict.fromkeys(self._release(event.lease_id)))
            # What is read at the moment of a grant is not the new lease's.
            now = nextafter(now, inf)
            next_command = self._observe(changed, now) if changed else None
        return granted

    def _take(self, lease_id: str, gpus: tuple[GpuKey, ...]) -> None:
        milli = self._asked.pop(lease_id).gpu_milli
        self._held[lease_id] = gpus, milli
        for key in gpus:
            self._change_free(key, -milli)

    def _release(self, lease_id: str) -> tuple[GpuKey, ...]:
        self._asked.pop(lease_id, None)
        gpus, milli = self._held.pop(lease_id, ((), 0))
        for key in gpus:
            self._change_free(key, milli)
        return gpus

    def _change_free(self, key: GpuKey, milli: int) -> None:
        self._free_milli[key] += milli
        self.allocated_milli -= milli
        assert 0 <= self._free_milli[key] <= GPU_MILLI, f"{key} is held twice"

    def _observe(self, keys: Iterable[GpuKey], now: float) -> cmd.Observe:
        return cmd.Observe(tuple(self._reading(key, now) for key in keys))

    def _reading(self, key: GpuKey, now: float) -> Reading:
        used_milli = GPU_MILLI - self._free_milli[key]
        return Reading(self._gpus[key], now, GPU_MB, used_milli * MB_PER_MILLI, used_milli / GPU_MILLI * BUSY_PERCENT)
