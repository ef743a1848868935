"""Dask's `LocalCluster`: a scheduler, and a worker process for each GPU, which has one unit of the resource GPU.

python -m benchmarks.contenders.dask GPUS      # run such a cluster, until it is ended
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import peers
from benchmarks.contenders.processes import running, wait_until
from benchmarks.contenders.servers import Serving

# Its scheduler must not take workers that were stopped for dead.
PATIENT = {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "None"}
READY = "The cluster is ready at "
AWAKE = "The cluster is awake."
WAKE_S = 20.0


@contextmanager
def serve(folder: Path, gpus: int) -> Iterator[Serving]:
    """Run a cluster on loopback. It is stopped while other contenders are measured: its idle workers use the processor."""
    python = str(peers.python_with("distributed"))
    folder.mkdir()
    log = folder / "log"

    def said() -> str:
        return log.read_text(encoding="utf-8", errors="replace")

    # The path of a socket must not be longer than 107 characters.
    with tempfile.TemporaryDirectory(prefix="dask-", dir="/tmp", ignore_cleanup_errors=True) as name:
        began = time.monotonic()
        orders, asks = os.pipe()
        command = [python, "-m", __name__, str(gpus)]
        with (
            os.fdopen(orders, "rb") as orders_file,
            os.fdopen(asks, "wb", buffering=0) as asks_file,
            running(command, log, {**PATIENT, "TMPDIR": name}, stdin=orders_file) as pid,
        ):
            wait_until(lambda: READY in said() and said().endswith("\n"), log)
            settings = {"address": said().partition(READY)[2].split()[0], "folder": name}
            ready_s = time.monotonic() - began

            @contextmanager
            def awake() -> Iterator[None]:
                tasks = said().count(AWAKE)
                os.killpg(pid, signal.SIGCONT)
                try:
                    # One task that is not timed: after the pause, its processes first catch up with what they have missed.
                    asks_file.write(b"\n")
                    wait_until(lambda: said().count(AWAKE) > tasks, log)
                    yield
                finally:
                    os.killpg(pid, signal.SIGSTOP)

            os.killpg(pid, signal.SIGSTOP)
            try:
                yield Serving(settings, ready_s, [pid], [python], awake=awake)
            finally:
                # Those that were stopped would take long to end by themselves.
                os.killpg(pid, signal.SIGKILL)


def main() -> None:
    # SIGTERM ends this program with an exception, so that its workers are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    library = importlib.import_module("distributed")
    cluster = library.LocalCluster(
        n_workers=int(sys.argv[1]),
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        memory_limit=0,
        resources={"GPU": 1},
    )
    with cluster, library.Client(cluster, set_as_default=False) as client:
        print(READY + cluster.scheduler_address, flush=True)
        for _ in sys.stdin:
            client.submit(os.getpid, resources={"GPU": 1}, pure=False).result(timeout=WAKE_S)
            print(AWAKE, flush=True)


if __name__ == "__main__":
    main()
