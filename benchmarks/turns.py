"""The longest turn of the event loop: with ten thousand tiny shares, from their queue to their end, and for `/metrics`.

A turn is what the loop does between two waits for sockets and timers: while it lasts, no caller is answered and no
heartbeat is taken. The driver runs over a journal on the disk, with the settings of a server. A server gets the same
commands by HTTP; here they come in waves of so many at a time, as from so many connections. Then a server with a thousand
GPUs is asked for its metrics. CPU time of the loop's thread is what counts: the time that the machine gave to other programs
is not the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.shared.results import Cell, Results, duration, parser, show
from benchmarks.shared.targets import bounded
from benchmarks.shared.timed_server import TIMED, TimedSelector, longest_turn_s
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, ProcessId, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.ledger.driver import Driver
from gpu_worker_pool.ledger.loop import LATE_S
from gpu_worker_pool.ledger.outbox import WriterThread
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.server.serving import collect_garbage_seldom
from gpu_worker_pool.testing import ServerProcess

SHARES = 10_000
OWNERS = 20
AT_ONCE = 64
GPU_MB = 80_000.0
SHARE_MB = 100.0
# Longer than a phase takes on a slow machine: only the last phase is to expire leases.
TTL_S = 300.0
MOST_MS = 50.0
MOST_GPUS, FEW_GPUS, CALLS, QUICK_CALLS = 1024, 64, 30, 2
# Longer than all calls take.
READING_S = 60.0
MOST_METRICS_MS = 5.0
NOTHING, METRICS = "nothing, between two calls", "`/metrics`"
T = TypeVar("T")


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be moved on. The driver has the same clock, so that its ticker rings in time."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


class Scene:
    """A driver with all GPUs of one box, and the commands of a wave of clients."""

    def __init__(self, shares: int, folder: Path, loop: Loop) -> None:
        self.shares = shares
        self.loop = loop
        sharers = PoolSettings().max_sharers
        self.gpus = [Gpu(GpuKey("box", f"GPU-{i}"), i, "A100") for i in range(-(-shares // sharers))]
        journal = SqliteJournal(folder / "leases.sqlite3")
        self.driver = Driver(PoolSettings(), clock=loop.time)
        writer = WriterThread(journal, loop)
        self.driver.lead(self.driver.state, writer, boot_id="boot", wall_clock=loop.time, node="box")

    @property
    def ids(self) -> list[str]:
        return [f"lease-{number}" for number in range(self.shares)]

    def request(self, lease_id: str, *, is_local: bool = True) -> cmd.RequestLease:
        number = int(lease_id.partition("-")[2])
        process = ProcessId(100_000 + number, 1.0)
        holder = Holder(owner=f"user{number % OWNERS}", pid=process.pid, process=process if is_local else None)
        # A size of its own for some: each size is a kind of wishes of its own.
        wishes = Wishes(memory_mb=SHARE_MB + number % 50)
        return cmd.RequestLease(lease_id, Request(wishes, holder, ttl_s=TTL_S))

    def look(self, *, busy: bool = False) -> cmd.Observe:
        """Read all GPUs; in a `busy` reading each lease has a process that holds memory."""
        on_gpu: dict[GpuKey, list[GpuProcess]] = {gpu.key: [] for gpu in self.gpus}
        for lease in self.driver.state.leases.values() if busy else ():
            if isinstance(lease, ActiveLease) and (pid := lease.request.holder.pid):
                child = ProcessId(pid + 1_000_000, 2.0)
                on_gpu[lease.gpus[0]].append(
                    GpuProcess(child, 50.0, "python", (ProcessId(pid, 1.0), ProcessId(1, 0.0)))
                )
        now = self.loop.time()
        return cmd.Observe(
            tuple(
                Reading(gpu, now, GPU_MB, 50.0 * len(on_gpu[gpu.key]), 5.0, processes=tuple(on_gpu[gpu.key]))
                for gpu in self.gpus
            )
        )

    async def in_waves(self, commands: Iterable[cmd.Command]) -> None:
        for wave in batched(commands, AT_ONCE):
            await asyncio.gather(*(self.driver.do(command) for command in wave))

    async def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():  # noqa: ASYNC110 - the driver does not report it
            await asyncio.sleep(0.001)

    async def expire(self) -> None:
        """Move the clock on until no TTL is left, in steps so short that the driver was not away."""
        while any(isinstance(lease, ActiveLease) for lease in self.driver.state.leases.values()):
            self.loop.ahead_s += LATE_S / 2
            await asyncio.sleep(0)
        ended = self.driver.state.leases.values()
        if {lease.reason for lease in ended if isinstance(lease, EndedLease)} != {EndReason.EXPIRED}:
            raise AssertionError("not all leases expired")
        self.driver.note(self.look())
        await self.until(lambda: not self.driver.state.leases)


async def measure(shares: int, folder: Path, loop: Loop, selector: TimedSelector) -> list[list[Cell]]:
    scene = Scene(shares, folder, loop)
    rows: list[list[Cell]] = []
    state = scene.driver.state

    def is_all_granted() -> bool:
        return not len(state.queue) and len(state.leases) == shares

    def is_attributed() -> bool:
        return sum(len(slot.members) for slot in state.slots.values()) >= shares

    async def timed(what: str, work: Callable[[], Any]) -> None:
        await scene.driver.caught_up()
        await asyncio.sleep(0.2)
        selector.start_over()
        began, began_cpu = time.perf_counter(), time.thread_time()
        outcome = work()
        if outcome is not None:
            await outcome
        await scene.driver.caught_up()
        await asyncio.sleep(0)  # the turn that is not over counts too
        took_s, took_cpu_s = time.perf_counter() - began, time.thread_time() - began_cpu
        longest = (1000 * selector.longest_cpu_s, 1000 * selector.longest_s)
        rows.append([what, *longest, duration(took_cpu_s), duration(took_s)])

    async def observe_until(is_reached: Callable[[], bool], *, busy: bool = False) -> None:
        # A server reads its GPUs in a thread of its own, so that is not part of a turn.
        looked = scene.look(busy=busy)
        await asyncio.sleep(0)
        selector.start_over()
        scene.driver.note(looked)
        await scene.until(is_reached)

    await timed("queued at once", lambda: scene.in_waves(map(scene.request, scene.ids)))
    await timed("granted at once", lambda: observe_until(is_all_granted))
    await timed("a reading with a process for each", lambda: observe_until(is_attributed, busy=True))
    await timed("renewed at once", lambda: scene.in_waves(cmd.Renew(ids) for ids in batched(scene.ids, 1000)))
    await timed("released at once", lambda: scene.in_waves(map(cmd.Release, scene.ids)))
    await timed("a reading without processes", lambda: observe_until(lambda: not state.leases))
    # Only a lease of another machine can expire.
    again = [replace(scene.request(id_, is_local=False), lease_id=f"{id_}-b") for id_ in scene.ids]
    await timed("requested while there is room", lambda: scene.in_waves(again))
    await timed("expired at once", scene.expire)
    scene.driver.close()
    return rows


def main() -> None:
    options: argparse.Namespace = parser(__doc__).parse_args()
    results = Results("turns", "The longest turn of the event loop with ten thousand tiny shares.")
    shares = SHARES // 10 if options.quick else SHARES
    selector = TimedSelector()
    loop = Loop(selector)
    collect_garbage_seldom()
    with (
        tempfile.TemporaryDirectory(prefix="turns-") as folder,
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        rows = runner.run(measure(shares, Path(folder), loop, selector))
    results.table(
        f"{shares:,} shares of {SHARE_MB:.0f} MB and a little more, {OWNERS} owners, {AT_ONCE} callers at a time",
        ["", "longest turn, ms of CPU", "longest turn, ms", "CPU of all of it", "all of it"],
        rows,
    )
    longest_ms = max(_number(row[1]) for row in rows)
    bounded(
        results,
        "longest_turn",
        f"the longest turn of the event loop with {shares:,} tiny shares, processor time",
        longest_ms,
        "ms",
        most=MOST_MS,
        spread=f"by the clock: {show(max(_number(row[2]) for row in rows))} ms",
        why=f"the longest was: {max(rows, key=lambda row: _number(row[1]))[0]}",
    )
    measure_metrics(results, FEW_GPUS if options.quick else MOST_GPUS, QUICK_CALLS if options.quick else CALLS)
    results.finish(options)


def measure_metrics(results: Results, gpus: int, calls: int) -> None:
    """Ask a server for its metrics again and again, between two readings of its GPUs."""
    found: dict[str, list[float]] = {NOTHING: [], METRICS: []}
    sizes: list[int] = []
    settings = {"SIMULATED_GPUS": str(gpus), "REFRESH_INTERVAL": f"{READING_S:g}", "ACCESS_LOG": "false"}
    with ServerProcess(settings, command=TIMED) as server:
        server.ask("/metrics")
        longest_turn_s(server)
        for _ in range(calls):
            found[NOTHING].append(1000 * longest_turn_s(server))
            answer = server.ask("/metrics")
            assert answer.status == 200
            sizes.append(len(answer.body))
            found[METRICS].append(1000 * longest_turn_s(server))
    results.table(
        f"A server with {gpus:,} GPUs: the longest turn of its event loop, in {calls} calls",
        ["", "median, ms of CPU", "longest, ms of CPU"],
        [[name, statistics.median(turns_ms), max(turns_ms)] for name, turns_ms in found.items()],
        note=f"An answer has {max(sizes) / 1e6:.1f} MB. No reading of the GPUs falls into these calls.",
    )
    bounded(
        results,
        "metrics_turn",
        f"`/metrics` with {gpus:,} GPUs: the longest time for which it lets the event loop stand still, processor time; the "
        f"longest without it, between two calls, is {show(max(found[NOTHING]))} ms",
        max(found[METRICS]),
        "ms",
        most=MOST_METRICS_MS,
        spread=f"of {calls} calls, median {show(statistics.median(found[METRICS]))} ms; between two calls, median "
        f"{show(statistics.median(found[NOTHING]))} ms",
        why=f"not known; probably an answer of {max(sizes) / 1e6:.1f} MB is made in too few turns",
    )


def batched(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    remaining = iter(items)
    while batch := tuple(islice(remaining, size)):
        yield batch


def _number(cell: Sequence[Any] | Cell) -> float:
    return cell if isinstance(cell, float) else 0.0


if __name__ == "__main__":
    main()
