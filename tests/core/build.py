"""Small builders for the examples: readings, requests, and a box of GPUs with a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.forecast import Forecast, Forecasts, StartTimes
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Quota
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, ProcessId, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason, QueuedLease
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import judge
from gpu_worker_pool.core.queue.explain import Explanation, explain
from gpu_worker_pool.core.queue.planner import FreeAt
from gpu_worker_pool.core.queue.verdicts import Verdict

A100 = "NVIDIA A100-SXM4-80GB"
T4 = "Tesla T4"
START = 100.0
WALL_OFFSET_S = 1_000_000.0


def key(index: int = 0, node: str = "box") -> GpuKey:
    return GpuKey(node, f"GPU-{node}-{index}")


def process(
    pid: int,
    memory_mb: float | None = None,
    *,
    name: str = "python",
    started: float | None = 1.0,
    parents: tuple[int, ...] = (),
    user: str | None = None,
) -> GpuProcess:
    """A process; its parents started when it did."""
    ancestors = tuple(ProcessId(parent, started) for parent in parents)
    return GpuProcess(ProcessId(pid, started), memory_mb, name, ancestors, user)


def reading(
    index: int = 0,
    *,
    position: int | None = None,
    node: str = "box",
    at: float = START,
    name: str = A100,
    total_mb: float | None = 80_000,
    used_mb: float | None = 0,
    utilization: float | None = 0,
    processes: tuple[GpuProcess, ...] | None = (),
    fault: str | None = None,
    percent: float | None = None,
    has_utilization: bool = True,
    other_server: str | None = None,
) -> Reading:
    """An idle A100, unless told otherwise."""
    return Reading(
        Gpu(key(index, node), index, name, position),
        at,
        total_mb,
        used_mb,
        utilization,
        processes=processes,
        fault=fault,
        reported_memory_percent=percent,
        has_utilization=has_utilization,
        other_server=other_server,
    )


def request(
    *,
    worker: str | None = None,
    owner: str | None = None,
    pid: int | None = None,
    priority: int = 0,
    ttl_s: float = 600_000.0,
    time_limit_s: float | None = None,
    preemptible: bool = False,
    **wishes: Any,
) -> Request:
    """For one GPU. A holder with a pid is on the box and was started at 1.0."""
    started = None if pid is None else 1.0
    process = None if pid is None else ProcessId(pid, started)
    holder = Holder(worker, owner, pid=pid, pid_started=started, process=process)
    return Request(Wishes(**wishes), holder, priority, ttl_s, time_limit_s=time_limit_s, preemptible=preemptible)


class Box:
    """A pool that has just been opened and has looked at these GPUs, at 100 s on its clock."""

    def __init__(self, *readings: Reading, **settings: Any) -> None:
        self.settings = PoolSettings(**settings)
        self.state = PoolState(settings=self.settings)
        self.now = START
        self.log: list[ev.Event] = []
        self.boot_id = "boot1"
        self.do(self.take_over())
        if readings:
            self.observe_now(*readings)

    def take_over(self) -> cmd.TakeOver:
        return cmd.TakeOver(0, self.boot_id, 0.0, WALL_OFFSET_S)

    def do(self, command: cmd.Command) -> list[ev.Event]:
        """Carry out a command. Nodes that are looked at announce themselves first."""
        if isinstance(command, cmd.Observe):
            self.announce({each.gpu.key.node for each in command.readings} - self.state.announced)
        events = step(self.state, command, self.now)
        self.log += events
        return events

    def announce(self, nodes: Iterable[str]) -> list[ev.Event]:
        return [event for node in sorted(nodes) for event in self.do(cmd.AnnounceNode(node, self.boot_id))]

    def observe_now(self, *readings: Reading) -> list[ev.Event]:
        """A look that began just now."""
        return self.observe(*(replace(reading, at=self.now) for reading in readings))

    def observe(self, *readings: Reading) -> list[ev.Event]:
        """A look that began when the readings say."""
        return self.do(cmd.Observe(readings))

    def ask(self, lease_id: str, **wants: Any) -> list[ev.Event]:
        wants.setdefault("worker", lease_id)
        return self.do(cmd.RequestLease(lease_id, request(**wants)))

    def renew(self, *lease_ids: str) -> list[ev.Event]:
        return self.do(cmd.Renew(lease_ids))

    def release(self, lease_id: str) -> list[ev.Event]:
        """Release it, as its holder does."""
        return self.do(cmd.Release(lease_id, is_holder=True))

    def revoke(self, lease_id: str) -> list[ev.Event]:
        return self.do(cmd.EndLease(lease_id, EndReason.REVOKED))

    def exclude(self, gpu: GpuKey, reason: str) -> list[ev.Event]:
        return self.do(cmd.Configure("excluded", tuple(gpu), reason))

    def include(self, gpu: GpuKey) -> list[ev.Event]:
        return self.do(cmd.Configure("excluded", tuple(gpu)))

    def ignore(self, name: str) -> list[ev.Event]:
        return self.do(cmd.Configure("ignored_processes", (name,), "an operator"))

    def count(self, name: str) -> list[ev.Event]:
        """Do not ignore these processes any more."""
        return self.do(cmd.Configure("ignored_processes", (name,)))

    def set_quota(self, owner: str, quota: Quota | None) -> list[ev.Event]:
        return self.do(cmd.Configure("quotas", (owner,), quota))

    def cancel_booking(self, booking_id: str) -> list[ev.Event]:
        return self.do(cmd.Configure("bookings", (booking_id,)))

    def pass_time(self, seconds: float) -> list[ev.Event]:
        self.now += seconds
        return self.do(cmd.Tick())

    def run_to(self, at: float) -> list[ev.Event]:
        """Let time pass as a driver does: it wakes up whenever something is due."""
        events: list[ev.Event] = []
        while self.now < at:
            self.now = min(max(self.state.next_due_at(), self.now), at)
            events += self.do(cmd.Tick())
        return events

    def restart(self) -> list[ev.Event]:
        """The driver was killed and starts again: all it has is what the journal keeps."""
        journal = [event for event in self.log if isinstance(event, ev.DurableEvent)]
        self.state = replay(PoolState(settings=self.settings), journal)
        return [*self.do(self.take_over()), *self.announce(self.state.nodes)]

    def reboot(self) -> list[ev.Event]:
        """The machines were rebooted."""
        self.now += 5.0
        self.boot_id = "boot2"
        return [*self.do(self.take_over()), *self.announce(self.state.nodes)]

    def stage(self, lease_id: str) -> str:
        """queued, active, draining or how it ended."""
        lease = self.state.find(lease_id)
        match lease:
            case None:
                return "unknown"
            case QueuedLease():
                return "queued"
            case ActiveLease():
                return "active"
            case EndedLease():
                return "draining" if lease.draining else str(lease.reason)

    def gpus_of(self, lease_id: str) -> tuple[GpuKey, ...]:
        """What an active lease has; nothing where it is not active."""
        lease = self.state.leases.get(lease_id)
        return lease.gpus if isinstance(lease, ActiveLease) else ()

    def fence_of(self, lease_id: str) -> int:
        lease = self.state.leases[lease_id]
        assert isinstance(lease, ActiveLease), lease
        return lease.fence

    def expires_in_s(self, lease_id: str) -> float | None:
        due_at = self.state.ttl_due.due_at(lease_id)
        return None if due_at is None else due_at - self.state.live(self.now)

    def verdict(self, index: int = 0, node: str = "box", **wishes: Any) -> Verdict:
        """What a request would be told of a GPU now."""
        return judge(self.state, self.state.slots[key(index, node)], Wishes(**wishes), self.now)

    def explain(self, lease_id: str) -> Explanation:
        explanation = explain(self.state, lease_id, self.now)
        assert explanation is not None
        return explanation


def free_at_once(*readings: Reading, **settings: Any) -> Box:
    """A box where a released GPU is free without another look, to keep the examples short."""
    return Box(*readings, awaits_reading_after_release=False, **settings)


def of_kind(events: list[ev.Event], kind: type[ev.Event]) -> list[ev.Event]:
    return [event for event in events if isinstance(event, kind)]


def refusals(events: list[ev.Event], code: ev.RefusalCode) -> list[ev.Refused]:
    return [event for event in events if isinstance(event, ev.Refused) and event.code == code]


def configured(events: list[ev.Event], table: str) -> list[ev.Configured]:
    return [event for event in events if isinstance(event, ev.Configured) and event.table == table]


def expected_starts(state: PoolState, now: float) -> dict[str, FreeAt]:
    """The starts that can be told, all at once."""
    times = StartTimes(state, now)
    list(times.steps())
    return times.starts


def forecast(state: PoolState, now: float, wishes: Iterable[Wishes], owner: str | None = None) -> list[Forecast]:
    """All of these forecasts at once."""
    forecasts = Forecasts(state, now, wishes, owner)
    list(forecasts.steps())
    return forecasts.found
