"""Tasks of people's own, for Dask, joblib and Optuna."""

from __future__ import annotations

import os


def visible(number: int) -> tuple[int, int, str | None]:
    return number, os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")


def loss_of(rate: float) -> float:
    assert os.environ["CUDA_VISIBLE_DEVICES"] in {"0", "1", "2", "3"}
    return (rate - 0.3) ** 2


def fail(number: int) -> int:
    raise LookupError(f"number {number}")
