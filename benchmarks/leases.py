"""How fast leases are handed out, beside Redis locks and filelock in the same run.

Every server runs in a process of its own on this machine, and all keep their files on the same file system. Rounds
alternate between those that are compared; medians are printed. What counts are the ratios: the times are those of this
machine, on this day. Where redis-server (on the PATH), redis-py or filelock are missing, that is said and only this
server is measured. It stops by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lease_crowd import cycles_per_s
from lease_locks import FileLock, Lock, PoolLease, PoolLeaseByHttpClient, RedisAsyncioLock, RedisLock, is_installed
from lease_servers import bare_server, has_redis_server, pool_server, redis_server
from lease_waiters import MakeLock, hand_overs, kills

# While they wait: redis-py and filelock try again this often by default.
REDIS_POLL_S = 0.1
FILELOCK_POLL_S = 0.05
CLIENTS = 64


@dataclass(frozen=True)
class Effort:
    rounds: int
    cycles: int
    crowd_rounds: int
    crowd_s: float
    hand_overs: int
    peer_hand_overs: int
    kills: int
    blocks: int


QUICK = Effort(rounds=15, cycles=20, crowd_rounds=3, crowd_s=0.5, hand_overs=60, peer_hand_overs=20, kills=10, blocks=2)
WHOLE = Effort(
    rounds=60, cycles=40, crowd_rounds=6, crowd_s=2.0, hand_overs=320, peer_hand_overs=120, kills=60, blocks=4
)


class Report:
    """Prints each result as soon as it is there, and all that have a target once more at the end."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str, bool]] = []

    def result(self, what: str, measured: str, target: str, *, is_met: bool) -> None:
        self._rows.append((what, measured, target, is_met))
        self.note(what, f"{measured}, to reach: {target}")

    def note(self, what: str, measured: str) -> None:
        print(f"  {what:<58} {measured}", flush=True)

    def title(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def summary(self) -> None:
        self.title("All together")
        for what, measured, target, is_met in self._rows:
            print(f"  {'reached' if is_met else 'MISSED':<8} {what:<58} {measured:<72} {target}")


class Peers:
    """Which of the others are here."""

    def __init__(self) -> None:
        self.has_redis = has_redis_server() and is_installed("redis")
        self.has_filelock = is_installed("filelock")

    def say_what_is_missing(self) -> None:
        if not self.has_redis:
            print("Redis is not measured: redis-server is not on the PATH, or redis-py is not installed.")
        if not self.has_filelock:
            print("filelock is not measured: it is not installed.")


def one_client(report: Report, peers: Peers, effort: Effort, folder: Path) -> None:
    report.title("Lease + release, one client on a keep-alive connection (a bare socket), 8 GPUs")
    report.note("the disk: 4 KiB written and fdatasync'ed", f"{_ms(_sync_s(folder))}")
    with ExitStack() as stack:
        normal = stack.enter_context(pool_server(folder / "normal", 8, "normal"))
        full = stack.enter_context(pool_server(folder / "full", 8, "full"))
        logging = {"LOG_LEVEL": "info", "ACCESS_LOG": "true"}
        logged = stack.enter_context(pool_server(folder / "logged", 8, "normal", logging))
        bare = stack.enter_context(bare_server(folder / "bare"))
        # In this order, so that those that are compared follow each other.
        locks: dict[str, Lock] = {}
        if peers.has_redis:
            redis = stack.enter_context(redis_server(folder / "redis", is_durable=False))
            locks["Redis lock"] = RedisLock(redis)
            locks["Redis lock, by its asyncio client"] = RedisAsyncioLock(redis)
        locks["ours, normal"] = PoolLease(normal)
        locks["two calls of a bare ASGI handler (the floor of HTTP here)"] = PoolLease(bare)
        if peers.has_redis:
            durable = stack.enter_context(redis_server(folder / "redis-aof", is_durable=True))
            locks["Redis lock, fsync"] = RedisLock(durable)
        locks["ours, full"] = PoolLease(full)
        locks["ours, normal, http.client"] = PoolLeaseByHttpClient(normal)
        locks["ours, normal, nothing said about the process"] = PoolLease(normal, {"wait_s": 25.0})
        locks["ours, normal, with the access log (the default)"] = PoolLease(logged)
        if peers.has_filelock:
            locks["filelock"] = FileLock(folder / "one.lock")
        found: dict[str, list[float]] = {name: [] for name in locks}
        for lock in locks.values():
            _cycle_s(lock, 50)
        for _ in range(effort.rounds):
            for name, lock in locks.items():
                found[name].append(_cycle_s(lock, effort.cycles))
    for name, times in found.items():
        report.note(name, f"{_ms(statistics.median(times))}  (rounds: {_ms(min(times))} to {_ms(max(times))})")
    if peers.has_redis:
        for ours, theirs, most in (("ours, normal", "Redis lock", 2.5), ("ours, full", "Redis lock, fsync", 2.0)):
            ratio, spread = _ratio(found[ours], found[theirs])
            # A disk that others keep busy hides what we add: then both wait for it.
            quiet = _p(found[ours], 10) / _p(found[theirs], 10)
            measured = f"{ratio:.2f} x  {spread}; quietest tenth: {quiet:.2f} x"
            report.result(f"{ours} / {theirs}", measured, f"<= {most} x, both", is_met=max(ratio, quiet) <= most)


def crowd(report: Report, effort: Effort, folder: Path) -> None:
    report.title(f"Lease + release, {CLIENTS} clients in one asyncio process")
    for gpus in (64, 8):
        with (
            pool_server(folder / f"normal-{gpus}", gpus, "normal") as normal,
            pool_server(folder / f"full-{gpus}", gpus, "full") as full,
        ):
            rates: dict[str, list[float]] = {"normal": [], "full": []}
            for port in (normal, full):
                asyncio.run(cycles_per_s(port, CLIENTS, 0.3))
            for _ in range(effort.crowd_rounds):
                for name, port in (("normal", normal), ("full", full)):
                    rates[name].append(asyncio.run(cycles_per_s(port, CLIENTS, effort.crowd_s)))
        for name, rate in rates.items():
            spread = f"({min(rate):,.0f} to {max(rate):,.0f})"
            report.note(f"{gpus} GPUs, {name}", f"{statistics.median(rate):,.0f} cycles/s  {spread}")
        ratio, spread = _ratio(rates["full"], rates["normal"], "{:.0%}")
        report.result(
            f"{CLIENTS} clients, {gpus} GPUs: full / normal", f"{ratio:.0%}  {spread}", ">= 70 %", is_met=ratio >= 0.7
        )


def waiting(report: Report, peers: Peers, effort: Effort, folder: Path) -> None:
    report.title("Release -> the next one, who waits in another process, holds it (1 GPU)")
    with ExitStack() as stack:
        full = stack.enter_context(pool_server(folder / "hand-over", 1, "full"))
        normal = stack.enter_context(pool_server(folder / "hand-over-normal", 1, "normal"))
        lock_path = folder / "hand-over.lock"
        contenders: dict[str, tuple[MakeLock, float]] = {
            "ours, full": (lambda: PoolLease(full), 0.01),
            "ours, normal": (lambda: PoolLease(normal), 0.01),
        }
        if peers.has_redis:
            redis = stack.enter_context(redis_server(folder / "redis-hand-over", is_durable=False))
            contenders["Redis lock, sleep=0.1 (its default)"] = (lambda: RedisLock(redis), REDIS_POLL_S)
            contenders["Redis lock, sleep=0.01"] = (lambda: RedisLock(redis, 0.01), 0.01)
        if peers.has_filelock:
            contenders["filelock"] = (lambda: FileLock(lock_path), FILELOCK_POLL_S)
        found = _in_blocks(
            hand_overs,
            contenders,
            lambda name: effort.hand_overs if name.startswith("ours") else effort.peer_hand_overs,
            effort.blocks,
        )
        for name, times in found.items():
            report.note(name, _percentiles(times))
        for name in ("ours, full", "ours, normal"):
            p50, p99 = _p(found[name], 50), _p(found[name], 99)
            report.result(
                f"hand-over, {name}",
                f"p50 {_ms(p50)}, p99 {_ms(p99)}",
                "p50 <= 5 ms, p99 <= 20 ms",
                is_met=p50 <= 0.005 and p99 <= 0.02,
            )
        report.title("kill -9 of the holder -> the next one, who waits in another process, holds it (1 GPU)")
        dying = {name: found_at for name, found_at in contenders.items() if not name.startswith("Redis")}
        found = _in_blocks(kills, dying, lambda _: effort.kills, effort.blocks)
        for name, times in found.items():
            report.note(name, _percentiles(times))
        report.note("Redis lock", "not measured: as long as its timeout (30 s here) is set to")
        p50 = _p(found["ours, full"], 50)
        report.result("kill -9, ours, full", f"p50 {_ms(p50)}", "p50 <= 50 ms", is_met=p50 <= 0.05)


def _in_blocks(
    measure: Callable[[MakeLock, int, float], list[float]],
    contenders: dict[str, tuple[MakeLock, float]],
    number: Callable[[str], int],
    blocks: int,
) -> dict[str, list[float]]:
    """All of them in turn, several times."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(blocks):
        for name, (make, poll_s) in contenders.items():
            found[name] += measure(make, number(name) // blocks, poll_s)
    return found


def _cycle_s(lock: Lock, cycles: int) -> float:
    """The median of single cycles: what somebody else on the machine takes away for a moment does not show in it."""
    times = []
    for _ in range(cycles):
        began = time.perf_counter()
        lock.acquire()
        lock.release()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _sync_s(folder: Path) -> float:
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


def _ratio(ours: Sequence[float], theirs: Sequence[float], form: str = "{:.2f}") -> tuple[float, str]:
    """The median of the rounds' ratios, as those that share a round share its noise; and how far half of them lie."""
    of_rounds = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(of_rounds, n=4)
    return statistics.median(of_rounds), f"(half of the rounds: {form.format(low)} to {form.format(high)})"


def _p(times: Sequence[float], percent: int) -> float:
    return sorted(times)[min(len(times) * percent // 100, len(times) - 1)]


def _percentiles(times: Sequence[float]) -> str:
    return f"p50 {_ms(_p(times, 50))}, p99 {_ms(_p(times, 99))}, most {_ms(max(times))}, of {len(times)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few and short rounds, to see that it runs")
    effort = QUICK if parser.parse_args().quick else WHOLE
    report, peers = Report(), Peers()
    peers.say_what_is_missing()
    with tempfile.TemporaryDirectory(prefix="lease-benchmark-") as name:
        folder = Path(name)
        one_client(report, peers, effort, folder)
        crowd(report, effort, folder)
        waiting(report, peers, effort, folder)
    report.summary()


if __name__ == "__main__":
    main()
