"""Dask's `LocalCluster`: a scheduler, and a worker process for each GPU, which has one unit of the resource GPU.

python -m benchmarks.contenders.dask GPUS      # run such a cluster, until it is ended
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.contenders.contender import Held, Serving, Settings
from benchmarks.contenders.desk import Desk, report_and_hold
from benchmarks.processes import running, wait_until

READY = "The cluster is ready at "
WAIT_S = 60.0


def nothing() -> None:
    """The shortest task."""


class DaskTaker:
    """A task for each use of a GPU."""

    def __init__(self, settings: Settings) -> None:
        self._client = importlib.import_module("distributed").Client(settings["address"], set_as_default=False)
        self._desk = Desk(f"{settings['folder']}/{os.getpid()}")

    def take(self) -> Held:
        # A task ends when its result is no longer referred to.
        self._task = self._submit(report_and_hold, self._desk.path)
        return Held(*self._desk.wait())

    def release(self, held: Held) -> None:
        held.what.close()

    def cycle(self) -> None:
        """Submit a task and wait for its result, as a user of Dask does."""
        self._submit(nothing).result(timeout=WAIT_S)

    def _submit(self, task: Callable[..., None], *arguments: str) -> Any:
        return self._client.submit(task, *arguments, resources={"GPU": 1}, pure=False)


@contextmanager
def serve(folder: Path, gpus: int) -> Iterator[Serving]:
    """Run a cluster on loopback."""
    python = str(peers.python_with("distributed"))
    log = folder / "log"
    # The path of a socket must not be longer than 107 characters.
    with (
        tempfile.TemporaryDirectory(prefix="dask-", dir="/tmp", ignore_cleanup_errors=True) as name,
        running([python, "-m", __name__, str(gpus)], log, {"TMPDIR": name}),
    ):

        def address() -> str:
            said = log.read_text(encoding="utf-8", errors="replace").partition(READY)[2]
            return said.partition("\n")[0] if "\n" in said else ""

        wait_until(lambda: bool(address()), "Dask is ready")
        yield Serving({"address": address(), "folder": name}, [python], has_threads=True)


def main() -> None:
    # SIGTERM ends this program with an exception, so that its workers are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    cluster = importlib.import_module("distributed").LocalCluster(
        n_workers=int(sys.argv[1]),
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        memory_limit=0,
        resources={"GPU": 1},
    )
    with cluster:
        print(READY + cluster.scheduler_address, flush=True)
        signal.pause()


TAKERS = {"": DaskTaker}

if __name__ == "__main__":
    main()
