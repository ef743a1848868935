"""Amounts of memory and spans of time, as people read them. A GB is 1024 MB, as in NVIDIA's tools."""

from __future__ import annotations

from typing import Final

MB_PER_GB: Final = 1024.0
UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
# Below it, and where it is not a whole number of GB, an amount is shown in MB.
_SHOWN_IN_GB_FROM_MB: Final = 10 * MB_PER_GB


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
