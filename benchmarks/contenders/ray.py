"""Ray: one node without its dashboard, and tasks with `num_gpus=1`. A driver asks; the process that holds the GPU is Ray's.

By default Ray ends the process of a task that had a GPU. The variant `reused` lets it use the process again (`max_calls=0`).
"""

from __future__ import annotations

import importlib
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.contenders.contender import Held, Serving, Settings
from benchmarks.contenders.desk import Desk, report_and_hold
from benchmarks.contenders.namespaces import running_apart
from benchmarks.processes import wait_until

OBJECT_STORE_BYTES = 100_000_000
PORT = 6399  # in a network namespace of its own
# Unless it is told, a head asks for a token if it finds one in the user's home. No other machine or user reaches this one.
ENV = {"RAY_AUTH_MODE": "disabled"}

_connecting = threading.Lock()
_desks = count()
_libraries: list[Any] = []


def connect() -> Any:
    """Connect to Ray, once in a driver; its threads share the connection."""
    with _connecting:
        if not _libraries:
            library = importlib.import_module("ray")
            library.init(address=f"127.0.0.1:{PORT}", log_to_driver=False, logging_level="error")
            _libraries.append(library)
    return _libraries[0]


def nothing() -> None:
    """The shortest task."""


class RayTaker:
    """A task for each use of a GPU."""

    def __init__(self, settings: Settings, **options: Any) -> None:
        self._ray = connect()
        # By default a task asks for a CPU as well; here it must wait only for a GPU.
        remote = self._ray.remote(num_gpus=1, num_cpus=0, max_retries=0, **options)
        self._nothing, self._report = remote(nothing), remote(report_and_hold)
        self._desk = Desk(f"{settings['folder']}/{os.getpid()}-{next(_desks)}")

    def take(self) -> Held:
        # The task is referred to until the GPU is released, else Ray may end it.
        self._task = self._report.remote(self._desk.path)
        return Held(*self._desk.wait())

    def release(self, held: Held) -> None:
        held.what.close()

    def cycle(self) -> None:
        """Submit a task and wait for its answer, as a user of Ray does."""
        self._ray.get(self._nothing.remote())


@contextmanager
def serve(folder: Path, gpus: int) -> Iterator[Serving]:
    """Run a node in a network namespace of its own."""
    python = peers.python_with("ray")
    log = folder / "log"
    # Its sockets have long names, and the path of a socket must not be longer than 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        command: list[str | Path] = [
            *(python.with_name("ray"), "start", "--head", "--block", f"--port={PORT}", f"--num-gpus={gpus}"),
            # Ray starts no more processes at a time than this, so a grant must not wait for the number of processors.
            f"--num-cpus={gpus}",
            *("--include-dashboard=false", "--include-log-monitor=false", "--disable-usage-stats"),
            *(f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={name}"),
        ]
        with running_apart(command, log, ENV) as joined:
            wait_until(lambda: "Ray runtime started" in log.read_text(errors="replace"), "Ray is ready", 60.0)
            yield Serving({"folder": name}, [*joined, str(python)], ENV, has_threads=True)


TAKERS = {"": RayTaker, "reused": partial(RayTaker, max_calls=0)}
