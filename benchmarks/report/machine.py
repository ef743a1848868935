"""The machine that a run was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
import statistics
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.report.figures import READING, READING_GPUS
from benchmarks.report.measure import ROOT
from benchmarks.shared.results import duration
from gpu_worker_pool.gpus.simulated import SimulatedProbe

# These packages are part of what is measured, so their versions matter.
PACKAGES = ("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pydantic", "aiohttp")

READINGS = 200
# The first columns of /proc/stat.
KINDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


def machine() -> dict[str, str]:
    """Describe the machine, for people."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpu if line.startswith("model name")), platform.machine())
    memory_kb = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1])
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "processor": f"{model}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory_kb / 1024 / 1024:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load before it began": load(),
        READING: reading(),
        "Python": f"{platform.python_version()}, SQLite {sqlite3.sqlite_version}",
        "packages": ", ".join(f"{name} {version}" for name in PACKAGES if (version := version_of(name))),
    }


def reading() -> str:
    """Measure how long a reading of simulated GPUs takes."""
    probe = SimulatedProbe("box", str(READING_GPUS))
    times_s = []
    for number in range(READINGS):
        began = time.perf_counter()
        probe.read(float(number))
        times_s.append(time.perf_counter() - began)
    return f"{duration(statistics.median(times_s))} (median of {READINGS})"


def load() -> str:
    return f"{os.getloadavg()[0]:.2f} processes, mean of the last minute"


def processor_times() -> list[int]:
    """Return how long all processors did each kind of thing since the machine was started: see `KINDS`."""
    _, *times = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()
    return [int(time) for time in times[: len(KINDS)]]


def during_the_run(before: Sequence[int], after: Sequence[int]) -> str:
    """Describe what the processors did between these two times."""
    spent = dict(zip(KINDS, (later - sooner for sooner, later in zip(before, after, strict=True)), strict=True))
    percents = {kind: 100 * time / (sum(spent.values()) or 1) for kind, time in spent.items()}
    busy = 100 - percents["idle"] - percents["iowait"] - percents["steal"]
    return (
        f"{busy:.0f} % in use, {percents['iowait']:.1f} % idle while a disk was waited for, {percents['steal']:.1f} % taken by the "
        "host for other machines (steal)"
    )


def commit(*others: str) -> str:
    """Return the measured commit, and say whether the working tree has changes that are not in it, also in these other folders."""

    def git(*words: str) -> str:
        command = ["git", *words]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--", "gpu_worker_pool", "benchmarks", *others)
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return f"{head}{', with changes that are not in it' if changed else ''}"


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
