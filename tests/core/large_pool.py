"""A crowded pool of large nodes, and a seeded stream of all kinds of commands."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.configured import Booking, Quota
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, ProcessId, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason, QueuedLease
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState

MODELS = (("NVIDIA A100-SXM4-80GB", 81_920.0), ("Tesla T4", 15_360.0), ("NVIDIA L40S", 46_068.0))
OWNERS = ("ada", "bob", "cyd", None)
START = 100.0


class LargePool:
    """Makes the next command from the state. The same seed and the same decisions give the same commands."""

    def __init__(
        self, nodes: Sequence[int], seed: int, *, shares: float = 0.25, preempts: bool = False, **settings: Any
    ) -> None:
        self.rng = random.Random(seed)
        self.shares = shares
        self.preempts = preempts
        self.settings = PoolSettings(**{"reserve_after_s": 20.0, **settings})
        self.state = PoolState(self.settings)
        self.now = START
        self.waiters = sum(nodes) // 2
        # Some pools have GPUs that are all alike, others of which no two are.
        self.values = self.rng.choice(((0.0,), (0.0, 1.0, 2.0), tuple(range(400))))
        self.gpus = [
            (
                Gpu(GpuKey(f"node{node}", f"GPU-{node}-{index:03}"), index, name, islands and index % islands * 5),
                total_mb,
            )
            for node, count in enumerate(nodes)
            for islands in (self.rng.choice((None, None, 2, 3)),)
            for models in (self.rng.sample(MODELS, self.rng.choice((1, 1, 2))),)
            for index in range(count)
            for name, total_mb in (self.rng.choice(models),)
        ]
        self.nodes = [f"node{node}" for node in range(len(nodes))]
        self.numbers = iter(range(1_000_000))

    def opening(self) -> list[cmd.Command]:
        announced: list[cmd.Command] = [cmd.AnnounceNode(node, "boot") for node in self.nodes]
        return [cmd.TakeOver(0, "boot"), *announced, self.observe(self.gpus)]

    def command(self) -> cmd.Command:
        """The next command, after some time. More requests come than can be served."""
        self.now += self.rng.choice((0.0, 0.001, 0.1, 0.1, 1.0, 5.0))
        if len(self.state.queue) < self.waiters and self.rng.random() < 0.7:
            return self.request()
        made: Callable[[], cmd.Command] = self.rng.choices(
            (self.request, self.release, self.cancel, self.observe_some, self.observe_all, self.rare),
            (20, 30, 5, 25, 15, 5),
        )[0]
        return made()

    def request(self) -> cmd.RequestLease:
        rng, number = self.rng, next(self.numbers)
        sizes_mb = (4000.0, 12_000.0, rng.uniform(500.0, 60_000.0))
        memory_mb = rng.choice(sizes_mb) if rng.random() < self.shares else None
        several = rng.choice((1, 1, 1, 2, 3, 8))
        place: dict[str, Any] = rng.choice(
            ({}, {}, {}, {"model": rng.choice(("A100", "T4", "L40S"))}, {"node": rng.choice(self.nodes)})
        )
        if rng.random() < 0.05:
            place = {"among": tuple(str(index) for index in rng.sample(range(12), 4))}
        if rng.random() < 0.05:
            place = {**place, "memory_threshold_percent": 95.0, "utilization_threshold_percent": 99.0}
        if "node" not in place and rng.random() < 0.05:
            place = {**place, "nodes": 2}
        owner = rng.choice(OWNERS)
        pid = rng.randint(1, 40)
        holder = Holder(f"w{pid}", owner, pid=pid, process=ProcessId(pid, 1.0) if len(self.nodes) == 1 else None)
        request = Request(
            Wishes(several, memory_mb, **place),
            holder,
            rng.choice((0, 0, 0, 5)),
            ttl_s=400.0,
            time_limit_s=rng.choice((None, None, 30.0, 120.0, rng.uniform(10.0, 500.0))),
            preemptible=self.preempts and rng.random() < 0.1,
        )
        return cmd.RequestLease(f"lease-{number}", request)

    def release(self) -> cmd.Command:
        lease_id = self._pick(ActiveLease)
        if lease_id is None:
            return self.request()
        return (
            cmd.Release(lease_id, is_holder=True)
            if self.rng.random() < 0.9
            else cmd.EndLease(lease_id, EndReason.REVOKED)
        )

    def cancel(self) -> cmd.Command:
        lease_id = self._pick(QueuedLease)
        return self.request() if lease_id is None else cmd.Release(lease_id, is_holder=True)

    def observe_some(self) -> cmd.Observe:
        """One node, or the GPUs of leases that have just ended."""
        node = self.rng.choice(self.nodes)
        return self.observe([found for found in self.gpus if found[0].key.node == node])

    def observe_all(self) -> cmd.Observe:
        return self.observe(self.gpus)

    def observe(self, gpus: Sequence[tuple[Gpu, float]]) -> cmd.Observe:
        return cmd.Observe(tuple(self._reading(*found) for found in gpus))

    def _reading(self, gpu: Gpu, total_mb: float) -> Reading:
        rng, key = self.rng, gpu.key
        number = hash_of(key.uuid)
        used_mb = float(self.values[number % len(self.values)])
        found = Reading(gpu, self.now, total_mb, used_mb, float(number % 3), processes=())
        slot = self.state.slots.get(key)
        if number % 10 == 0 and slot is not None and not slot.occupants:
            # A process that does not ask the pool comes and goes.
            own = (GpuProcess(ProcessId(9000 + number % 50, 1.0), 20_000.0, "python"),) if rng.random() < 0.5 else ()
            found = replace(found, memory_used_mb=used_mb + 20_000.0 * len(own), processes=own)
        if rng.random() < 0.02:
            change: dict[str, Any] = rng.choice(
                ({"utilization_percent": None}, {"fault": "off the bus"}, {"processes": None})
            )
            found = replace(found, **change)
        return found

    def rare(self) -> cmd.Command:
        rng, key = self.rng, self.rng.choice(self.gpus)[0].key
        kind = rng.randrange(5)
        if kind == 0:
            self.now += rng.choice((30.0, 120.0))
            return cmd.Tick()
        if kind == 1:
            return cmd.Configure("excluded", tuple(key), None if self.state.excluded else "fan")
        if kind == 2 and self.state.bookings:
            return cmd.Configure("bookings", (next(iter(self.state.bookings)),))
        if kind == 3:
            owner = rng.choice(OWNERS)
            starts_at = self.now + rng.choice((0.0, 10.0, 60.0))
            ends_at = starts_at + rng.choice((20.0, 200.0))
            booking = Booking(f"b{next(self.numbers)}", (), starts_at, ends_at, owner, "demo")
            return cmd.BookGpus(booking, Wishes(rng.choice((1, 4))))
        if kind == 4 and rng.random() < 0.3:
            return cmd.Configure("quotas", ("ada",), None if self.state.quotas else Quota(gpus=4))
        return cmd.Tick()

    def _pick(self, kind: type[ActiveLease | QueuedLease]) -> str | None:
        found = [lease.id for lease in self.state.leases.values() if isinstance(lease, kind)]
        return self.rng.choice(found) if found else None


def hash_of(text: str) -> int:
    """A number that is the same in every run."""
    return sum(ord(sign) * (7 + place) for place, sign in enumerate(text))
