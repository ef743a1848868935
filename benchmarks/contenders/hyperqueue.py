"""HyperQueue: a `LocalCluster` of its wheel, which is a server and a worker in one process.

The wheel has no `hq` program, and its worker takes a number of cores and no other resource, so a core stands for a GPU.

    python -m benchmarks.contenders.hyperqueue FOLDER CORES      # run such a cluster, and commands as a client tells it
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.contenders.contender import Command, Held, Serving, Settings
from benchmarks.contenders.desk import Desk
from benchmarks.contenders.namespaces import running_apart
from benchmarks.processes import Child, environment, keep_answers_apart, orders, say, wait_until

READY = "The cluster is ready."
SWEEP_S = 180.0


class HyperQueueTaker:
    """A job of one task for each use of a GPU, by the Python API."""

    def __init__(self, settings: Settings) -> None:
        self._library = importlib.import_module("hyperqueue")
        self._folder = settings["folder"]
        self._client = self._library.Client(self._folder)
        self._desk = Desk(f"{self._folder}/{os.getpid()}")

    def take(self) -> Held:
        submit(self._library, self._client, self._folder, [self._desk.command])
        return Held(*self._desk.wait())

    def release(self, held: Held) -> None:
        held.what.close()

    def cycle(self) -> None:
        self.release(self.take())


class HyperQueueQueue:
    """Commands as tasks of one job. A client in a process of its own submits them."""

    def __init__(self, client: Child) -> None:
        self._client = client

    def run_one(self, command: Command) -> None:
        self.run_all([command])

    def run_all(self, commands: Sequence[Command]) -> None:
        self.line_up(commands)()

    def line_up(self, commands: Sequence[Command]) -> Callable[[], None]:
        self._client.ask(list(commands))
        return lambda: self._client.hear(SWEEP_S)


@contextmanager
def serve(folder: Path, gpus: int) -> Iterator[Serving]:
    """Run a cluster in a network namespace of its own."""
    python = str(peers.python_with("hyperqueue"))
    log = folder / "log"
    with (
        tempfile.TemporaryDirectory(prefix="hq-", ignore_cleanup_errors=True) as name,
        # Its worker makes a folder for temporary files, and leaves it.
        running_apart([python, "-m", __name__, name, str(gpus)], log, {"TMPDIR": name}) as joined,
    ):
        wait_until(lambda: READY in log.read_text(encoding="utf-8", errors="replace"), "HyperQueue is ready")
        with Child([*joined, python, "-m", __name__, name], environment()) as client:
            yield Serving({"folder": name}, [*joined, python], queue=HyperQueueQueue(client))


def submit(library: Any, client: Any, folder: str, commands: Sequence[Command], over: Path | None = None) -> None:
    """Submit a job with a task for each command, whose output is not kept. When all have ended well, the file `over` is made."""
    job = library.Job(default_workdir=folder)
    tasks = [job.program(list(command), stdout=None, stderr=None) for command in commands]
    if over is not None:
        job.program(["touch", str(over)], stdout=None, stderr=None, deps=tasks)
    client.submit(job)


def run_cluster(folder: str, cores: int) -> None:
    cluster = importlib.import_module("hyperqueue.cluster")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with cluster.LocalCluster(folder, cluster.WorkerConfig(cores=cores)):
        print(READY, flush=True)
        signal.pause()


def run_client(folder: str) -> None:
    """Submit the commands of each order; say when they are submitted, and when they have ended."""
    keep_answers_apart()
    library = importlib.import_module("hyperqueue")
    client = library.Client(folder)
    for number, (commands,) in enumerate(orders()):
        # Its own `wait_for_jobs` asks only once a second.
        over = Path(folder) / f"over-{number}"
        submit(library, client, folder, commands, over)
        say("submitted")
        wait_until(over.exists, "the job has ended well", SWEEP_S)
        say("ended")


TAKERS = {"": HyperQueueTaker}

if __name__ == "__main__":
    if len(sys.argv) > 2:
        run_cluster(sys.argv[1], int(sys.argv[2]))
    else:
        run_client(sys.argv[1])
