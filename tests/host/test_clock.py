"""The clock of the leases."""

from __future__ import annotations

import os
import subprocess
import sys
from math import inf, nan
from pathlib import Path

import pytest

from gpu_worker_pool.host.clock import boot_id, boot_time, iso_time

ROOT = Path(__file__).parent.parent.parent
UPTIME = Path("/proc/uptime")


@pytest.mark.skipif(not UPTIME.exists(), reason="no /proc/uptime to compare with")
def test_it_counts_from_the_start_of_the_machine_with_the_time_asleep() -> None:
    before = boot_time()
    uptime = float(UPTIME.read_text().split()[0])
    after = boot_time()

    # /proc/uptime is cut off to hundredths.
    assert before - 0.01 <= uptime <= after


def test_another_process_names_the_same_boot() -> None:
    program = "from gpu_worker_pool.host.clock import boot_id; print(boot_id())"
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert other.stdout.strip() == boot_id() != ""


@pytest.mark.parametrize("wall_s", [None, nan, inf, -inf, 1e300, 253402300800.0, -62135596800.1])
def test_a_time_that_no_calendar_has_is_not_shown(wall_s: float | None) -> None:
    assert iso_time(wall_s) is None
