"""How fast leases are granted: compared with the Redis lock, with many clients, after a release, and after a holder's death.

Every server runs in a process of its own on this machine, and all keep their files on the same file system. Contenders
take turns in each round. Compare the ratios: the times depend on the machine and the day. Where redis-server (on the
PATH) or redis-py (in .bench-venv) is missing, the results say so and only this server is measured. benchmarks/contenders
has more contenders. It stops by itself.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path

from benchmarks import peers
from benchmarks.leases.crowd import cycles_per_s
from benchmarks.leases.inside import DURABILITIES, WRITERS, inside, name_of
from benchmarks.leases.locks import (
    Lock,
    PoolLease,
    PoolLeaseByPythonClient,
    RedisAsyncioLock,
    RedisLock,
    cycle_s,
    is_installed,
)
from benchmarks.leases.parts import Parts, where_the_time_goes
from benchmarks.leases.waiters import MakeLock, hand_overs, kills
from benchmarks.shared.results import Cell, Results, duration, ecdf, parser, show
from benchmarks.shared.rounds import in_turn, median_ratio, percentile, ratios, spread, spread_s
from benchmarks.shared.servers import bare_server, pool_server, redis_server

CLIENTS = 64
# The GPU is released, or its holder killed, at a random moment of this length. A waiter that does not poll needs no more.
MOMENT_S = 0.01
# Among fewer, a single value would decide the p99.
ENOUGH_FOR_P99 = 100
OURS, OURS_FULL = "ours, normal", "ours, full"
BY_CLIENT = ", by our Python client (blocking)"
REDIS, REDIS_FULL = "Redis lock", "Redis lock, fsync"
FLOOR = "two calls of a bare ASGI handler (the floor of HTTP here)"
BARE_SOCKET = "over HTTP by a bare socket"


@dataclass(frozen=True)
class Effort:
    rounds: int
    cycles: int
    crowd_rounds: int
    crowd_s: float
    hand_overs: int
    kills: int
    blocks: int
    # Every server takes a while to start.
    has_few_servers: bool = False


QUICK = Effort(rounds=4, cycles=5, crowd_rounds=2, crowd_s=0.1, hand_overs=6, kills=2, blocks=2, has_few_servers=True)
WHOLE = Effort(rounds=30, cycles=20, crowd_rounds=5, crowd_s=1.25, hand_overs=200, kills=40, blocks=4)


@dataclass(frozen=True)
class Ports:
    """The ports of two servers: `normal` survives the end of a process, `full` also that of the machine."""

    normal: int
    full: int


@contextmanager
def pair(folder: Path, gpus: int) -> Iterator[Ports]:
    with (
        pool_server(folder / f"normal-{gpus}", gpus, "normal") as normal,
        pool_server(folder / f"full-{gpus}", gpus, "full") as full,
    ):
        yield Ports(normal, full)


def one_client(results: Results, effort: Effort, ports: Ports, folder: Path) -> None:
    sync_s = disk_sync_s(folder)
    with ExitStack() as stack:
        bare = stack.enter_context(bare_server(folder / "bare"))
        apps = stack.enter_context(inside(folder / "inside"))
        has_redis = can_measure_redis(results)
        # In this order, so that contenders that are compared follow each other.
        locks: dict[str, Lock] = {}
        if has_redis:
            redis = stack.enter_context(redis_server(folder / "redis", is_durable=False))
            locks[REDIS] = RedisLock(redis)
            locks["Redis lock, by its asyncio client"] = RedisAsyncioLock(redis)
        locks[OURS] = PoolLease(ports.normal)
        locks[OURS + BY_CLIENT] = PoolLeaseByPythonClient(ports.normal)
        locks[FLOOR] = PoolLease(bare)
        if has_redis:
            locks[REDIS_FULL] = RedisLock(stack.enter_context(redis_server(folder / "redis-aof", is_durable=True)))
        locks[OURS_FULL] = PoolLease(ports.full)
        locks[OURS_FULL + BY_CLIENT] = PoolLeaseByPythonClient(ports.full)
        locks["ours, normal, without details of the process"] = PoolLease(ports.normal, {"wait_s": 25.0})
        if not effort.has_few_servers:
            logging = {"LOG_LEVEL": "info", "ACCESS_LOG": "true"}
            logged = stack.enter_context(pool_server(folder / "logged", 8, "normal", logging))
            locks["ours, normal, with the access log (the default)"] = PoolLease(logged)
        for lock in locks.values():
            stack.enter_context(closing(lock))
        measured = {name: partial(cycle_s, lock, effort.cycles) for name, lock in locks.items()}
        for durability, writer in product(DURABILITIES, WRITERS):
            measured[name_of(durability, writer)] = partial(apps.cycle_s, durability, writer, effort.cycles)
        for measure in measured.values():
            measure()
        found = in_turn(measured, effort.rounds)
    rows: list[list[Cell]] = [
        [
            name,
            duration(statistics.median(found[name])),
            spread_s(found[name]),
            f"{median_ratio(found[name], found[REDIS]):.2f} x" if has_redis else None,
        ]
        for name in locks
    ]
    results.table(
        f"Lease + release, one client on a keep-alive connection, 8 GPUs: medians of {effort.rounds} alternating rounds",
        ["", "median", "rounds", "relative to the Redis lock"],
        rows,
        note=f"Ours is called {BARE_SOCKET}, unless the row says otherwise. The disk writes and syncs 4 KiB in {duration(sync_s)} (median).",
    )
    parts = {
        name: Parts.of(found[name], found[FLOOR], *(found[name_of(durability, writer)] for writer in WRITERS))
        for name, durability in zip((OURS, OURS_FULL), DURABILITIES, strict=True)
    }
    where_the_time_goes(results, parts)
    beside_redis(results, found, OURS, REDIS, parts[OURS], figure_id="lease_vs_redis", most=2.5)
    beside_redis(
        results, found, OURS_FULL, REDIS_FULL, parts[OURS_FULL], figure_id="lease_fsync_vs_redis_fsync", most=2.0
    )


def can_measure_redis(results: Results) -> bool:
    if not is_installed("redis"):
        results.skip("Redis", "redis-py is not in .bench-venv: python -m benchmarks.peers makes it")
        return False
    try:
        server = peers.version_of_program(peers.program("redis-server"))
    except peers.MissingError as missing:
        results.skip("Redis", str(missing))
        return False
    results.note(f"Redis: {server}, redis-py {version('redis')}.")
    return True


def beside_redis(
    results: Results,
    found: dict[str, list[float]],
    ours: str,
    theirs: str,
    parts: Parts,
    *,
    figure_id: str,
    most: float,
) -> None:
    what = f"lease + release {BARE_SOCKET}, one client, {ours.removeprefix('ours, ')}, relative to the {theirs}"
    target = f"at most {most:g} x, also in the quietest tenth of the rounds"
    if theirs not in found:
        why = "Redis cannot be measured here"
        results.figure(figure_id, what, value=None, unit="x", target=target, is_met=None, why=why)
        return
    ratio = median_ratio(found[ours], found[theirs])
    # On a busy disk both wait, which hides what we add. So the quietest rounds must reach the target too.
    quiet = percentile(found[ours], 10) / percentile(found[theirs], 10)
    client = median_ratio(found[ours + BY_CLIENT], found[theirs])
    results.figure(
        figure_id,
        what,
        value=ratio,
        unit="x",
        target=target,
        is_met=max(ratio, quiet) <= most,
        spread=f"{half(ratios(found[ours], found[theirs]))}; the quietest tenth of each: {quiet:.2f} x; "
        f"by our Python client: {client:.2f} x",
        why=parts.why(statistics.median(found[theirs])),
    )


def crowd(results: Results, effort: Effort, servers: dict[int, Ports]) -> None:
    """Measure many clients at once. `servers` has the ports by number of GPUs."""
    rows: list[list[Cell]] = []
    for gpus, ports in servers.items():

        def rate(port: int, seconds: float = effort.crowd_s) -> float:
            return asyncio.run(cycles_per_s(port, CLIENTS, seconds))

        for port in (ports.normal, ports.full):
            rate(port, effort.crowd_s / 4)
        contenders = {"normal": partial(rate, ports.normal), "full": partial(rate, ports.full)}
        rates = in_turn(contenders, effort.crowd_rounds)
        rows += [
            [f"{gpus} GPUs, {name}", round(statistics.median(found)), spread([round(one) for one in found])]
            for name, found in rates.items()
        ]
        percents = [100 * ratio for ratio in ratios(rates["full"], rates["normal"])]
        results.figure(
            f"full_vs_normal_{gpus}_gpus",
            f"lease + release, {CLIENTS} clients, {gpus} GPUs: the rate at `full`, relative to that at `normal`",
            value=statistics.median(percents),
            unit="%",
            target=">= 70 %",
            is_met=statistics.median(percents) >= 70,
            spread=f"rounds: {spread(percents)}; cycles/s: {show(round(statistics.median(rates['full'])))} at `full`, "
            f"{show(round(statistics.median(rates['normal'])))} at `normal`",
            why="commits are grouped, and each group waits for the disk; see the time of a sync",
        )
    results.table(
        f"Lease + release, {CLIENTS} clients in one asyncio process: medians of {effort.crowd_rounds} alternating rounds",
        ["", "cycles/s", "rounds"],
        rows,
    )


def waiting(results: Results, effort: Effort, folder: Path) -> None:
    with ExitStack() as stack:
        makers: dict[str, MakeLock] = {}
        by_client: dict[str, MakeLock] = {}
        for name, durability in ((OURS_FULL, "full"), (OURS, "normal"))[: 1 if effort.has_few_servers else 2]:
            port = stack.enter_context(pool_server(folder / f"hand-over-{durability}", 1, durability))
            makers[name] = partial(PoolLease, port)
            if name == OURS_FULL:
                by_client[name + BY_CLIENT] = partial(PoolLeaseByPythonClient, port)
        handed = in_blocks(hand_overs, by_client | makers, effort.hand_overs, effort.blocks)
        killed = in_blocks(kills, makers, effort.kills, effort.blocks)
    for title, found in (
        ("From a release until the next waiter, in another process, holds the GPU (1 GPU)", handed),
        ("From kill -9 of the holder until the next waiter, in another process, holds the GPU (1 GPU)", killed),
    ):
        rows: list[list[Cell]] = []
        for name, times in found.items():
            tail = duration(percentile(times, 99)) if len(times) >= ENOUGH_FOR_P99 else None
            rows.append([name, duration(percentile(times, 50)), tail, duration(max(times)), len(times)])
        results.table(
            title,
            ["", "p50", "p99", "longest", "number"],
            rows,
            note=f"Called {BARE_SOCKET}, unless the row says otherwise.",
        )
    results.plot(
        "waiting",
        "Time until the next waiter, in another process, holds the GPU",
        kind="ecdf",
        x="ms",
        y="share of all",
        log_x=True,
        series={
            "after a release": ecdf(1000 * time for time in handed[OURS_FULL]),
            "after a release, by our Python client": ecdf(1000 * time for time in handed[OURS_FULL + BY_CLIENT]),
            "after kill -9": ecdf(1000 * time for time in killed[OURS_FULL]),
        },
    )
    release, bare, client = (
        "release to the next waiter in another process",
        handed[OURS_FULL],
        handed[OURS_FULL + BY_CLIENT],
    )
    to_disk = (
        "a grant is written to the disk before the waiter is told; see the time of a sync, and the same at `normal`"
    )
    for figure_id, what, times, percent, most_ms, why in (
        ("hand_over_p50", f"{release}, {BARE_SOCKET}", bare, 50, 5, to_disk),
        ("hand_over_p99", f"{release}, {BARE_SOCKET}", bare, 99, 20, to_disk),
        ("hand_over_client_p50", release + BY_CLIENT, client, 50, 5, slower_client(bare, 50, 5)),
        ("hand_over_client_p99", release + BY_CLIENT, client, 99, 20, slower_client(bare, 99, 20)),
        ("reclaim_p50", f"`kill -9` of a holder to the next waiter, {BARE_SOCKET}", killed[OURS_FULL], 50, 50, to_disk),
    ):
        value_ms = 1000 * percentile(times, percent)
        results.figure(
            figure_id,
            f"{what}, p{percent}",
            value=value_ms,
            unit="ms",
            target=f"<= {most_ms} ms",
            is_met=value_ms <= most_ms,
            spread=f"of {len(times)}, longest {duration(max(times))}",
            why=why,
        )


def slower_client(bare: Sequence[float], percent: int, most_ms: float) -> str:
    bare_s = percentile(bare, percent)
    if 1000 * bare_s > most_ms:
        return f"a bare socket, in turn on the same server, misses it as well, with {duration(bare_s)}; see there"
    return (
        f"a bare socket, in turn on the same server, takes {duration(bare_s)}; the client takes the rest, in the process "
        "that releases and in the one that waits"
    )


def in_blocks(
    measure: Callable[[MakeLock, int, float], list[float]], makers: dict[str, MakeLock], number: int, blocks: int
) -> dict[str, list[float]]:
    """Measure all of them in turn, block by block."""
    found: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(blocks):
        for name, make in makers.items():
            found[name] += measure(make, number // blocks, MOMENT_S)
    return found


def disk_sync_s(folder: Path) -> float:
    times = []
    file = os.open(folder / "sync", os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        for _ in range(50):
            began = time.perf_counter()
            os.write(file, bytes(4096))
            os.fdatasync(file)
            times.append(time.perf_counter() - began)
    finally:
        os.close(file)
    return statistics.median(times)


def half(of_rounds: Sequence[float]) -> str:
    """Format the range of the middle half."""
    low, _, high = statistics.quantiles(of_rounds, n=4)
    return f"middle half of the rounds: {low:.2f} to {high:.2f} x"


def main() -> None:
    options = parser(__doc__).parse_args()
    effort = QUICK if options.quick else WHOLE
    # redis-py is loaded from the environment of the peers; packages of this interpreter come first.
    sys.path += [str(path) for path in peers.FOLDER.glob("lib/python*/site-packages")]
    results = Results(
        "leases", "How fast leases are granted, handed over to the next waiter, and reclaimed from dead holders."
    )
    with tempfile.TemporaryDirectory(prefix="lease-benchmark-") as name:
        folder = Path(name)
        with ExitStack() as stack:
            eight = stack.enter_context(pair(folder, 8))
            one_client(results, effort, eight, folder)
            crowds = {8: eight}
            if not effort.has_few_servers:
                crowds[64] = stack.enter_context(pair(folder, 64))
            crowd(results, effort, crowds)
        waiting(results, effort, folder)
    results.finish(options)


if __name__ == "__main__":
    main()
