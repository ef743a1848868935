"""A whole box over a simulated day: workers arrive, hold, crash, hang, forget to renew, release twice, overstay, idle.
Bookings come and go. Virtual time.

The same seed gives the same day. To look at one: `python -m tests.core.box_simulation --seed 7`.

The world outside the pool is kept here: which processes really are on which GPU. Readings are made from that, and at
every grant and every end the pool's word is held against it.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Booking, Quota
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, ProcessId, Reading
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState

DAY_S = 86_400.0
# Long, because most of a day is heartbeats, and each is like the other.
TTL_S = 180.0
GPUS = 8
TOTAL_MB = 80_000.0
STRANGER_MB = 24_000.0
# How long the processes of a worker that crashed may stay on the GPU.
LINGER_S = (0.0, 0.0, 2.0, 15.0)
WALL_OFFSET_S = 1.7e9
QUOTAS = {"ada": Quota(gpus=6), "bob": Quota(gpus=2), "*": Quota(max_time_limit_s=DAY_S)}
# The pool ends these by itself, and not before it has warned the holder.
ENDED_BY_POOL = (EndReason.TIME_LIMIT, EndReason.PREEMPTED, EndReason.IDLE)

Action = Callable[[], None]


@dataclass
class Worker:
    """A worker that wants a GPU, and what will go wrong with it."""

    id: str
    request: Request
    hold_s: float
    fate: str
    pid: int
    gpus: tuple[GpuKey, ...] = ()
    is_alive: bool = True
    granted_at: float | None = None
    warned_until: float | None = None


@dataclass
class Box:
    """The world and the pool in it."""

    seed: int
    settings: PoolSettings = field(
        default_factory=lambda: PoolSettings(
            drain_limit_s=60.0, reserve_after_s=300.0, idle_after_s=900.0, idle_reclaim=True
        )
    )
    now: float = 0.0
    log: list[ev.Event] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.state = PoolState(settings=self.settings)
        self.schedule: list[tuple[float, int, Action]] = []
        self.ticket = itertools.count()
        self.workers: dict[str, Worker] = {}
        self.on_gpu: dict[GpuKey, dict[str, float]] = {GpuKey("box", f"GPU-{i}"): {} for i in range(GPUS)}
        self.asked_at: dict[str, float] = {}
        self.strangers: set[GpuKey] = set()

    # Time

    def at(self, delay_s: float, action: Action) -> None:
        heapq.heappush(self.schedule, (self.now + delay_s, next(self.ticket), action))

    def run(self, until_s: float) -> None:
        while self.schedule and self.schedule[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self.schedule)
            action()

    # The pool

    def tell(self, command: cmd.Command) -> list[ev.Event]:
        events = step(self.state, command, self.now)
        self.log += events
        must_observe = False
        for event in events:
            if isinstance(event, ev.LeaseGranted):
                self.start_work(self.workers[event.lease_id], event.gpus)
            elif isinstance(event, ev.LeaseWarned):
                self.warn(self.workers[event.lease_id], event)
            elif isinstance(event, ev.LeaseEnded):
                self.counts[event.reason] += 1
                if event.reason in ENDED_BY_POOL:
                    self.stop_work(self.workers[event.lease_id], event)
                must_observe = must_observe or bool(event.draining)
            elif isinstance(event, ev.Refused) and event.code is ev.RefusalCode.UNSERVABLE:
                self.counts["refused"] += 1
        if must_observe:
            self.at(0.001, self.observe_now)  # as the server does: read anew at once
        return events

    def observe_now(self) -> None:
        self.tell(cmd.Observe(tuple(self.reading(index, key) for index, key in enumerate(self.on_gpu))))

    def reading(self, index: int, key: GpuKey) -> Reading:
        processes = tuple(
            GpuProcess(ProcessId(self.workers[id_].pid, 1.0), memory_mb) for id_, memory_mb in self.on_gpu[key].items()
        )
        if key in self.strangers:
            processes += (GpuProcess(ProcessId(10_000_000 + index, 1.0), STRANGER_MB, "stranger"),)
        used_mb = sum(process.memory_mb or 0.0 for process in processes)
        return Reading(
            Gpu(key, index, "NVIDIA A100"),
            self.now,
            TOTAL_MB,
            used_mb,
            self.load(key, processes),
            processes=processes,
        )

    def load(self, key: GpuKey, processes: tuple[GpuProcess, ...]) -> float:
        if self.on_gpu[key]:
            return 0.0 if all(self.workers[id_].fate == "idles" for id_ in self.on_gpu[key]) else 99.0
        return 60.0 if processes else 0.0

    def observe_regularly(self) -> None:
        self.observe_now()
        self.at(10.0, self.observe_regularly)

    # Processes outside the pool

    def stranger_comes(self) -> None:
        """Somebody computes on an idle GPU for a while, without asking."""
        if idle := [key for key, workers in self.on_gpu.items() if not workers and key not in self.strangers]:
            key = self.rng.choice(idle)
            self.strangers.add(key)
            self.at(self.rng.uniform(60, 1800), lambda: self.strangers.discard(key))
            self.counts["strangers"] += 1
            self.observe_now()
        self.at(self.rng.expovariate(1 / 1200.0), self.stranger_comes)

    # Bookings

    def book(self) -> None:
        """A course is to have some GPUs, or nobody is, for a while; now and then it is called off."""
        rng, number = self.rng, self.counts["bookings"]
        starts_at = self.now + WALL_OFFSET_S + rng.uniform(0, 3600)
        ends_at = starts_at + rng.uniform(600, 3600)
        booking = Booking(f"b{number}", (), starts_at, ends_at, rng.choice(("ada", "bob", None)), "a course")
        self.tell(cmd.BookGpus(booking, Wishes(gpus=rng.choice((1, 2)))))
        self.counts["bookings"] += 1
        if rng.random() < 0.2:
            self.at(rng.uniform(0, 3600), lambda: None)
        self.at(rng.expovariate(1 / 5400.0), self.book)

    def booked_for_others(self, worker: Worker, key: GpuKey) -> list[Booking]:
        """The bookings that a worker must not be in the way of, if it stays for as long as it may."""
        limit_s = worker.request.time_limit_s
        until = self.now + WALL_OFFSET_S + (DAY_S if limit_s is None else limit_s)
        return [
            booking
            for booking in self.state.bookings.values()
            if key in booking.gpus
            and booking.owner in {None, *QUOTAS} - {worker.request.holder.owner}
            and booking.starts_at < until
            and not worker.request.preemptible
        ]

    # The workers

    def arrive(self) -> None:
        number = len(self.workers) + 1
        rng = self.rng
        wishes = rng.choice(
            (
                Wishes(),
                Wishes(),
                Wishes(gpus=rng.choice((2, 2, 4, 8))),
                Wishes(memory_mb=rng.choice((8_000, 20_000, 30_000))),
                Wishes(memory_mb=8_000),
            )
        )
        fate = rng.choice(
            ("works",) * 6 + ("crashes", "hangs", "is evicted", "releases twice", "asks twice", "gives up", "idles")
        )
        hold_s = 3600.0 if fate == "idles" else rng.expovariate(1 / 600.0)
        owner = rng.choice(("ada", "bob", "eve", None)) if wishes.gpus < 8 else "eve"
        within = QUOTAS[owner].gpus if owner in QUOTAS else None
        # Declared limits are right, wrong, or rounded up.
        limits = [hold_s + 60.0, hold_s / 2, 3600.0] if within is not None else [None] * 3 + [hold_s / 2, 3600.0]
        limit_s = rng.choice(limits)
        # A lease expires only where the pool cannot see the holder's process.
        holder = Holder(f"w{number}", owner, process=None if fate == "hangs" else ProcessId(number, 1.0))
        worker = Worker(
            f"lease{number}",
            Request(
                wishes,
                holder,
                rng.choice((0, 0, 0, 1)),
                TTL_S,
                time_limit_s=None if limit_s is None else max(limit_s, 1.0),
                preemptible=rng.random() < 0.2,
            ),
            hold_s,
            fate,
            number,
        )
        self.workers[worker.id] = worker
        self.asked_at[worker.id] = self.now
        self.tell(cmd.RequestLease(worker.id, worker.request))
        if worker.fate == "asks twice":
            before = len(self.state.leases)
            self.tell(cmd.RequestLease(worker.id, worker.request))
            assert len(self.state.leases) == before, "asking twice took a second lease"
        if worker.fate == "gives up":
            self.at(rng.uniform(0, 300), lambda: self.leave(worker))
        self.at(TTL_S / 3, lambda: self.heartbeat(worker))
        self.at(rng.expovariate(1 / 150.0), self.arrive)

    def heartbeat(self, worker: Worker) -> None:
        if not worker.is_alive:
            return
        events = self.tell(cmd.Renew((worker.id,)))
        if any(isinstance(event, ev.LeasesRenewed) for event in events):
            self.at(TTL_S / 3, lambda: self.heartbeat(worker))

    def start_work(self, worker: Worker, gpus: tuple[GpuKey, ...]) -> None:
        assert worker.is_alive, "a GPU was granted to a dead worker"
        share_mb = worker.request.wishes.memory_mb
        for key in gpus:
            assert not self.booked_for_others(worker, key), f"{key} is booked"
            others = self.on_gpu[key]
            if share_mb is None:
                assert not others, f"{key} was granted to {worker.id} while {list(others)} are on it"
                assert key not in self.strangers, f"{key} was granted to {worker.id} while a stranger is on it"
            else:
                shares = [self.workers[id_].request.wishes.memory_mb for id_ in others]
                assert None not in shares, f"{key} is shared with an exclusive lease"
                outside_mb = STRANGER_MB if key in self.strangers else 0.0
                assert sum(filter(None, shares)) + share_mb + outside_mb <= 0.8 * TOTAL_MB
            others[worker.id] = share_mb or 0.5 * TOTAL_MB
        worker.gpus, worker.granted_at = gpus, self.now
        self.counts["granted"] += 1
        self.waits_s.append(self.now - self.asked_at[worker.id])
        end = {"crashes": self.crash, "hangs": self.hang, "is evicted": self.evict}.get(worker.fate, self.leave)
        self.at(worker.hold_s, lambda: end(worker))

    def warn(self, worker: Worker, event: ev.LeaseWarned) -> None:
        self.counts["warnings"] += 1
        worker.warned_until = None if event.reason is None else event.ends
        if event.reason is EndReason.PREEMPTED and self.rng.random() < 0.5:
            self.at(self.rng.uniform(0, 50), lambda: self.leave(worker))

    def stop_work(self, worker: Worker, event: ev.LeaseEnded) -> None:
        """The pool has ended a lease; its process goes, or is killed after a while."""
        assert worker.warned_until is not None, f"{worker.id} was ended without a warning: {event.reason}"
        assert self.now >= worker.warned_until, f"{worker.id} was ended sooner than it was told"
        if event.reason is EndReason.TIME_LIMIT:
            limit_s, granted_at = worker.request.time_limit_s, worker.granted_at
            assert limit_s is not None
            assert granted_at is not None
            assert self.now >= granted_at + limit_s
        elif event.reason is EndReason.PREEMPTED:
            assert worker.request.preemptible
        else:
            assert worker.fate == "idles"
        worker.is_alive = False
        self.at(self.rng.choice(LINGER_S), lambda: self.vacate(worker))

    def leave(self, worker: Worker) -> None:
        if not worker.is_alive:
            return
        worker.is_alive = False
        self.vacate(worker)
        self.tell(cmd.Release(worker.id, is_holder=True))
        if worker.fate == "releases twice":
            assert [e for e in self.tell(cmd.Release(worker.id, is_holder=True)) if isinstance(e, ev.LeaseEnded)] == []

    def crash(self, worker: Worker) -> None:
        """Killed: the server sees it, the children stay on the GPU for a while."""
        if not worker.is_alive:
            return
        worker.is_alive = False
        self.at(self.rng.choice(LINGER_S), lambda: self.vacate(worker))
        self.at(0.01, lambda: self.report_death(worker))

    def report_death(self, worker: Worker) -> None:
        self.tell(cmd.EndLease(worker.id, EndReason.HOLDER_DIED))

    def hang(self, worker: Worker) -> None:
        """No more heartbeats: the lease runs out, and an operator has to kill the process before the GPU is free."""
        if not worker.is_alive:
            return
        worker.is_alive = False
        self.at(TTL_S + 10.0, lambda: self.vacate(worker))

    def evict(self, worker: Worker) -> None:
        """An operator releases the lease, and the process stays on the GPU for a while."""
        if not worker.is_alive:
            return
        self.tell(cmd.Release(worker.id, by="operator"))
        worker.is_alive = False
        self.at(TTL_S, lambda: self.vacate(worker))

    def vacate(self, worker: Worker) -> None:
        for key in worker.gpus:
            self.on_gpu[key].pop(worker.id, None)
        if worker.gpus and not worker.is_alive:
            self.at(0.001, self.observe_now)


def opened(seed: int) -> Box:
    box = Box(seed)
    box.tell(cmd.TakeOver(0, "boot", 0.0, WALL_OFFSET_S))
    box.tell(cmd.AnnounceNode("box", "boot"))
    for owner, quota in QUOTAS.items():
        box.tell(cmd.Configure("quotas", (owner,), quota))
    return box


def simulate(seed: int, length_s: float = DAY_S) -> Box:
    """A day, and as long after it as it takes to finish."""
    box = opened(seed)
    box.at(0.0, box.observe_regularly)
    box.at(60.0, box.book)
    box.at(0.1, box.arrive)
    box.at(30.0, box.stranger_comes)
    tick(box)
    box.run(length_s)
    box.arrive = box.book = lambda: None  # type: ignore[method-assign]  # the gate closes
    while box.state.leases and box.now < length_s + DAY_S:
        box.run(box.now + 600.0)
    return box


def tick(box: Box) -> None:
    box.tell(cmd.Tick())
    box.at(5.0, lambda: tick(box))


def digest(box: Box) -> str:
    return hashlib.sha256("\n".join(map(repr, box.log)).encode()).hexdigest()


def restored(box: Box) -> PoolState:
    """What a restart would make of the day's journal."""
    durable = [event for event in box.log if isinstance(event, ev.DurableEvent)]
    return replay(PoolState(settings=box.settings), durable)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    box = simulate(options.seed)
    waits = sorted(box.waits_s)
    print(f"seed {options.seed}: {len(box.workers)} workers, {dict(box.counts)}")  # noqa: T201
    print(f"waited: median {waits[len(waits) // 2]:.0f} s, longest {waits[-1]:.0f} s; digest {digest(box)[:16]}")  # noqa: T201


if __name__ == "__main__":
    main()
