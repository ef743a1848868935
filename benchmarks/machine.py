"""The machine and the tree that a run is measured on."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.figures import ROOT

PACKAGES = ("fastapi", "starlette", "uvicorn", "uvloop", "pydantic", "websockets")


def machine() -> dict[str, str]:
    """Describe the machine, for people."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpu if line.startswith("model name")), platform.machine())
    memory_kb = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1])
    return {
        "processor": f"{model}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory_kb / 1024 / 1024:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load before it began": f"{os.getloadavg()[0]:.2f} processes, mean of the last minute",
        "Python": f"{platform.python_version()}, SQLite {sqlite3.sqlite_version}",
        "packages": ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name))),
    }


def commit(*others: str) -> str:
    """Return the measured commit, and say whether the working tree has changes that are not in it, also in these other folders."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--", "gpu_worker_pool", "benchmarks", *others)
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return f"{head}{', with changes that are not in it' if changed else ''}"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True, timeout=30)  # noqa: S607
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
