"""The measurements of a contender, on servers that run."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from benchmarks.contenders.field import SERVERS, Contender
from benchmarks.contenders.order import BEGINNING_S, Verdict, judge, out_of_order
from benchmarks.contenders.processes import ANSWER_S, Client, memory_mb
from benchmarks.contenders.servers import Serving
from benchmarks.peers import MissingError
from benchmarks.shared.results import duration

# Time enough for the next client to have begun to wait.
SETTLE_S = 0.02
WORKLOAD_HOLD_S = (0.05, 0.15)

Trouble = (OSError, RuntimeError, AssertionError)
Skip = Callable[[str, str], None]
Failed = Callable[[Contender, str, float], None]
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Running:
    """The contenders whose servers run, and their number of GPUs."""

    servers: dict[str, Serving]
    contenders: list[Contender]
    gpus: int
    folder: Path

    def client(self, contender: Contender) -> Client:
        """Make a client of a contender, in a new process."""
        serving = self.servers[contender.server]
        return Client(contender.kind, {**serving.settings, **contender.settings}, serving.python, serving.env)


class Clients:
    """Client processes for all rounds. Each has already held a GPU once, so that it is loaded and connected."""

    def __init__(self, run: Running) -> None:
        self._run = run
        self._stack = ExitStack()
        self._clients: dict[tuple[str, str], Client] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def of(self, contender: Contender, role: str) -> Client:
        """Return the contender's process for this role."""
        key = contender.name, role
        if key not in self._clients:
            client = self._clients[key] = self._stack.enter_context(self._run.client(contender))
            client.ask("take")
            client.ask("release")
        return self._clients[key]

    def forget(self, contender: Contender, role: str) -> None:
        """Remove a process that was killed, so that the next one is new."""
        self._clients.pop((contender.name, role)).bury()

    def end(self, contender: Contender) -> None:
        """End the processes of a contender that has failed, so that they neither hold a GPU nor answer late."""
        for key in [key for key in self._clients if key[0] == contender.name]:
            self._clients.pop(key).close()


class Patience:
    """How long the run has waited in vain for each server. Past the limit, its contenders are left out of what follows."""

    def __init__(self, limit_s: float, skip: Skip) -> None:
        self._limit_s = limit_s
        self._skip = skip
        self._lost_s: dict[str, float] = {}
        self._left_out: set[str] = set()

    def lost(self, contender: Contender, seconds: float) -> None:
        """Note a measurement that failed after this time."""
        self._lost_s[contender.server] = self._lost_s.get(contender.server, 0.0) + seconds

    def left(self, contenders: Iterable[Contender]) -> list[Contender]:
        """Return the contenders for which the run still waits. It says once which it leaves out, and why."""
        left = []
        for contender in contenders:
            lost_s = self._lost_s.get(contender.server, 0.0)
            if lost_s < self._limit_s:
                left.append(contender)
            elif contender.name not in self._left_out:
                self._left_out.add(contender.name)
                self._skip(f"{contender.name}, the rest", f"the run has waited for it in vain for {duration(lost_s)}")
        return left


def awake(run: Running, measure: Callable[[Contender], Measured]) -> Callable[[Contender], Measured]:
    """Return a measurement that wakes the contender's server before, and lets it rest afterwards."""

    def measured(contender: Contender) -> Measured:
        with run.servers[contender.server].awake():
            return measure(contender)

    return measured


@contextmanager
def running(contenders: Iterable[Contender], gpus: int, folder: Path, skip: Skip) -> Iterator[Running]:
    """Run the servers of the contenders, each once. A contender whose server cannot run is left out, with the reason."""
    contenders = list(contenders)
    servers: dict[str, Serving] = {}
    with ExitStack() as stack:
        for name in dict.fromkeys(contender.server for contender in contenders):
            try:
                servers[name] = stack.enter_context(SERVERS[name](folder / f"{name}-{gpus}", gpus))
            except (MissingError, *Trouble) as trouble:
                skip(", ".join(each.name for each in contenders if each.server == name), str(trouble))
        yield Running(servers, [each for each in contenders if each.server in servers], gpus, folder)


def taking_turns(
    contenders: Iterable[Contender],
    measure: Callable[[Contender], list[float]],
    rounds: int,
    failed: Failed,
) -> dict[str, list[list[float]]]:
    """Return each contender's values of each round; every other round goes backwards.

    A contender that fails is left out from then on; `failed` is told why, and after which time.
    """
    left = list(contenders)
    found: dict[str, list[list[float]]] = {contender.name: [] for contender in left}
    for number in range(rounds):
        for contender in [each for each in left if number < each.most_rounds]:
            began = time.monotonic()
            try:
                found[contender.name].append(measure(contender))
            except Trouble as trouble:
                failed(contender, str(trouble), time.monotonic() - began)
                left.remove(contender)
                del found[contender.name]
        left.reverse()
    return found


