"""Tasks of people's own, for Dask, joblib and Optuna."""

from __future__ import annotations

import os
import time
from pathlib import Path


def visible(number: int) -> tuple[int, int, str | None]:
    return number, os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")


def fail(number: int) -> int:
    raise LookupError(f"number {number}")


def never_end(begun: Path) -> None:
    begun.touch()
    while True:
        time.sleep(1.0)


def fail_once_begun(begun: Path) -> None:
    while not begun.exists():
        time.sleep(0.01)
    raise LookupError("the other one runs")
