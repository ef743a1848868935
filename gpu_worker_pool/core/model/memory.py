"""Amounts of memory, as people write and read them. A GB is 1024 MB, as in NVIDIA's tools."""

from __future__ import annotations

import re
from math import isfinite
from typing import Final

MB_PER_GB: Final = 1024.0
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(|[KMGT]I?B?|B)\s*", re.IGNORECASE)
_TO_MB = {"": 1.0, "B": 1 / 2**20, "K": 1 / 1024, "M": 1.0, "G": MB_PER_GB, "T": MB_PER_GB**2}
# Below it, and where it is not a whole number of GB, an amount is shown in MB.
_SHOWN_IN_GB_FROM_MB: Final = 10 * MB_PER_GB


def parse_memory_mb(value: str | float) -> float:
    """Read `12GB`, `12GiB`, `12g`, `800M`; a number alone is in MB. ValueError for anything else, and below 1 MB."""
    found = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if found is not None:
        amount_mb = float(found[1]) * _TO_MB[found[2][:1].upper()]
    else:
        amount_mb = 0.0 if isinstance(value, str | bool) else float(value)
    if not isfinite(amount_mb) or amount_mb < 1:
        raise ValueError(f"{value!r} is not an amount of memory of 1 MB or more; write 12GB, 800MB or 12000 (in MB)")
    return amount_mb


def asked_mb(memory_mb: float | None, memory: str | float | None) -> float | None:
    """The amount that a request names in one of the two ways; ValueError where it uses both."""
    if memory is None:
        return memory_mb
    if memory_mb is not None:
        raise ValueError(f"memory is {memory!r} and memory_mb is {memory_mb!r}; give one of the two")
    try:
        return parse_memory_mb(memory)
    except (TypeError, ValueError) as error:
        raise ValueError(f"memory: {error}") from None


def show_mb(amount_mb: float) -> str:
    """`80 GB`, `79.6 GB`, `800 MB`; never in powers of ten."""
    if amount_mb >= MB_PER_GB and amount_mb % MB_PER_GB == 0:
        return f"{amount_mb / MB_PER_GB:.0f} GB"
    return f"{amount_mb:.0f} MB" if amount_mb < _SHOWN_IN_GB_FROM_MB else f"{amount_mb / MB_PER_GB:.1f} GB"