def first_grant(run: Running, contender: Contender) -> tuple[float, float]:
    """Return the seconds from the start of a client's process to its first GPU, and its megabytes then."""
    began = time.monotonic()
    with run.client(contender) as client:
        held = client.ask("take")
        took_s = time.monotonic() - began
        weight_mb = memory_mb({client.pid, held["pid"]})
        client.ask("release")
    return took_s, weight_mb


@contextmanager
def racing(run: Running, clients: int) -> Iterator[Callable[[Contender, float], float]]:
    """Yield a function that measures the cycles a second of many clients, which stay for all rounds."""
    with ExitStack() as stack:
        racers: dict[str, Client] = {}

        def rate(contender: Contender, seconds: float) -> float:
            if contender.name not in racers:
                racers[contender.name] = stack.enter_context(run.client(contender))
            order = {"clients": clients, "seconds": seconds, "warm_up_s": contender.warm_up_s}
            return float(racers[contender.name].ask("rate", **order)["rate"])

        yield rate


def cycles(clients: Clients, contender: Contender, seconds: float) -> list[float]:
    """Return the seconds of each cycle of one client, which cycles for this long."""
    return [float(time_s) for time_s in clients.of(contender, "alone").ask("cycles", seconds=seconds)["times_s"]]


def hand_overs(clients: Clients, contender: Contender, number: int) -> list[float]:
    """Return the seconds from before each release until the next client, which waits in another process, runs."""
    if not contender.has_queue:
        return starts(clients, contender, number)
    found = []
    one, other = clients.of(contender, "holder"), clients.of(contender, "waiter")
    for _ in range(number):
        one.ask("take")
        time.sleep(contender.shows_s)
        other.tell("take")
        # At a random moment, so that a waiter that polls is not always met at the same point.
        time.sleep(SETTLE_S + random.uniform(0, contender.poll_s))
        began = one.ask("release")["began"]
        found.append(other.answer()["at"] - began)
        other.ask("release")
    return found


def reclaims(clients: Clients, contender: Contender, number: int, longest_s: float) -> list[float]:
    """Return the seconds from before each `kill -9` of the holder until the next client runs.

    Raises TimeoutError if that takes too long.
    """
    if not contender.has_queue:
        return starts(clients, contender, number)
    found = []
    waiter = clients.of(contender, "waiter")
    for _ in range(number):
        holder = clients.of(contender, "holder")
        pid = holder.ask("take")["pid"]
        time.sleep(contender.shows_s)
        waiter.tell("take")
        time.sleep(SETTLE_S + random.uniform(0, contender.poll_s))
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if pid == holder.pid:
            clients.forget(contender, "holder")
        found.append(waiter.answer(longest_s)["at"] - began)
        waiter.ask("release")
    return found


def starts(clients: Clients, contender: Contender, number: int) -> list[float]:
    """Return the seconds until each holder runs, of a contender that has no queue."""
    found = []
    client = clients.of(contender, "holder")
    for _ in range(number):
        began = time.monotonic()
        found.append(client.ask("take")["at"] - began)
        client.ask("release")
    return found


def crowd(run: Running, contender: Contender, clients: int, seconds: float) -> tuple[Verdict, float]:
    """Let clients ask, hold for a moment and release. Returns the verdict, and the megabytes of the server meanwhile."""
    folder = run.folder / f"{contender.name}-witnesses"
    folder.mkdir()
    with run.client(contender) as client:
        order = {"clients": clients, "seconds": seconds, "folder": str(folder), "hold_s": WORKLOAD_HOLD_S}
        client.tell("crowd", has_victim=True, **order)
        time.sleep(seconds / 3)
        weight_mb = memory_mb(run.servers[contender.server].pids)
        rows = client.answer(seconds + ANSWER_S)["rows"]
    run.servers[contender.server].clear()
    return judge(rows, min(BEGINNING_S, seconds / 4)), weight_mb


def own_order_told(run: Running) -> str:
    """Say in a sentence what our own journal shows of the order; empty if our server does not run."""
    if "ours, full" not in run.servers:
        return ""
    (journal,) = (run.folder / f"ours, full-{run.gpus}").glob("*.sqlite3")
    grants, wrong = out_of_order(journal)
    return f" Our own journal, where lateness does not show, still has {grants:,} grants to requests that waited, {wrong:,} of them out of the order of arrival."
