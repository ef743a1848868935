"""Checks of arguments, whose errors say what was given and what is allowed; the defaults that a client needs at once; and amounts
of memory and spans of time, as people read them. A GB is 1024 MB, as in NVIDIA's tools.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# How long a lease lives without a heartbeat.
DEFAULT_TTL_S = 60.0
MAX_TTL_S = 7 * 24 * 3600.0

MB_PER_GB: Final = 1024.0
UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
# Below it, and where it is not a whole number of GB, an amount is shown in MB.
_SHOWN_IN_GB_FROM_MB: Final = 10 * MB_PER_GB


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


def show_mb(amount_mb: float) -> str:
    """`80 GB`, `79.6 GB`, `800 MB`; never in powers of ten."""
    if amount_mb >= MB_PER_GB and amount_mb % MB_PER_GB == 0:
        return f"{amount_mb / MB_PER_GB:.0f} GB"
    return f"{amount_mb:.0f} MB" if amount_mb < _SHOWN_IN_GB_FROM_MB else f"{amount_mb / MB_PER_GB:.1f} GB"


def show_span(seconds: float) -> str:
    """`2h`, `90m`, `45s`: as `parse_span` reads it."""
    for unit in ("d", "h", "m"):
        if seconds >= UNITS_S[unit] and seconds % UNITS_S[unit] == 0:
            return f"{seconds / UNITS_S[unit]:g}{unit}"
    return f"{seconds:g}s"
