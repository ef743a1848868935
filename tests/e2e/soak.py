"""The nemesis for as long as you like: `make soak SOAK_MINUTES=60`, or `python -m tests.e2e.soak`.

SOAK_MINUTES (10), SOAK_SEED (the first one; drawn where it is not set), SOAK_RUN_S (how long the faults of one run last, 120).
In each run the server is away for a minute once (for half of a shorter run). Each run has the next seed. It stops at the first violation, keeps that run's histories, and says where they are.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.e2e import nemesis
from tests.e2e.faults.scene import Plan
from tests.e2e.history_check import check
from tests.e2e.worker import now
from tests.other_user import ALICE, command_as


def main() -> int:
    minutes = float(os.environ.get("SOAK_MINUTES", "10"))
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(1_000_000))
    run_s = float(os.environ.get("SOAK_RUN_S", "120"))
    ends_at = now() + minutes * 60
    total: Counter[str] = Counter()
    command = command_as(ALICE)
    if isinstance(command, str):
        tell(f"{command}: the second server is one of this user")
    while now() < ends_at:
        folder = Path(tempfile.mkdtemp(prefix="gpu-soak-"))
        chaos_s = max(min(run_s, ends_at - now()), 20.0)
        plan = Plan(seed, chaos_s=chaos_s, calm_s=15.0, outage_s=min(60.0, chaos_s / 2))
        began = now()
        history, counts = nemesis.run(plan, folder)
        found = check(history)
        total.update(counts)
        tell(f"seed {seed}: {now() - began:.0f} s, {counts['grants']} grants, {len(found)} violations")
        if found:
            tell(f"the histories are in {folder}; SOAK_SEED={seed} repeats the faults", *map(str, found[:50]))
            return 1
        shutil.rmtree(folder, ignore_errors=True)
        seed += 1
    tell("what was done and seen, all runs together:", *(f"  {name}: {total[name]}" for name in sorted(total)))
    return 0


def tell(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
