"""How long one decision of the core takes in a pool under load: all GPUs taken, a long queue, mixed wishes.

    PYTHON -P benchmarks/beside/decisions.py 512 1000      # GPUs, waiters

It answers orders as agent.py does, and runs under the base too. The order `slowest` carries out rounds of commands of each kind
and answers with the mean seconds of the slowest kind. A decision is one `step`: the command, what had expired, and the passes over
the queue. A newly filled pool is cheap, because no waiter holds GPUs yet until it has enough of them. So the pool is in use
before it is measured, for a time in proportion to its size.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, QueuedLease
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState

GPUS_PER_NODE = 8
# A queue as long as wanted, of many owners: the queue of one owner is limited.
SETTINGS = PoolSettings(max_queued=1_000_000, max_queued_per_owner=1_000_000, max_leases_per_owner=1_000_000)
OWNERS = 50
# The share of waiters that want to share a GPU, and how much memory they ask for.
SHARING = 0.15
LEAST_MB, MOST_MB = 2048, 12288
# A pool is in use until this many leases for each GPU have ended, in this many parts.
TURNOVER = 0.5
PARTS = 100
MODELS = (("NVIDIA A100-SXM4-80GB", 81920, 5), ("Tesla T4", 15360, 3), ("NVIDIA GeForce RTX 3090", 24576, 2))


@dataclass
class CrowdedPool:
    """A pool whose GPUs are all taken, and whose queue has this number of waiters.

    Each request that shares a GPU asks for its own number of MB, so that there are many kinds of wishes.
    """

    gpus: int
    rng: random.Random
    waiters: int
    state: PoolState = field(default_factory=lambda: PoolState(SETTINGS))
    now: float = 0.0
    ids: Iterator[int] = field(default_factory=itertools.count)
    readings: dict[str, tuple[Reading, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = max(1, self.gpus // GPUS_PER_NODE)
        for number in range(nodes):
            weights = [weight for _, _, weight in MODELS]
            name, total_mb, _ = self.rng.choices(MODELS, weights)[0] if nodes > len(MODELS) else MODELS[0]
            count = self.gpus // nodes + (number < self.gpus % nodes)
            self.readings[f"node{number:05}"] = tuple(
                self._reading(f"node{number:05}", index, name, total_mb) for index in range(count)
            )
        self._nodes = list(self.readings)

    def _reading(self, node: str, index: int, name: str, total_mb: int) -> Reading:
        # One GPU in twenty is in use by a process that does not ask the pool.
        is_busy = self.rng.random() < 0.05
        return Reading(
            Gpu(GpuKey(node, f"GPU-{node}-{index}"), index, name),
            0.0,
            total_mb,
            total_mb * (0.9 if is_busy else 0.01),
            95.0 if is_busy else 0.0,
            processes=(),
        )

    def handle(self, command: cmd.Command) -> float:
        """Carry a command out and return the seconds of processor time it took: nothing in it waits."""
        self.now += 0.0001
        began = time.thread_time()
        step(self.state, command, self.now)
        return time.thread_time() - began

    def observe(self, node: str) -> cmd.Observe:
        return cmd.Observe(tuple(replace(reading, at=self.now) for reading in self.readings[node]))

    def request(self, *, priority: int | None = None, shares: bool | None = None) -> cmd.RequestLease:
        """Make a request, of a random kind and priority where the arguments leave them open."""
        kind = self.rng.random()
        model = self.rng.choice((None, None, None, "A100", "T4", "*3090"))
        if shares is None:
            shares = kind >= 1 - SHARING
        if shares:
            wishes = Wishes(memory_mb=self.rng.randint(LEAST_MB, MOST_MB), model=model)
        elif kind < 0.70:
            wishes = Wishes(model=model)
        else:
            wishes = Wishes(gpus=self.rng.choice((2, 2, 4, 8)), model=model)
        number = next(self.ids)
        holder = Holder(worker_id="w", owner=f"owner-{number % OWNERS}")
        if priority is None:
            priority = self.rng.choice((0, 0, 0, 5))
        return cmd.RequestLease(f"lease-{number}", Request(wishes, holder, priority, ttl_s=3600.0))

    def fill(self) -> None:
        """Take every GPU and fill the queue, except for the requests that `let_share` adds."""
        step(self.state, cmd.TakeOver(0, "boot"), self.now)
        for node in self.readings:
            step(self.state, cmd.AnnounceNode(node, "boot"), self.now)
        for node in self.readings:
            self.handle(self.observe(node))
        while len(self.state.queue) < self._exclusive:
            while len(self.state.queue) < self._exclusive:
                self._queue(self.request(priority=0))  # in a pool in use, earlier urgent requests have been served
            self._serve()

    def use(self) -> None:
        """Let `TURNOVER` leases for each GPU end, and let others take their place.

        Several end at once, and the queue is served once for all of them. This saves time and is not measured.
        """
        at_once = max(1, round(self.gpus * TURNOVER / PARTS))
        for _ in range(round(self.gpus * TURNOVER / at_once)):
            active = [lease for lease in self.state.leases.values() if isinstance(lease, ActiveLease)]
            ending = self.rng.sample(active, min(at_once, len(active)))
            for lease in ending:
                self._happen(cmd.Release(lease.id, is_holder=True))
                self._queue(self.request())
            self.now += 0.0001
            for node in dict.fromkeys(lease.gpus[0].node for lease in ending):
                self._happen(self.observe(node))
            self._serve()
            queued = [lease.id for lease in self.state.leases.values() if isinstance(lease, QueuedLease)]
            for lease_id in self.rng.sample(queued, max(0, len(queued) - self._exclusive)):
                self._happen(cmd.Release(lease_id, is_holder=True))
            while len(self.state.queue) < self._exclusive:
                self._queue(self.request(priority=0))

    def let_share(self) -> None:
        """Queue requests that share a GPU, until `waiters` requests wait that do not fit now."""
        while len(self.state.queue) < self.waiters:
            while len(self.state.queue) < self.waiters:
                self._queue(self.request(priority=0, shares=True))
            self._serve()

    @property
    def _exclusive(self) -> int:
        return self.waiters - int(self.waiters * SHARING)

    def _queue(self, asked: cmd.RequestLease) -> None:
        """Let a request wait without trying to serve it: `_serve` does so once for many of them."""
        wall_now = self.now + self.state.wall_offset_s
        replay(self.state, [ev.LeaseQueued(self.now, asked.lease_id, asked.request, self.state.next_seq, wall_now)])

    def _happen(self, command: cmd.Command) -> list[ev.Event]:
        events = decide(self.state, command, self.now)
        replay(self.state, events)
        return events

    def _serve(self) -> None:
        while self._happen(cmd.ServeQueue()):
            pass

    def pick(self, kind: type[ActiveLease | QueuedLease]) -> str | None:
        """Return a random live lease of a kind, found without a scan that would be measured."""
        ids = list(self.state.leases)
        for _ in range(1000):
            lease_id = self.rng.choice(ids)
            if isinstance(self.state.leases[lease_id], kind):
                return lease_id
        return None

    def round(self, taken: dict[str, list[float]]) -> None:
        """Handle some commands of every kind and note the seconds of each. As many requests wait after it as before."""
        taken["request"].append(self.handle(self.request()))
        while len(self.state.queue) < self.waiters:
            taken["request"].append(self.handle(self.request()))
        if (active := self.pick(ActiveLease)) is not None:
            lease = self.state.leases[active]
            assert isinstance(lease, ActiveLease)
            taken["renew"].append(self.handle(cmd.Renew((active,))))
            taken["release"].append(self.handle(cmd.Release(active, is_holder=True)))
            taken["reading after release"].append(self.handle(self.observe(lease.gpus[0].node)))
        if len(self.state.queue) > self.waiters and (queued := self.pick(QueuedLease)) is not None:
            taken["cancel"].append(self.handle(cmd.Release(queued, is_holder=True)))
        taken["reading"].append(self.handle(self.observe(self.rng.choice(self._nodes))))
        taken["tick"].append(self.handle(cmd.Tick()))


def slowest_s(taken: dict[str, list[float]]) -> float:
    """Return the mean of the kind of decision that takes longest."""
    return max(statistics.fmean(times) for times in taken.values())


def main() -> None:
    gpus, waiters = map(int, sys.argv[1:])
    pool = CrowdedPool(gpus, random.Random(1), waiters)
    pool.fill()
    pool.use()
    pool.let_share()
    gc.collect()
    gc.freeze()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        _, rounds = json.loads(line)
        taken: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            pool.round(taken)
        print(json.dumps(slowest_s(taken)), flush=True)


if __name__ == "__main__":
    main()
