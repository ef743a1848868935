"""Our fleet: real servers on this machine, each with GPUs of its own, and a real PostgreSQL that syncs each commit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.fleet.gpus import GPUS_A_BOX, RARE
from benchmarks.shared.servers import pool
from benchmarks.take_over import until
from gpu_worker_pool.testing import ServerProcess
from tests.ledger.postgres.server import PostgresServer

# Longer than one server takes, because all start at once.
START_S = 120.0


class Boxes:
    """Boxes of a fleet that run: the first `candidates` of them know the database."""

    def __init__(self, database: PostgresServer, boxes: list[ServerProcess], candidates: int, ready_s: float) -> None:
        self.boxes = boxes
        self.candidates = boxes[:candidates]
        self.ready_s = ready_s
        self._database = database

    @property
    def pids(self) -> list[int]:
        """Of all servers, and of the database."""
        postmaster = self._database.execute("SELECT pg_read_file('postmaster.pid')").split()[0]
        return [*(box.pid for box in self.boxes), int(postmaster)]

    @property
    def agents(self) -> list[ServerProcess]:
        """The boxes that cannot lead."""
        return self.boxes[len(self.candidates) :]

    def leader(self) -> ServerProcess | None:
        return next((box for box in self.candidates if box.is_running and _fleet(box).get("role") == "leader"), None)

    def await_all(self) -> ServerProcess:
        """Wait until a box leads and all GPUs of all boxes are known to it; return that box."""
        found: list[ServerProcess] = []

        def is_whole() -> bool:
            leader = self.leader()
            if leader is None:
                return False
            pool = leader.ask("/fleet/pool")
            known = (
                {gpu["node"] for gpu in pool.json["gpus"] if gpu["state"] != "unknown"} if pool.status == 200 else ()
            )
            found[:] = [leader]
            return len(known) == len(self.boxes)

        until(is_whole)
        return found[0]

    def restart(self, box: ServerProcess) -> None:
        """Start a box that was killed, and wait until it is a part of the fleet again."""
        box.start()
        self.await_all()
        until(lambda: _fleet(box).get("role") == "follower")


def _fleet(box: ServerProcess) -> dict[str, Any]:
    try:
        answer = box.ask("/health")
    except OSError:
        return {}
    return dict(answer.json.get("fleet") or {})


@contextmanager
def running(folder: Path, number: int, candidates: int) -> Iterator[Boxes]:
    """Run so many boxes, on a database that runs already, as that of an operator does."""
    with ExitStack() as stack:
        database = PostgresServer(is_durable=True)
        stack.callback(database.remove)
        database.create_database("fleet")
        key = secrets.token_hex(16)
        began = time.monotonic()
        boxes: list[ServerProcess] = []
        for each in range(number):
            listed = ",".join(box.url for box in boxes[:candidates])
            settings = {
                "GPU_POOL_FLEET": database.url("fleet") if each < candidates else listed,
                "GPU_POOL_FLEET_KEY": key,
                "GPU_POOL_NODE": f"box{each:02}",
            }
            gpus = f"1x{RARE}" if each == number - 1 else str(GPUS_A_BOX)
            box = pool(folder / f"box{each:02}", gpus, "full", settings)
            stack.callback(box.close)
            boxes.append(box)
        for box in boxes:
            box.launch()
        for box in boxes:
            box.wait_until_ready(START_S)
        found = Boxes(database, boxes, candidates, 0.0)
        found.await_all()
        found.ready_s = time.monotonic() - began
        yield found
