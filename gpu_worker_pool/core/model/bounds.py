"""Checks of arguments, whose errors say what was given and what is allowed; and the defaults that a client needs at once."""

from __future__ import annotations

from typing import NamedTuple

# How long a lease lives without a heartbeat.
DEFAULT_TTL_S = 60.0
MAX_TTL_S = 7 * 24 * 3600.0


class Thresholds(NamedTuple):
    """A GPU at or over one of these is not available."""

    memory_percent: float
    utilization_percent: float


DEFAULT_THRESHOLDS = Thresholds(memory_percent=80.0, utilization_percent=90.0)


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise a ValueError that names the parameter, the value and the range, unless low <= value <= high."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; it must be a number from {low:.15g} to {high:.15g}")


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """As check_number, for whole numbers."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")
