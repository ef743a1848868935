"""Where the time of a lease goes, step by step: the next profile is one command.

    python -m benchmarks.steps          # the table
    python -m benchmarks.steps serve    # run by it: a server whose functions are timed; SIGUSR1 writes what was measured

The server is a real one, in a process of its own. Its functions are wrapped from outside, so the product has no timers. A
step has the time between its calls and returns without that of the steps inside it. One client asks at a time: then what
the server does between the arrival of a request and the end of its answer is that request's. The wrapping costs a little,
about as much for each step.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.leases.locks import PoolLease, cycle_s
from benchmarks.shared.results import Cell, Results, duration, parser
from gpu_worker_pool.testing import ServerProcess

FILE = "STEPS_FILE"
GPUS = 8
WAIT_S = 30.0
CALLS = {"PUT": "request", "DELE": "release"}
TO_WRITER, FROM_WRITER = "hand over to the writer's thread", "hand over to the event loop's thread"
SHOWN = "show what happened, after the answer"
READINGS = "readings of GPUs (part of no call)"
REST, WHOLE_CALL = "the rest: the event loop", "total, in the server"
OUTSIDE = "outside of the server: the client, the network, both being woken"
# The functions of each step, where they are looked up when they are called.
STEPS: dict[str, tuple[str, ...]] = {
    "read from the socket": ("server.http.protocol:BoundedProtocol.data_received",),
    "access check": ("server.http.call:Call.caller", "server.routes.leases:may_manage"),
    "body and query": (
        "server.http.pool_route:read_query", "server.http.pool_route:read_form", "server.routes.leases:to_request",
    ),
    "the holder's process": ("server.authority.pool:Pool.local_process", "server.authority.own_box:OwnBox.is_alive"),
    "decision": ("ledger.driver:step",),
    "driver around it: budget, live time, batch": ("ledger.driver:Driver._carry_out", "ledger.driver:Driver._end_turn"),
    "effects before the commit": ("server.authority.own_box:OwnBox._follow_early",),
    "events as rows, with checksums": ("ledger.sqlite.journal:event_rows", "ledger.sqlite.journal:ended_row"),
    "journal: SQLite, checks of its files, high-water mark": ("ledger.sqlite.journal:SqliteJournal.append",),
    "tell listeners and callers": ("ledger.outbox:Outbox._done",),
    "make the answer": ("server.routes.leases:lease_view", "server.routes.leases:outcome_view"),
    "encode the answer": ("server.http.pool_route:encode",),
    SHOWN: ("ledger.driver:Driver._tell_late",),
    READINGS: ("server.authority.pool:Pool._observe",),
}  # fmt: skip
ALL = (*(step for step in STEPS if step not in {SHOWN, READINGS}), TO_WRITER, FROM_WRITER, WHOLE_CALL)


@dataclass(frozen=True)
class Effort:
    rounds: int
    cycles: int


QUICK, WHOLE = Effort(rounds=2, cycles=20), Effort(rounds=80, cycles=20)


class Stopwatch:
    """The seconds of each step of each kind of call."""

    def __init__(self) -> None:
        self.spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.calls: Counter[str] = Counter()
        self._kind = ""
        self._own = threading.local()
        self._began = self._handed = 0.0

    def time(self, function: Callable[..., Any], step: str) -> Callable[..., Any]:
        """The function, whose time counts for this step."""

        def timed(*args: Any, **options: Any) -> Any:
            self._switch(step)
            try:
                return function(*args, **options)
            finally:
                self._switch(None)

        return timed

    def _switch(self, step: str | None) -> None:
        """Begin a step, or end the last one that began; the time until now was that of the step that is current."""
        now, own = time.perf_counter(), self._own
        stack: list[str] = own.__dict__.setdefault("stack", [])
        if stack:
            self.spent[self._kind][stack[-1]] += now - own.since
        own.since = now
        if step is None:
            stack.pop()
        else:
            stack.append(step)

    def arrived(self, data: bytes) -> None:
        kind = CALLS.get(data[:4].decode("latin-1").strip())
        if kind is not None:
            self._kind, self._began = kind, time.perf_counter()

    def answered(self) -> None:
        self.calls[self._kind] += 1
        self.spent[self._kind][WHOLE_CALL] += time.perf_counter() - self._began

    def hand(self) -> None:
        self._handed = time.perf_counter()

    def take(self, step: str) -> None:
        self.spent[self._kind][step] += time.perf_counter() - self._handed

    def write(self, file: Path) -> None:
        """Write what was measured, and begin again."""
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"calls": self.calls, "spent": self.spent}), encoding="utf-8")
        self.calls.clear()
        self.spent.clear()
        new.rename(file)


def wrap(place: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of the package."""
    module, _, path = place.partition(":")
    owner: Any = import_module(f"gpu_worker_pool.{module}")
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    setattr(owner, name, around(getattr(owner, name)))


