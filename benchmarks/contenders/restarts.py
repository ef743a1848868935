"""What a restart costs: a server is killed while one client holds the only GPU and another waits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.contenders.field import Contender, Pace
from benchmarks.contenders.measures import Clients, Failed, Running, Trouble
from benchmarks.contenders.processes import Client
from benchmarks.shared.results import Cell, Results, duration

# A server that writes its state now and then must have had the time to do so: Slurm's does so within 5 s.
SETTLE_S: Mapping[Pace, float] = {"fast": 0.2, "looks": 0.2, "slow": 6.0}
# For how long the run looks whether the GPU is granted while it is held.
WATCH_S = 1.0
SERVED_S = 15.0
# Why some servers are not restarted, by their documentation.
LEFT_OUT = {
    "hyperqueue": "the server of its wheel keeps no journal, and is in one process with its worker",
    "dask": "its tasks are in the memory of its scheduler",
    "ray": "by default everything ends with its head node",
    "postgres": "its locks end with the sessions of their holders",
    "scheduler": "its queue is its standard input",
}


@dataclass(frozen=True)
class Restart:
    """What was seen of one restart."""

    ready_s: float
    # Whether the process that holds the GPU still runs.
    holder_lives: bool
    # Whether the waiter was granted the GPU while it was held.
    is_granted_twice: bool
    # From the release until the waiter runs, or why it does not.
    served: float | str


def restart(run: Running, clients: Clients, contender: Contender) -> Restart:
    """Kill the server of a contender and start it again, with a holder and a waiter."""
    again = run.servers[contender.server].restart
    assert again is not None
    holder, waiter = clients.of(contender, "holder"), clients.of(contender, "waiter")
    pid = holder.ask("take")["pid"]
    waiter.tell("take")
    time.sleep(SETTLE_S[contender.pace])
    began = time.monotonic()
    again()
    ready_s = time.monotonic() - began
    granted, why = answer_of(waiter, WATCH_S)
    runs_on = lives(pid)
    if granted is not None:
        return Restart(ready_s, runs_on, runs_on, "it already runs")
    try:
        released = holder.ask("release")["began"]
    except Trouble:
        return Restart(ready_s, runs_on, is_granted_twice=False, served="the holder could not release")
    if not why:
        granted, why = answer_of(waiter, SERVED_S)
    return Restart(ready_s, runs_on, is_granted_twice=False, served=why if granted is None else granted - released)


def table(
    results: Results, run: Running, clients: Clients, contenders: Iterable[Contender], failed: Failed
) -> dict[str, str]:
    """Restart each server that can be restarted, add a table, and return what was seen in words, by contender."""
    rows: list[list[Cell]] = []
    told: dict[str, str] = {}
    # One contender for each server, because a server may have lost what its other contenders need.
    firsts = {contender.server: contender for contender in reversed(list(contenders))}
    for contender in reversed(firsts.values()):
        if run.servers[contender.server].restart is None:
            if contender.server in LEFT_OUT:
                results.skip(f"{contender.name}, restart", LEFT_OUT[contender.server])
            continue
        began = time.monotonic()
        try:
            seen = restart(run, clients, contender)
        except Trouble as trouble:
            failed(contender, str(trouble), time.monotonic() - began)
            continue
        served = seen.served if isinstance(seen.served, str) else duration(seen.served)
        row = [duration(seen.ready_s), _yes(seen.holder_lives), _yes(seen.is_granted_twice), served]
        rows.append([contender.name, *row])
        kept = not seen.is_granted_twice and not isinstance(seen.served, str)
        told[contender.name] = "holder and waiter kept" if kept else "not kept"
    results.table(
        "kill -9 of the server and a restart, with 1 GPU, a holder and a waiter",
        ["", "ready again after", "the holder runs on", "its GPU is granted meanwhile", "the waiter is served after the release"],
        rows,
        note=f"The server is killed {SETTLE_S['fast']:g} s after the waiter has asked, and started with what it has kept. Redis has its default settings. With Slurm, it is slurmctld, which is killed after {SETTLE_S['slow']:g} s, because it saves its state now and then.",
        is_headline=True,
    )  # fmt: skip
    return told


def answer_of(client: Client, timeout_s: float) -> tuple[float | None, str]:
    """Return when a waiter was granted its GPU, or None and why it was not; the reason is empty if it still waits."""
    try:
        return float(client.answer(timeout_s)["at"]), ""
    except TimeoutError:
        return None, "" if timeout_s == WATCH_S else f"not within {timeout_s:g} s"
    except Trouble:
        return None, "its client has failed"


def lives(pid: int) -> bool:
    """Whether this process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _yes(is_so: bool) -> str:  # noqa: FBT001 - the only argument
    return "yes" if is_so else "no"
