"""A pool in simulated time for benchmarks/replay: the real core on the nodes of a trace, with simulated readings.

A lease uses the memory it asked for (an exclusive one uses all of it), and the same share of the GPU's time. Whenever the
leases on a GPU change, the GPU is read again at once. Thresholds are at 100 % and readings never grow stale, so that only
the placement and the queue make a difference. The pool is woken up when it is due, as the driver wakes it up.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, nextafter

from benchmarks.replay.fragmentation import Kind, fragmented_milli
from benchmarks.replay.openb import GPU_MB, GPU_MILLI, MB_PER_MILLI, Node, Task
from benchmarks.replay.placements import OtherPlacer
from benchmarks.replay.policies import Policy, Rule
from gpu_worker_pool.core.decider.decide import decide, served
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.bounds import MAX_TTL_S, Thresholds
from gpu_worker_pool.core.model.facts import PoolFacts
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.core.model.lease import EndReason, Reservation
from gpu_worker_pool.core.model.request import Holder, Request
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.serve import serve_queue

SETTINGS = PoolSettings(
    thresholds=Thresholds(100.0, 100.0),
    stale_after_s=1e9,
    max_queued=1_000_000,
    max_queued_per_owner=1_000_000,
    max_leases_per_owner=1_000_000,
    remembered_ended_leases=0,
)
# Longer than any trace.
NEVER_S = 1e9
# At 100 % a GPU would be over its threshold.
BUSY_PERCENT = 99.0
ENDS = (EndReason.RELEASED, EndReason.CANCELLED, EndReason.TIME_LIMIT)


class SimulatedPool:
    """The core on these nodes. `decisions_s` has the processor time of each step, because other processes may run too.

    `backfilled` counts the leases that were granted reserved GPUs because their time limit ends before the date.
    """

    def __init__(self, nodes: Sequence[Node], kinds: tuple[Kind, ...], policy: Policy, seed: int) -> None:
        settings = replace(SETTINGS, reserve_after_s=NEVER_S) if policy.rule is Rule.UNRESERVED else SETTINGS
        self._proposals = policy.proposals(random.Random(seed), kinds) if policy.proposals else None
        self.state = PoolState(settings, facts=self._proposals or PoolFacts())
        self.kinds = kinds
        self.nodes = {node.name: node for node in nodes}
        self.capacity_milli = sum(node.gpus for node in nodes) * GPU_MILLI
        self.free_milli: dict[str, dict[int, int]] = {
            node.name: dict.fromkeys(range(node.gpus), GPU_MILLI) for node in nodes
        }
        self.allocated_milli = 0
        self.backfilled = 0
        self.refused: set[str] = set()
        self.decisions_s: list[float] = []
        self.gpus: dict[GpuKey, Gpu] = {}
        self.gpus_on: dict[str, list[GpuKey]] = {node.name: [] for node in nodes}
        self._held: dict[str, tuple[tuple[GpuKey, ...], int]] = {}
        self._asked: dict[str, Task] = {}
        for node in nodes:
            for index in range(node.gpus):
                key = GpuKey(node.name, f"GPU-{node.name}-{index}")
                self.gpus[key] = Gpu(key, index, node.model)
                self.gpus_on[node.name].append(key)
        step(self.state, cmd.TakeOver(0, "boot"), 0.0)
        for node in nodes:
            step(self.state, cmd.AnnounceNode(node.name, "boot"), 0.0)
        step(self.state, self._look(self.gpus, 0.0), 0.0)

    @property
    def waiting(self) -> int:
        return len(self.state.queue)

    def gpus_of(self, lease_id: str) -> tuple[GpuKey, ...]:
        """Return the GPUs that a task has."""
        return self._held.get(lease_id, ((), 0))[0]

    def ask(self, lease_id: str, task: Task, now: float) -> list[str]:
        """Ask for a task's GPUs. Returns the leases that began, which may be none. Notes a request that is refused."""
        self._asked[lease_id] = task
        request = Request(task.wishes, Holder(owner=task.owner), ttl_s=MAX_TTL_S, time_limit_s=task.time_limit_s)
        granted = self._do(cmd.RequestLease(lease_id, request), now)
        if self.state.find(lease_id) is None:
            self.refused.add(lease_id)
            del self._asked[lease_id]
        return granted

    def leave(self, lease_id: str, now: float) -> list[str]:
        """Release GPUs, or no longer wait for them. Returns the leases that began."""
        if lease_id not in self._held and lease_id not in self._asked:
            return []  # its time limit has ended it already
        return self._do(cmd.Release(lease_id, is_holder=True), now)

    def pass_time(self, now: float) -> list[str]:
        """Do what is due. Returns the leases that began."""
        return self._do(cmd.Tick(), now)

    def renew(self, now: float) -> None:
        """Renew all leases."""
        step(self.state, cmd.Renew(tuple(self.state.leases)), max(now, self.state.clock))

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
            reservation = self.state.reservation
            now = max(now, self.state.clock)
            began = time.process_time()
            events = self._step(next_command, now)
            self.decisions_s.append(time.process_time() - began)
            changed: dict[GpuKey, None] = {}
            for event in events:
                if isinstance(event, ev.LeaseGranted):
                    granted.append(event.lease_id)
                    changed.update(dict.fromkeys(event.gpus))
                    self._take(event.lease_id, event.gpus)
                    self.backfilled += _is_backfill(event, reservation)
                elif isinstance(event, ev.QueueSettled):
                    reservation = event.reservation
                elif isinstance(event, ev.LeaseEnded):
                    assert event.reason in ENDS, event
                    changed.update(dict.fromkeys(self._give_back(event.lease_id)))
            # What is read at the moment of a grant is not the new lease's.
            now = nextafter(now, inf)
            next_command = self._look(changed, now) if changed else None
        return granted

    def _step(self, command: cmd.Command, now: float) -> list[ev.Event]:
        """One step of the core, in which the policy says where waiters are placed."""
        if self._proposals is None:
            return step(self.state, command, now)
        if isinstance(command, cmd.RequestLease) and ev.new_leases(decide(self.state, command, now)):
            # It is queued first, even if it could be granted at once: the pool itself would place it.
            wall_now = now + self.state.wall_offset_s
            queued = ev.LeaseQueued(now, command.lease_id, command.request, self.state.next_seq, wall_now)
            happened = [*step(self.state, cmd.Tick(), now, lambda: False), queued]
            replay(self.state, [queued])
        else:
            happened = step(self.state, command, now, lambda: False)
        while not self.state.is_settled_at(now):
            found = serve_queue(self.state, now, OtherPlacer(self.state, now, self._proposals))
            events = served(self.state, found, now)
            replay(self.state, events)
            happened += events
        return happened

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
        free[self.gpus[key].index] += milli
        self.allocated_milli -= milli
        assert 0 <= free[self.gpus[key].index] <= GPU_MILLI, f"{key} is held twice"

    def _look(self, keys: Iterable[GpuKey], now: float) -> cmd.Observe:
        return cmd.Observe(tuple(self._reading(key, now) for key in keys))

    def _reading(self, key: GpuKey, now: float) -> Reading:
        gpu = self.gpus[key]
        used_milli = GPU_MILLI - self.free_milli[key.node][gpu.index]
        return Reading(gpu, now, GPU_MB, used_milli * MB_PER_MILLI, used_milli / GPU_MILLI * BUSY_PERCENT)


