"""A fleet at work: three boxes and a real PostgreSQL, of which the leader and then the database are killed.

Run it in a clone with `make demo-fleet`, or `python -m examples.fleet_demo`. It needs no GPU. Workers ask any of the boxes
and get GPUs of all of them; the table at the end says what was measured, as that of `gpu-pool demo`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from gpu_worker_pool.cli.demo.command import show_results
from gpu_worker_pool.cli.demo.course import SERVER_SETTINGS, Demo
from gpu_worker_pool.cli.demo.results import Outage
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.testing import ServerProcess
from tests.ledger.postgres.process import PostgresDidNotStartError, PostgresProcess

BOXES = 3
CANDIDATES = 2
DATABASE = "demo"
AWAY_S = 5.0
CALM_S = 2.0
PATIENCE_S = 60.0


class FleetDemo(Demo):
    """One run. Each worker may ask any box, and is given a GPU of any box."""

    database: PostgresProcess
    boxes: list[ServerProcess]
    # The journal of the fleet: it has one order for all boxes.
    events: list[dict[str, Any]]

    @contextmanager
    def servers(self) -> Iterator[list[str]]:
        """PostgreSQL and the boxes, by the URLs of the boxes."""
        self.folder.chmod(0o711)  # PostgreSQL may have to run as another user
        self.say(f"starting PostgreSQL and {BOXES} boxes, {CANDIDATES} of which can lead")
        self.database = PostgresProcess(folder=self.folder)
        with ExitStack() as stack:
            stack.callback(self.database.remove)
            self.database.create_database(DATABASE)
            key = {"GPU_POOL_FLEET_KEY": secrets.token_hex(16), "SIMULATED_GPUS": str(self.gpus // BOXES)}
            names = [f"box{number}" for number in range(1, BOXES + 1)]
            self.boxes = [
                ServerProcess({**SERVER_SETTINGS, **key, "GPU_POOL_NODE": name}, folder=self.folder / name)
                for name in names
            ]
            for number, box in enumerate(self.boxes):
                stack.callback(box.close)
                leaders = ",".join(box.url for box in self.boxes[:CANDIDATES])
                box.env["GPU_POOL_FLEET"] = self.database.url(DATABASE) if number < CANDIDATES else leaders
                box.launch()
            for box in self.boxes:
                box.wait_until_ready()
            self.first(self.all_gpus)
            yield [box.url for box in self.boxes]
            rows = self.database.execute("SELECT body FROM gpu_pool.event ORDER BY position", DATABASE)
            self.events = [json.loads(body) for body in rows.splitlines()]

    def all_gpus(self) -> bool:
        """Whether the fleet knows the GPUs of all boxes."""
        pool = self.ask("/pool")
        return pool is not None and sum(gpu["state"] == "free" for gpu in pool["gpus"]) == self.gpus

    def break_servers(self, ends_at: float) -> None:
        """Kill the leader, and then the database; both come back."""
        self.await_holders(ends_at)
        leader = self.first(self.leader)
        outage = Outage("leader", boot_time())
        leader.kill()
        self.say(f"kill -9 of box{self.boxes.index(leader) + 1}, which leads the fleet")
        self.first(self.leader)
        self.note_back(outage, "another box leads")
        leader.restart()
        time.sleep(CALM_S)
        self.await_holders(ends_at + AWAY_S)
        outage = Outage("database", boot_time())
        self.database.kill()
        self.say("kill -9 of PostgreSQL: no box can lead")
        time.sleep(AWAY_S)
        self.database.start()
        self.first(self.leader)
        self.note_back(outage, "the database is back, and a box leads")

    def leader(self) -> ServerProcess | None:
        """The box that leads and can grant."""
        for box in self.boxes:
            health = ask_box(box, "/health") or {}
            if health.get("can_grant") and health["fleet"]["role"] == "leader":
                return box
        return None

    def ask(self, path: str) -> Any:
        """What the first box answers that can pass the call on to the leader."""
        answers = (ask_box(box, f"/fleet{path}") for box in self.boxes)
        return next((answer for answer in answers if answer is not None), None)

    def first(self, ask: Callable[[], Any]) -> Any:
        """The first true answer."""
        until = time.monotonic() + PATIENCE_S
        while not (answer := ask()):
            if time.monotonic() > until:
                raise SystemExit(f"the fleet is not there after {PATIENCE_S:g} s; is this machine very busy?")
            time.sleep(0.05)
        return answer


def ask_box(box: ServerProcess, path: str) -> Any:
    """What this box answers; None where it does not."""
    with suppress(OSError, http.client.HTTPException):
        answer = box.ask(path) if box.is_running else None
        return answer.json if answer is not None and answer.status == 200 else None


def out_of_turn(events: list[dict[str, Any]]) -> Iterator[str]:
    """Grants before requests that were ahead, by the journal. All requests of the demo are alike."""
    waiting: dict[str, int] = {}
    for event in events:
        name = event.get("lease_id", "")
        if event["kind"] == "LeaseQueued":
            waiting[name] = event["seq"]
        elif event["kind"] in {"LeaseGranted", "LeaseEnded"} and name in waiting:
            place = waiting.pop(name)
            ahead = [other for other, before in waiting.items() if before < place]
            if event["kind"] == "LeaseGranted" and ahead:
                yield f"{name} was granted a GPU before {ahead[0]}, which was ahead of it"


def main() -> int:
    """Run the demo, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="how long the workers compete (40)")
    parser.add_argument("--workers", type=int, default=12, help="how many worker processes compete (12)")
    options = parser.parse_args()
    gpus = 2 * BOXES
    with tempfile.TemporaryDirectory(prefix="gpu-pool-fleet-demo-", ignore_cleanup_errors=True) as folder:
        demo = FleetDemo(Path(folder), gpus, lambda text: print(text, flush=True))
        try:
            course = demo.run(options.workers, options.seconds, seed=1)
        except (PostgresDidNotStartError, subprocess.SubprocessError) as error:
            print(f"the demo of a fleet needs a PostgreSQL: {error}", file=sys.stderr)
            return 1
    late = list(out_of_turn(demo.events))
    # Each box has fences of its own, so the order over all boxes is that of the journal.
    code = show_results(course, by_journal=late, json=False, about={})
    return 1 if late else code


if __name__ == "__main__":
    sys.exit(main())
