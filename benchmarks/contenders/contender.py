"""The common interface of all contenders, ours included.

The module of a contender has a function `serve(folder, gpus)` that runs its server side, and yields a `Serving`. Where clients can hold
a GPU by it, the module also has a `TAKERS` table: the client of each variant, which takes a GPU and releases it. These clients run
in processes of their own (client.py), with the interpreter of the contender, so a module imports its library late. Where it can run
commands, its `Serving` has a `Queue`. A contender that is not installed raises MissingError.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

Settings: TypeAlias = Mapping[str, Any]
Command: TypeAlias = Sequence[str]


@dataclass(frozen=True)
class Held:
    """A GPU that was taken: since when, by which process, and what is needed to release it."""

    at: float
    pid: int
    what: Any


class Taker(Protocol):
    """One client, used by one thread of the process that made it."""

    def take(self) -> Held:
        """Wait until it holds a GPU."""
        ...

    def release(self, held: Held) -> None: ...

    def cycle(self) -> None:
        """Take a GPU and release it at once, as a user of this contender would."""
        ...


class Queue(Protocol):
    """Runs commands on the GPUs, each on one of them."""

    def run_one(self, command: Command) -> None:
        """Run a command as a user does at a prompt, and return when it has ended. RuntimeError if it failed."""
        ...

    def run_all(self, commands: Sequence[Command]) -> None:
        """Hand in all commands and return when all have ended. RuntimeError if one failed."""
        ...

    def line_up(self, commands: Sequence[Command]) -> Callable[[], None]:
        """Hand in the commands one by one. Return when the first runs and all others wait; the result waits for their end."""
        ...


@dataclass(frozen=True)
class Serving:
    """A server side that is ready: what its clients need, and their interpreter with what comes before it."""

    settings: Settings
    python: Sequence[str] = (sys.executable,)
    env: Mapping[str, str] = field(default_factory=dict)
    queue: Queue | None = None
    # Clients of Ray and Dask are threads of one driver, because the processes that hold GPUs are theirs.
    has_threads: bool = False


@contextmanager
def serving(name: str, folder: Path, gpus: int) -> Iterator[Serving]:
    """Run the server side of the contender with this name."""
    folder.mkdir()
    with importlib.import_module(f"benchmarks.contenders.{name}").serve(folder, gpus) as found:
        yield found


def taker(name: str, variant: str, settings: Settings) -> Taker:
    """Make a client."""
    made: Taker = importlib.import_module(f"benchmarks.contenders.{name}").TAKERS[variant](settings)
    return made


def finished(processes: Sequence[subprocess.Popen[bytes]], limit_s: float = 120.0) -> None:
    """Wait for processes. RuntimeError if one has failed."""
    for process in processes:
        if code := process.wait(limit_s):
            raise RuntimeError(f"{process.args!r} has failed with exit code {code}")
