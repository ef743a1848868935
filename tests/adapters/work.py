"""Tasks of people's own, for Dask, joblib and Optuna."""

from __future__ import annotations

import os


def visible(number: int) -> tuple[int, int, str | None]:
    return number, os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")


def fail(number: int) -> int:
    raise LookupError(f"number {number}")
