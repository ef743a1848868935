"""The failure that ends a command, and the exit codes; see gpu_worker_pool/failure.py."""

from __future__ import annotations

from gpu_worker_pool.failure import (
    CANNOT_RUN,
    FAILED,
    NOT_FOUND,
    REFUSED,
    SIGNAL_BASE,
    TAKEN_BACK,
    TIME_LIMIT,
    TIMED_OUT,
    USAGE,
    Failure,
)

__all__ = [
    "CANNOT_RUN",
    "FAILED",
    "NOT_FOUND",
    "REFUSED",
    "SIGNAL_BASE",
    "TAKEN_BACK",
    "TIMED_OUT",
    "TIME_LIMIT",
    "USAGE",
    "Failure",
]
