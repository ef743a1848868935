"""Many worker processes at once on a real server."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e import checker
from tests.e2e.nemesis import PYTHON, USABLE_MB, WORKER
from tests.e2e.worker import Orders
from tests.server.running import RunningServer

LIMIT_S = 60.0


@contextmanager
def serving(gpus: int, **env: str) -> Iterator[RunningServer]:
    """A server with a state of its own."""
    with tempfile.TemporaryDirectory(prefix="gpu-state-") as state:
        settings = {"SIMULATED_GPUS": str(gpus), "GPU_POOL_STATE_DIR": state, "ACCESS_LOG": "false", **env}
        with RunningServer(settings) as server:
            yield server


def work(orders: Orders) -> checker.History:
    """Let them work until they are done, and read what they saw."""
    subprocess.run([*PYTHON, str(WORKER), orders.encoded()], check=True, timeout=LIMIT_S, env={})
    return checker.read(Path(orders.folder), USABLE_MB)