class StrictPool(SimulatedPool):
    """No task asks while an earlier one waits."""

    def __init__(self, nodes: Sequence[Node], kinds: tuple[Kind, ...], policy: Policy, seed: int) -> None:
        super().__init__(nodes, kinds, policy, seed)
        self._line: deque[tuple[str, Task]] = deque()

    @property
    def waiting(self) -> int:
        return len(self.state.queue) + len(self._line)

    def ask(self, lease_id: str, task: Task, now: float) -> list[str]:
        self._line.append((lease_id, task))
        return self._let_ask(now)

    def leave(self, lease_id: str, now: float) -> list[str]:
        return [*super().leave(lease_id, now), *self._let_ask(now)]

    def pass_time(self, now: float) -> list[str]:
        return [*super().pass_time(now), *self._let_ask(now)]

    def _let_ask(self, now: float) -> list[str]:
        granted: list[str] = []
        while self._line and not self.state.queue:
            granted += super().ask(*self._line.popleft(), now)
        return granted


def _is_backfill(event: ev.LeaseGranted, reservation: Reservation | None) -> bool:
    if reservation is None or reservation.lease_id == event.lease_id or event.limit is None:
        return False
    return event.limit <= reservation.date and not set(reservation.gpus).isdisjoint(event.gpus)
