"""How long one decision of the core takes as the pool grows: as many waiters as GPUs, all GPUs taken, mixed wishes.

Each size gets the same mix of commands in the same run; a decision is one `step`: what was asked, what had expired, and
the pass over the queue. Prints what it measured; writes nothing.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from gpu_worker_pool.core import commands as cmd
from gpu_worker_pool.core.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.core.lease import ActiveLease, QueuedLease
from gpu_worker_pool.core.pool import step
from gpu_worker_pool.core.request import Holder, Request, Wishes
from gpu_worker_pool.core.state import PoolState

SIZES = (8, 100, 1_000, 10_000)
GPUS_PER_NODE = 8
MODELS = (("NVIDIA A100-SXM4-80GB", 81920, 5), ("Tesla T4", 15360, 3), ("NVIDIA GeForce RTX 3090", 24576, 2))


@dataclass
class Box:
    """A pool under load, with a seeded stream of commands."""

    gpus: int
    rng: random.Random
    state: PoolState = field(default_factory=PoolState)
    now: float = 0.0
    ids: itertools.count[int] = field(default_factory=itertools.count)
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

    def _reading(self, node: str, index: int, name: str, total_mb: int) -> Reading:
        # One GPU in twenty is in use by somebody who does not ask the pool.
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
        """Carry a command out and return the seconds it took."""
        self.now += 0.0001
        began = time.perf_counter()
        step(self.state, command, self.now)
        return time.perf_counter() - began

    def observe(self, node: str) -> cmd.Observe:
        return cmd.Observe(tuple(self._fresh(reading) for reading in self.readings[node]))

    def _fresh(self, reading: Reading) -> Reading:
        return Reading(
            reading.gpu,
            self.now,
            reading.memory_total_mb,
            reading.memory_used_mb,
            reading.utilization_percent,
            processes=(),
        )

    def request(self) -> cmd.RequestLease:
        kind = self.rng.random()
        model = self.rng.choice((None, None, None, "A100", "T4", "*3090"))
        if kind < 0.70:
            wishes = Wishes(model=model)
        elif kind < 0.85:
            wishes = Wishes(gpus=self.rng.choice((2, 2, 4, 8)), model=model)
        else:
            wishes = Wishes(memory_mb=self.rng.choice((2048, 4096, 6144, 8192, 12288)), model=model)
        request = Request(wishes, Holder(worker_id="w"), self.rng.choice((0, 0, 0, 5)), ttl_s=3600.0)
        return cmd.RequestLease(f"lease-{next(self.ids)}", request)

    def fill(self) -> None:
        """Take every GPU, then let as many wait as there are GPUs."""
        step(self.state, cmd.Open("boot"), self.now)
        for node in self.readings:
            self.handle(self.observe(node))
        while len(self.state.queue) < self.gpus:
            self.handle(self.request())

    def pick(self, kind: type[ActiveLease | QueuedLease]) -> str | None:
        """A random live lease of a kind, found without a scan that would be measured."""
        ids = list(self.state.leases)
        for _ in range(1000):
            lease_id = self.rng.choice(ids)
            if isinstance(self.state.leases[lease_id], kind):
                return lease_id
        return None


def run(gpus: int, rounds: int, seed: int) -> dict[str, list[float]]:
    """Seconds for each decision, by kind of command."""
    box = Box(gpus, random.Random(seed))
    box.fill()
    gc.collect()
    gc.freeze()
    taken: dict[str, list[float]] = defaultdict(list)
    nodes = list(box.readings)
    for _ in range(rounds):
        taken["request"].append(box.handle(box.request()))
        while len(box.state.queue) < gpus:
            taken["request"].append(box.handle(box.request()))
        if (active := box.pick(ActiveLease)) is not None:
            lease = box.state.leases[active]
            assert isinstance(lease, ActiveLease)
            taken["renew"].append(box.handle(cmd.Renew((active,))))
            taken["release"].append(box.handle(cmd.Release(active)))
            taken["reading after release"].append(box.handle(box.observe(lease.gpus[0].node)))
        if len(box.state.queue) > gpus and (queued := box.pick(QueuedLease)) is not None:
            taken["cancel"].append(box.handle(cmd.Release(queued)))
        taken["reading"].append(box.handle(box.observe(box.rng.choice(nodes))))
        taken["tick"].append(box.handle(cmd.Tick()))
    return taken


def peak_memory_mb(gpus: int, seed: int) -> float:
    """Peak memory that as many GPUs, leases and waiters add to a process of their own."""
    command = [sys.executable, __file__, "--fill", str(gpus), "--seed", str(seed)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def high_water_mb() -> float:
    """The most memory this process has had; not getrusage's, which begins with the parent's."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to see that it runs")
    parser.add_argument("--fill", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fill is not None:
        before_mb = high_water_mb()
        Box(options.fill, random.Random(options.seed)).fill()
        print(high_water_mb() - before_mb)
        return
    sizes, rounds = (SIZES[:2], 20) if options.quick else (SIZES, options.rounds)
    print(f"{'GPUs = waiters':>14} {'decisions/s':>12} {'mean us':>9} {'p50 us':>9} {'p99 us':>9} {'peak MB':>9}")
    by_kind: dict[int, dict[str, list[float]]] = {}
    for gpus in sizes:
        by_kind[gpus] = run(gpus, rounds, options.seed)
        times = sorted(itertools.chain.from_iterable(by_kind[gpus].values()))
        mean_s = statistics.fmean(times)
        p99_s = times[int(len(times) * 0.99)]
        print(
            f"{gpus:>14,} {1 / mean_s:>12,.0f} {mean_s * 1e6:>9.1f} {statistics.median(times) * 1e6:>9.1f} "
            f"{p99_s * 1e6:>9.1f} {peak_memory_mb(gpus, options.seed):>9.1f}"
        )
    print(f"\nmean us by kind of decision\n{'':>22}" + "".join(f"{gpus:>10,}" for gpus in sizes))
    for kind in by_kind[sizes[0]]:
        means = (statistics.fmean(by_kind[gpus].get(kind) or [float("nan")]) * 1e6 for gpus in sizes)
        print(f"{kind:>22}" + "".join(f"{mean:>10.1f}" for mean in means))


if __name__ == "__main__":
    main()
