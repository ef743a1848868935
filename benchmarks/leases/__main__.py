"""How fast leases are granted: compared with the Redis lock, by socket and by client, and with many clients.

Every server runs in a process of its own on this machine, and all keep their files on the same file system. Contenders
take turns in each round. Compare the ratios: the times depend on the machine and the day. Where redis-server (on the
PATH) or redis-py (in .bench-venv) is missing, the results say so and only this server is measured. benchmarks/contenders
has more contenders, hand-overs and deaths of holders. It stops by itself.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from benchmarks import peers
from benchmarks.leases.crowd import cycles_per_s
from benchmarks.leases.locks import (
    Lock,
    PoolLease,
    PoolLeaseByPythonClient,
    RedisAsyncioLock,
    RedisLock,
    RedisLockByBareSocket,
    cycle_s,
    is_installed,
)
from benchmarks.shared.processes import Busy
from benchmarks.shared.results import Cell, Results, duration, parser, show
from benchmarks.shared.rounds import ENOUGH_FOR_P99, in_turn, median_ratio, percentile, ratios, spread, spread_s
from benchmarks.shared.servers import bare_server, pool_process, pool_server, redis_server
from benchmarks.shared.targets import bounded, ratio, ratio_when_quiet_too

CLIENTS = 64
OURS, OURS_FULL = "ours, normal", "ours, full"
BY_CLIENT, BY_UNIX = ", by our Python client (blocking)", ", over its Unix socket"
REDIS, REDIS_FULL = "Redis lock", "Redis lock, fsync"
FLOOR = "two calls of a bare ASGI handler (uvicorn)"
BARE_SOCKET = "over HTTP by a bare socket"
BY_BARE_SOCKET = ", by a bare socket"

Rounds = dict[str, list[float]]


@dataclass(frozen=True)
class Effort:
    rounds: int
    cycles: int
    crowd_rounds: int
    crowd_s: float
    # Every server takes a while to start.
    has_few_servers: bool = False


QUICK = Effort(rounds=4, cycles=5, crowd_rounds=2, crowd_s=0.1, has_few_servers=True)
WHOLE = Effort(rounds=30, cycles=20, crowd_rounds=5, crowd_s=0.8)


@dataclass(frozen=True)
class Server:
    """A server of ours with its Unix socket."""

    port: int
    pid: int
    socket: Path


@dataclass(frozen=True)
class Pair:
    """Two servers: `normal` survives the end of a process, `full` also that of the machine."""

    normal: Server
    full: Server


@dataclass(frozen=True)
class Cost:
    """Why a lease + release takes as long as it does."""

    found: Rounds
    sync_s: float
    cpu_s: dict[str, Callable[[], float]]

    def why(self, ours: str, theirs: str) -> str:
        """Compare the parts of a lease + release with the whole of the other contender."""
        whole_s, floor_s, other_s = (statistics.median(self.found[name]) for name in (ours, FLOOR, theirs))
        own_s = self.cpu_s[ours]()
        return (
            f"of {duration(whole_s)}, two calls of a bare ASGI handler take {duration(floor_s)}; the server takes {duration(own_s)} "
            f"of processor time, which alone is {show(own_s / other_s)} x; a sync of the disk takes {duration(self.sync_s)}; "
            "see `steps` for where the time goes"
        )


@contextmanager
def pair_of(folder: Path, gpus: int) -> Iterator[Pair]:
    with ExitStack() as stack:
        started: list[Server] = []
        for durability in ("normal", "full"):
            path = folder / f"socket-{durability}-{gpus}" / "pool.sock"
            path.parent.mkdir(mode=0o755)
            env = {"GPU_POOL_SOCKET": str(path)}
            server = pool_process(folder / f"{durability}-{gpus}", str(gpus), durability, env)
            started.append(Server(*stack.enter_context(server), path))
        yield Pair(*started)


def one_client(results: Results, effort: Effort, servers: Pair, folder: Path) -> None:
    sync_s = disk_sync_s(folder)
    with ExitStack() as stack:
        bare, _ = stack.enter_context(bare_server(folder / "bare"))
        has_redis = can_measure_redis(results)
        # In this order, so that contenders that are compared follow each other.
        locks: dict[str, Lock] = {}
        if has_redis:
            redis = stack.enter_context(redis_server(folder / "redis", is_durable=False))
            locks[REDIS] = RedisLock(redis)
            locks[REDIS + BY_BARE_SOCKET] = RedisLockByBareSocket(redis)
            if not effort.has_few_servers:
                locks["Redis lock, by its asyncio client"] = RedisAsyncioLock(redis)
        locks[OURS] = PoolLease(servers.normal.port)
        locks[OURS + BY_UNIX] = PoolLease(servers.normal.socket)
        locks[FLOOR] = PoolLease(bare)
        if has_redis:
            durable = stack.enter_context(redis_server(folder / "redis-aof", is_durable=True))
            locks[REDIS_FULL] = RedisLock(durable)
            locks[REDIS_FULL + BY_BARE_SOCKET] = RedisLockByBareSocket(durable)
        locks[OURS_FULL] = PoolLease(servers.full.port)
        locks[OURS_FULL + BY_CLIENT] = PoolLeaseByPythonClient(servers.full.port)
        if not effort.has_few_servers:
            locks[OURS + BY_CLIENT] = PoolLeaseByPythonClient(servers.normal.port)
            locks[OURS_FULL + BY_CLIENT + BY_UNIX] = PoolLeaseByPythonClient(servers.full.port, servers.full.socket)
            locks["ours, normal, without details of the process"] = PoolLease(servers.normal.port, {"wait_s": 25.0})
            logging = {"LOG_LEVEL": "info", "ACCESS_LOG": "true"}
            logged = stack.enter_context(pool_server(folder / "logged", 8, "normal", logging))
            locks["ours, normal, with the access log (the default)"] = PoolLease(logged)
        for lock in locks.values():
            stack.enter_context(closing(lock))
        times: Rounds = {name: [] for name in locks}
        measured = {name: partial(cycle_s, lock, effort.cycles, times[name]) for name, lock in locks.items()}
        normal, full = Busy(servers.normal.pid), Busy(servers.full.pid)
        measured[OURS] = partial(normal.during, measured[OURS], effort.cycles)
        measured[OURS_FULL] = partial(full.during, measured[OURS_FULL], effort.cycles)
        for measure in measured.values():
            measure()
        for kept in times.values():
            kept.clear()
        found = in_turn(measured, effort.rounds)
    rows: list[list[Cell]] = [
        [
            name,
            duration(statistics.median(found[name])),
            spread_s(found[name]),
            duration(percentile(times[name], 99)) if len(times[name]) >= ENOUGH_FOR_P99 else None,
            f"{median_ratio(found[name], found[REDIS]):.2f} x" if has_redis else None,
        ]
        for name in locks
    ]
    results.table(
        f"Lease + release, one client on a keep-alive connection, 8 GPUs: medians of {effort.rounds} alternating rounds",
        ["", "median", "rounds", "p99 of all cycles", "relative to the Redis lock"],
        rows,
        note=f"Ours is called {BARE_SOCKET}, unless the row says otherwise. Redis is called by redis-py's lock; by a bare socket, it gets "
        "the same two commands. Redis without fsync keeps nothing here: it writes neither snapshots nor a log, while ours always "
        f"writes a journal. The disk writes and syncs 4 KiB in {duration(sync_s)} (median).",
        is_headline=True,
    )
    beside_redis(results, found, Cost(found, sync_s, {OURS: normal.cycle_s, OURS_FULL: full.cycle_s}))


def can_measure_redis(results: Results) -> bool:
    if not is_installed("redis"):
        results.skip("Redis", "redis-py is not in .bench-venv: python -m benchmarks.peers makes it")
        return False
    try:
        server = peers.version_of_program(peers.program("redis-server"))
    except peers.MissingError as missing:
        results.skip("Redis", str(missing))
        return False
    reader = (
        f"with hiredis {version('hiredis')}" if is_installed("hiredis") else "without hiredis, which is not installed"
    )
    results.note(f"Redis: {server}, redis-py {version('redis')} {reader}.")
    return True


def beside_redis(results: Results, found: Rounds, cost: Cost) -> None:
    """Add the figures that compare us with the Redis lock, and the Unix socket with TCP."""
    missing = "Redis cannot be measured here"
    for figure_id, ours, theirs, most in (
        ("lease_fsync_vs_redis_fsync", OURS_FULL, REDIS_FULL, 1.6),
        ("lease_vs_redis", OURS, REDIS, 3.5),
    ):
        in_redis, by_socket = found.get(theirs, []), found.get(theirs + BY_BARE_SOCKET, [])
        ratio_when_quiet_too(
            results,
            figure_id,
            f"lease + release {BARE_SOCKET}, one client, {ours.removeprefix('ours, ')}, relative to the {theirs}, by redis-py{_beside_bare(found[ours], by_socket)}",
            found[ours],
            in_redis,
            most=most,
            why=cost.why(ours, theirs) if in_redis else "",
            missing=missing,
        )
    by_client, in_redis = found[OURS_FULL + BY_CLIENT], found.get(REDIS_FULL, [])
    by_both = found.get(OURS_FULL + BY_CLIENT + BY_UNIX, [])
    ratio(
        results,
        "lease_client_vs_redis_fsync",
        f"lease + release{BY_CLIENT}, full, relative to the {REDIS_FULL}",
        by_client,
        in_redis,
        most=2.5,
        spread=f"the client over the Unix socket: {show(median_ratio(by_both, in_redis))} x"
        if by_both and in_redis
        else "",
        why=f"a bare socket, in turn on the same server, takes {duration(statistics.median(found[OURS_FULL]))}, and the "
        f"client {duration(statistics.median(by_client))}",
        missing=missing,
    )
    ratio(
        results,
        "lease_socket_vs_tcp",
        "lease + release over the Unix socket of the server, normal, relative to TCP, both by a bare socket",
        found[OURS + BY_UNIX],
        found[OURS],
        most=1.05,
        why="not known: the same calls on the same server, which differ only in the socket",
    )


def _beside_bare(ours: list[float], in_redis: list[float]) -> str:
    return f" (relative to the same lock{BY_BARE_SOCKET}: {show(median_ratio(ours, in_redis))} x)" if in_redis else ""


def crowd(results: Results, effort: Effort, servers: dict[int, Pair]) -> None:
    """Measure many clients at once. `servers` has the ports by number of GPUs."""
    rows: list[list[Cell]] = []
    for gpus, pair in servers.items():

        def rate(port: int, seconds: float = effort.crowd_s) -> float:
            return asyncio.run(cycles_per_s(port, CLIENTS, seconds))

        for port in (pair.normal.port, pair.full.port):
            rate(port, effort.crowd_s / 4)
        contenders = {"normal": partial(rate, pair.normal.port), "full": partial(rate, pair.full.port)}
        rates = in_turn(contenders, effort.crowd_rounds)
        rows += [
            [f"{gpus} GPUs, {name}", round(statistics.median(found)), spread([round(one) for one in found])]
            for name, found in rates.items()
        ]
        percents = [100 * ratio for ratio in ratios(rates["full"], rates["normal"])]
        bounded(
            results,
            f"full_vs_normal_{gpus}_gpus",
            f"lease + release, {CLIENTS} clients, {gpus} GPUs: the rate at `full`, relative to that at `normal`",
            statistics.median(percents),
            "%",
            least=70,
            spread=f"rounds: {spread(percents)}; cycles/s: {show(round(statistics.median(rates['full'])))} at `full`, "
            f"{show(round(statistics.median(rates['normal'])))} at `normal`",
            why="commits are grouped, and each group waits for the disk; see the time of a sync",
        )
    results.table(
        f"Lease + release, {CLIENTS} clients in one asyncio process: medians of {effort.crowd_rounds} alternating rounds",
        ["", "cycles/s", "rounds"],
        rows,
    )


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


def main() -> None:
    options = parser(__doc__).parse_args()
    effort = QUICK if options.quick else WHOLE
    # redis-py is loaded from the environment of the peers; packages of this interpreter come first.
    sys.path += [str(path) for path in peers.FOLDER.glob("lib/python*/site-packages")]
    results = Results(
        "leases", "How fast leases are granted, compared with the Redis lock, and with many clients at once."
    )
    with tempfile.TemporaryDirectory(prefix="lease-benchmark-") as name:
        folder = Path(name)
        with ExitStack() as stack:
            eight = stack.enter_context(pair_of(folder, 8))
            one_client(results, effort, eight, folder)
            crowds = {8: eight}
            if not effort.has_few_servers:
                crowds[64] = stack.enter_context(pair_of(folder, 64))
            crowd(results, effort, crowds)
    results.finish(options)


if __name__ == "__main__":
    main()
