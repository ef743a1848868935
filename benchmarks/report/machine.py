"""The machine that a run was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.report.measure import ROOT

# These packages are part of what is measured, so their versions matter.
PACKAGES = ("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pydantic", "aiohttp")


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
        "load before it began": f"{os.getloadavg()[0]:.2f} processes, mean of the last minute",
        "Python": f"{platform.python_version()}, SQLite {sqlite3.sqlite_version}",
        "packages": ", ".join(f"{name} {version}" for name in PACKAGES if (version := version_of(name))),
    }


def commit() -> str:
    """Return the measured commit, and say whether the working tree has changes that are not in it."""

    def git(*words: str) -> str:
        command = ["git", *words]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--", "gpu_worker_pool", "benchmarks")
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return f"{head}{', with changes that are not in it' if changed else ''}"


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