def before(note: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **options: Any) -> Any:
        note(*args)
        return function(*args, **options)

    return noted


def after(note: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        note()
        return found

    return noted


def serve() -> None:
    """Run a server whose functions are timed."""
    watch = Stopwatch()
    for step, places in STEPS.items():
        for place in places:
            wrap(place, lambda function, step=step: watch.time(function, step))  # type: ignore[misc]
    # Outside of the steps: these are moments.
    wrap("server.http.protocol:BoundedProtocol.data_received", lambda f: before(lambda _, data: watch.arrived(data), f))
    wrap("server.http.protocol:BoundedProtocol.on_response_complete", lambda f: after(watch.answered, f))
    wrap("ledger.outbox:WriterThread.write", lambda f: before(lambda *_: watch.hand(), f))
    wrap("ledger.outbox:write", lambda f: before(lambda *_: watch.take(TO_WRITER), after(watch.hand, f)))
    wrap("ledger.outbox:Outbox._done", lambda f: before(lambda *_: watch.take(FROM_WRITER), f))
    signal.signal(signal.SIGUSR1, lambda *_: watch.write(Path(os.environ[FILE])))
    runpy.run_module("gpu_worker_pool.testing", run_name="__main__", alter_sys=True)


class TimedServer:
    """A server whose functions are timed, and a client of it."""

    def __init__(self, folder: Path, durability: str) -> None:
        self._file = folder / "steps.json"
        settings = {"SIMULATED_GPUS": str(GPUS), "REFRESH_INTERVAL": "1", "GPU_POOL_DURABILITY": durability}
        quiet = {"LOG_LEVEL": "warning", "ACCESS_LOG": "false", FILE: str(self._file)}
        command = (sys.executable, "-m", "benchmarks.steps", "serve")
        self._server = ServerProcess({**settings, **quiet}, folder=folder, command=command)
        self._server.env["PYTHONPATH"] = str(Path(__file__).parents[1])
        self._server.start()
        self._lease = PoolLease(self._server.port)

    def measure(self, cycles: int) -> dict[str, dict[str, float]]:
        """The seconds of each step of a call, by kind of call: the means over so many cycles."""
        self._read()
        began = time.perf_counter()
        cycle_s(self._lease, cycles)
        took_s = time.perf_counter() - began
        found = self._read()
        spent = {
            kind: {step: found["spent"][kind].get(step, 0.0) / number for step in ALL}
            for kind, number in found["calls"].items()
        }
        own = sum(steps[WHOLE_CALL] for steps in spent.values())
        for steps in spent.values():
            steps[REST] = 2 * steps[WHOLE_CALL] - sum(steps.values())
            steps[OUTSIDE] = (took_s / cycles - own) / len(spent)
        return spent

    def _read(self) -> Any:
        self._file.unlink(missing_ok=True)
        os.kill(self._server.pid, signal.SIGUSR1)
        until = time.monotonic() + WAIT_S
        while not self._file.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"the server wrote nothing:\n{self._server.log()}")
            time.sleep(0.001)
        return json.loads(self._file.read_text(encoding="utf-8"))

    def close(self) -> None:
        self._lease.close()
        self._server.close()


def show_steps(results: Results, durability: str, found: list[dict[str, dict[str, float]]]) -> None:
    kinds = list(CALLS.values())

    def median_s(kind: str, step: str) -> float:
        return statistics.median(each[kind][step] for each in found)

    whole_s = sum(median_s(kind, WHOLE_CALL) for kind in kinds)
    rows: list[list[Cell]] = []
    for step in (*ALL[:-1], REST, WHOLE_CALL, OUTSIDE):
        both_s = [median_s(kind, step) for kind in kinds]
        rows.append([step, *map(duration, both_s), f"{100 * sum(both_s) / whole_s:.0f} %"])
    results.table(
        f"One client, {GPUS} GPUs, journal at `{durability}`: medians of {len(found)} rounds",
        ["", *kinds, "share"],
        rows,
        note="A share is that of the time in the server. A hand-over ends when the other thread has the processor; where both "
        "threads work at once, the time counts twice, and the rest is less.",
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("role", nargs="?", choices=("measure", "serve"), default="measure", help="what to do")
    options = made.parse_args()
    if options.role == "serve":
        serve()
        return
    effort = QUICK if options.quick else WHOLE
    results = Results("steps", "Where the time of a lease goes inside the server, step by step.")
    with tempfile.TemporaryDirectory(prefix="steps-") as folder:
        for durability in ("normal", "full"):
            place = Path(folder) / durability
            place.mkdir()
            with closing(TimedServer(place, durability)) as server:
                show_steps(results, durability, [server.measure(effort.cycles) for _ in range(effort.rounds)])
    results.finish(options)


if __name__ == "__main__":
    main()
