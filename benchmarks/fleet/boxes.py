"""A fleet of real servers on this machine, each with GPUs of its own, and a real PostgreSQL that syncs each commit."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes import pool_server, wait_until
from gpu_worker_pool.testing import ServerProcess
from tests.ledger.postgres.server import PostgresServer

# Longer than one server takes, because all start at once.
START_S = 120.0


class Boxes:
    """Boxes of a fleet that run: the first `candidates` of them know the database and can lead."""

    def __init__(self, boxes: list[ServerProcess], candidates: int) -> None:
        self.boxes = boxes
        self.candidates, self.others = boxes[:candidates], boxes[candidates:]

    def leader(self) -> ServerProcess | None:
        return next((box for box in self.candidates if box.is_running and _fleet(box).get("role") == "leader"), None)

    def await_all(self) -> ServerProcess:
        """Wait until a box leads and knows the GPUs of all boxes; return that box."""
        found: list[ServerProcess] = []

        def is_whole() -> bool:
            found[:] = [leader] if (leader := self.leader()) else []
            return bool(found) and len(_nodes(found[0])) == len(self.boxes)

        wait_until(is_whole, "a box leads the whole fleet", START_S)
        return found[0]

    def restart(self, box: ServerProcess) -> None:
        """Start a box that was killed, and wait until it is a part of the fleet again."""
        box.start()
        self.await_all()
        wait_until(lambda: _fleet(box).get("role") == "follower", "the box follows the leader", START_S)


def _fleet(box: ServerProcess) -> dict[str, Any]:
    try:
        return dict(box.ask("/health").json.get("fleet") or {})
    except OSError:
        return {}


def _nodes(leader: ServerProcess) -> set[str]:
    try:
        answer = leader.ask("/fleet/pool")
    except OSError:
        return set()
    return {gpu["node"] for gpu in answer.json["gpus"] if gpu["state"] != "unknown"} if answer.status == 200 else set()


@contextmanager
def running(folder: Path, number: int, candidates: int, gpus: int) -> Iterator[Boxes]:
    """Run this number of boxes, on a database of their own."""
    with ExitStack() as held:
        database = PostgresServer(is_durable=True)
        held.callback(database.remove)
        key = secrets.token_hex(16)
        boxes: list[ServerProcess] = []
        for each in range(number):
            leaders = ",".join(box.url for box in boxes[:candidates])
            settings = {
                "GPU_POOL_FLEET": database.url() if each < candidates else leaders,
                "GPU_POOL_FLEET_KEY": key,
                "GPU_POOL_NODE": f"box{each}",
            }
            box = pool_server(folder / f"box{each}", str(gpus), "full", settings)
            held.callback(box.close)
            boxes.append(box)
        for box in boxes:
            box.launch()
        for box in boxes:
            box.wait_until_ready(START_S)
        found = Boxes(boxes, candidates)
        found.await_all()
        yield found
