"""Many worker processes at once on a real server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_worker_pool.testing import ServerProcess
from tests.e2e import histories
from tests.e2e.faults.workers import PYTHON, WORKER
from tests.e2e.run_history import RunHistory
from tests.e2e.worker import Orders

LIMIT_S = 60.0


@contextmanager
def serving(gpus: int) -> Iterator[ServerProcess]:
    """A server with a state of its own."""
    with ServerProcess({"SIMULATED_GPUS": str(gpus), "ACCESS_LOG": "false"}) as server:
        yield server


def work(orders: Orders) -> RunHistory:
    """Let them work until they are done, and read what they saw."""
    subprocess.run([*PYTHON, str(WORKER), orders.encoded()], check=True, timeout=LIMIT_S, env={})
    return histories.read(Path(orders.folder))
