"""The pool keeps its promise while server, workers, network, disk and wall clock fail, and strangers come (see nemesis.py).

NEMESIS_SEED repeats a schedule of faults, NEMESIS_KEEP keeps the histories of a run in that folder. `make soak` runs for longer.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.e2e import nemesis
from tests.e2e.faults.scene import Plan
from tests.e2e.history_check import check
from tests.e2e.run_history import LeaseRecord, RunHistory


def test_the_promise_is_kept_whatever_fails(tmp_path: Path) -> None:
    seed = int(os.environ.get("NEMESIS_SEED", random.SystemRandom().randrange(10_000)))
    folder = Path(os.environ.get("NEMESIS_KEEP", tmp_path)) / f"nemesis-{seed}"

    history, counts = nemesis.run(Plan(seed), folder)

    found = check(history)
    told = f"NEMESIS_SEED={seed}, histories in {folder}, {dict(counts)}"
    assert not found, "\n".join([told, *map(str, found)])
    # A run in which little happened proves little.
    done = {
        "killed",
        "worker_stopped",
        "server_killed",
        "failpoint_set",
        "server_stopped",
        "disk_filled",
        "network_cut",
        "outsider_left",
        "second_server_beside_first",
        "held_through_outage",
        "given_up_in_outage",
        "shares_granted",
    }
    assert all(counts[name] for name in done), told
    assert counts["grants"] >= 20, told
    assert all(any(uuid in lease.uuids for lease in calm_tenures(history)) for uuid in gpus(history)), told


def gpus(history: RunHistory) -> set[str]:
    return {uuid for lease in history.tenures for uuid in lease.uuids}


def calm_tenures(history: RunHistory) -> list[LeaseRecord]:
    (calm_at,) = [line["at"] for line in history.lines if line["what"] == "calm"]
    return [lease for lease in history.tenures if lease.took_at > calm_at]
