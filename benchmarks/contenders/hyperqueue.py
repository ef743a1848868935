"""HyperQueue as its wheel brings it: a `LocalCluster`, which is a server and a worker in one process.

The wheel has no `hq` program, and its worker can be told its number of cores and no other resource. So a core of the
worker stands for a GPU. HyperQueue hands out both in the same way, and tells a task in HQ_CPUS which core it has.

    python -m benchmarks.contenders.hyperqueue FOLDER GPUS      # run such a cluster, until it is ended
"""

from __future__ import annotations

import importlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import peers
from benchmarks.contenders import namespaces
from benchmarks.contenders.processes import wait_until
from benchmarks.contenders.servers import Serving

READY = "The cluster is ready."


@contextmanager
def serve(folder: Path, gpus: int) -> Iterator[Serving]:
    """Run a cluster in a network namespace of its own."""
    python = str(peers.python_with("hyperqueue"))
    folder.mkdir()
    log = folder / "log"
    with tempfile.TemporaryDirectory(prefix="hq-", ignore_cleanup_errors=True) as name:
        command = [python, "-m", __name__, name, str(gpus)]
        began = time.monotonic()
        # Its worker makes a folder for temporary files, and leaves it.
        with namespaces.running_alone(command, log, {"TMPDIR": name}) as (pid, joined):
            wait_until(lambda: READY in log.read_text(encoding="utf-8", errors="replace"), log)
            settings = {"folder": name, "python": python}
            yield Serving(settings, time.monotonic() - began, [pid], [*joined, python])


def main() -> None:
    cluster = importlib.import_module("hyperqueue.cluster")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with cluster.LocalCluster(sys.argv[1], cluster.WorkerConfig(cores=int(sys.argv[2]))):
        print(READY, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
