"""A client of a contender in a process of its own, which takes and releases GPUs as it is told, alone or as a crowd.

    python -m benchmarks.contenders.client NAME VARIANT SETTINGS      # as JSON

Times come from CLOCK_MONOTONIC, which all processes of one machine share.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from benchmarks.contenders.contender import Held, Serving, Taker, taker
from benchmarks.processes import Child, environment, keep_answers_apart, orders, say


class Client(Child):
    """Such a process, as the benchmark sees it."""

    def __init__(self, name: str, variant: str, serving: Serving) -> None:
        words = ["-m", "benchmarks.contenders.client", name, variant, json.dumps(dict(serving.settings))]
        super().__init__([*serving.python, *words], environment(serving.env))


def take(client: Taker, held: list[Held]) -> tuple[float, int]:
    """Take a GPU. Return since when it is held, and by which process."""
    held.append(client.take())
    return held[0].at, held[0].pid


def release(client: Taker, held: list[Held]) -> float:
    """Release the GPU. Return when that began."""
    began = time.monotonic()
    client.release(held.pop())
    return began


def cycles(client: Taker, number: int) -> list[float]:
    """Return the seconds of each cycle."""
    times_s = []
    for _ in range(number):
        began = time.perf_counter()
        client.cycle()
        times_s.append(time.perf_counter() - began)
    return times_s


def count_between(cycle: Callable[[], None], since: float, until: float) -> int:
    """Cycle until this time; return how many cycles ended within it."""
    counted = 0
    while time.monotonic() < until:
        cycle()
        counted += since <= time.monotonic() < until
    return counted


def crowd_of_threads(make: Callable[[], Taker], clients: int, warm_up_s: float, seconds: float) -> float:
    """Return the cycles a second of many clients, each a thread."""
    made = [make() for _ in range(clients)]
    since = time.monotonic() + warm_up_s
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda each=each: counts.append(count_between(each.cycle, since, since + seconds)))
        for each in made
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def crowd_of_processes(make: Callable[[], Taker], clients: int, warm_up_s: float, seconds: float) -> float:
    """Return the cycles a second of many clients, each a process. They begin when all are connected."""
    results, ready, gate = os.pipe(), os.pipe(), os.pipe()
    pids = []
    for _ in range(clients):
        if pid := os.fork():
            pids.append(pid)
            continue
        client = make()
        client.cycle()
        os.write(ready[1], b".")
        since = float(os.read(gate[0], 32))
        os.write(results[1], b"%8d" % count_between(client.cycle, since, since + seconds))
        # Without any cleanup, which is the parent's.
        os._exit(0)
    try:
        for _ in pids:
            os.read(ready[0], 1)
        os.write(gate[1], f"{time.monotonic() + warm_up_s:32.6f}".encode() * clients)
        return sum(int(os.read(results[0], 8)) for _ in pids) / seconds
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main() -> None:
    keep_answers_apart()
    name, variant, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    clients: list[Taker] = []
    held: list[Held] = []
    for do, *arguments in orders():
        if do == "crowd":
            # Before this process has a client of its own, which a fork could not use.
            has_threads, *size = arguments
            crowd = crowd_of_threads if has_threads else crowd_of_processes
            say(crowd(lambda: taker(name, variant, settings), *size))
            continue
        if not clients:
            clients.append(taker(name, variant, settings))
        match do:
            case "cycles":
                say(cycles(clients[0], *arguments))
            case "take":
                say(take(clients[0], held))
            case "release":
                say(release(clients[0], held))
            case "forget":
                # The process that held the GPU was killed.
                held.clear()
                say("forgotten")


if __name__ == "__main__":
    main()
