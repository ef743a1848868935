"""Starts `child.py` and listens to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.preloaded import PreloadedPopen

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


def _popen(role: str, path: Path, failpoint: str | None) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name != "GPU_POOL_FAILPOINT"}
    environ["PYTHONPATH"] = str(ROOT)
    if failpoint is not None:
        environ["GPU_POOL_FAILPOINT"] = failpoint
    return PreloadedPopen(
        [sys.executable, "-m", "tests.ledger.child", role, str(path)],
        cwd=ROOT,
        env=environ,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def run(role: str, path: Path, failpoint: str | None = None) -> tuple[int, list[dict[str, Any]]]:
    """How it ended, and what it said."""
    with _popen(role, path, failpoint) as child:
        output, _ = child.communicate(timeout=LIMIT_S)
    return child.returncode, [json.loads(line) for line in output.splitlines()]


@contextmanager
def running(role: str, path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A child that has said its first line and waits; it and what it started end with its standard input."""
    with _popen(role, path, None) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            yield child, json.loads(child.stdout.readline())
        finally:
            child.stdin.close()
