"""How fast a GPU passes from one client to the next, beside what people would use instead.

- release to the next waiter in another process, with one GPU
- `kill -9` of the holder to the next waiter
- request + release of one client; 64 clients on 8 GPUs

Ours is the blocking Python client at full durability. All contenders take turns in each round.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

from benchmarks.contenders.client import Client
from benchmarks.contenders.contender import Serving, serving
from benchmarks.figures import Results, compare, in_turn, parser
from benchmarks.peers import MissingError
from benchmarks.processes import QUEUED_S

OURS = "ours"
CROWD_CLIENTS, CROWD_GPUS = 64, 8


class Entry(NamedTuple):
    """A contender as it is shown, its module, and its variant."""

    shown: str
    module: str
    variant: str = ""
    # It starts a process for each grant, or starts it late, so it is measured once in a round.
    is_slow: bool = False


# By the ending of the ids of its figures.
FIELD = {
    OURS: Entry("ours", "pool"),
    "hyperqueue": Entry("HyperQueue", "hyperqueue", is_slow=True),
    "slurm": Entry("Slurm, srun", "slurm", is_slow=True),
    "ray": Entry("Ray", "ray", is_slow=True),
    "ray_reused": Entry("Ray, processes reused", "ray", "reused"),
    "dask": Entry("Dask", "dask"),
}
Servers: TypeAlias = dict[str, Serving]


@contextmanager
def servers(modules: Iterable[str], gpus: int, results: Results) -> Iterator[Servers]:
    """Run the server sides. One that cannot run is left out, with the reason."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        found: Servers = {}
        for module in dict.fromkeys(modules):
            try:
                found[module] = held.enter_context(serving(module, folder / module, gpus))
            except (MissingError, OSError, RuntimeError) as error:
                results.leave_out(module, str(error))
        yield found


class Pair:
    """A holder and a waiter of one contender, each a process."""

    def __init__(self, entry: Entry, served: Serving, held: ExitStack) -> None:
        self._entry = entry
        self._served = served
        self._held = held
        self._holder, self._waiter = self._client(), self._client()

    def _client(self) -> Client:
        client = Client(self._entry.module, self._entry.variant, self._served)
        self._held.callback(client.close)
        # So that it is loaded and connected.
        client.ask("take")
        client.ask("release")
        return client

    def hand_over(self, times: int) -> float:
        """Return the seconds from the beginning of a release until the next client runs, the median."""
        return self._pass_on(times, lambda _: float(self._holder.ask("release")))

    def killed(self, times: int) -> float:
        """Return the seconds from `kill -9` of the process that holds the GPU until the next client runs, the median."""
        return self._pass_on(times, self._kill)

    def cycle(self, times: int) -> float:
        """Return the seconds of a request and its release, the median."""
        return float(statistics.median(self._holder.ask("cycles", times)))

    def _pass_on(self, times: int, end: Callable[[int], float]) -> float:
        taken = []
        for _ in range(times):
            _, pid = self._holder.ask("take")
            self._waiter.tell("take")
            time.sleep(QUEUED_S)
            began = end(pid)
            taken.append(float(self._waiter.hear()[0]) - began)
            self._waiter.ask("release")
            if pid == self._holder.pid and not self._holder.is_alive:
                self._holder = self._client()
        return statistics.median(taken)

    def _kill(self, pid: int) -> float:
        """Kill the process that holds the GPU: our client itself, or a process that the contender has started for it."""
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if pid != self._holder.pid:
            self._holder.ask("forget")
        return began


def measure_pairs(results: Results, ids: Iterable[str], times: int, rounds: int) -> None:
    """Measure hand-over, kill -9 and the cycle of one client, with one GPU."""
    entries = {name: FIELD[name] for name in (OURS, *ids)}
    with servers((entry.module for entry in entries.values()), 1, results) as found, ExitStack() as held:
        entries = {name: entry for name, entry in entries.items() if entry.module in found}
        pairs: dict[str, Pair] = {}
        for name, entry in entries.items():
            try:
                pairs[name] = Pair(entry, found[entry.module], held)
            except (OSError, RuntimeError) as error:
                results.leave_out(entry.shown, str(error))
        for what, wanted in (
            ("hand_over", tuple(pairs)),
            ("killed", tuple(name for name in pairs if name != "dask")),
            ("cycle", (OURS, "ray_reused", "dask")),
        ):
            measures = {
                name: (lambda pair=pairs[name], often=1 if FIELD[name].is_slow else times: getattr(pair, what)(often))  # noqa: B023
                for name in wanted
                if name in pairs
            }
            add(results, what, in_turn(measures, rounds), "s")


def measure_crowd(results: Results, warm_up_s: float, seconds: float, rounds: int) -> None:
    """Measure many clients at once."""
    ids = (OURS, "ray_reused")
    with servers((FIELD[name].module for name in ids), CROWD_GPUS, results) as found:

        def crowd(name: str) -> float:
            entry = FIELD[name]
            served = found[entry.module]
            with Client(entry.module, entry.variant, served) as client:
                order = ("crowd", served.has_threads, CROWD_CLIENTS, warm_up_s, seconds)
                return float(client.ask(*order, limit_s=120.0))

        measures = {name: lambda name=name: crowd(name) for name in ids if FIELD[name].module in found}
        add(results, "crowd", in_turn(measures, rounds), "a second")


def add(results: Results, what: str, found: dict[str, list[float]], unit: str) -> None:
    """Add the figures that compare ours with each other contender that was measured."""
    for name, values in found.items():
        if name != OURS and OURS in found:
            results.add(f"{what}_{name}", compare(found[OURS], values, unit, FIELD[name].shown))


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--only", action="append", choices=[name for name in FIELD if name != OURS])
    options = options_of.parse_args()
    ids = options.only or [name for name in FIELD if name != OURS]
    results = Results("contenders")
    times, rounds = (2, 1) if options.quick else (15, 5)
    measure_pairs(results, ids, times, rounds)
    if "ray_reused" in ids:
        warm_up_s, seconds, rounds = (1.0, 0.5, 1) if options.quick else (6.0, 3.0, 3)
        measure_crowd(results, warm_up_s, seconds, rounds)
    results.finish(options)


if __name__ == "__main__":
    main()
