"""Amounts of memory and spans of time, as people write them. A GB is 1024 MB, as in NVIDIA's tools."""

from __future__ import annotations

import re
from math import inf, isfinite

from .core.model.bounds import MB_PER_GB, UNITS_S

_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(|[KMGT]I?B?|B)\s*", re.IGNORECASE)
_TO_MB = {"": 1.0, "B": 1 / 2**20, "K": 1 / 1024, "M": 1.0, "G": MB_PER_GB, "T": MB_PER_GB**2}
_ALSO = {"sec": "s", "min": "m", "hour": "h", "hours": "h", "day": "d", "days": "d"}
_PART = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)
_SPAN_ADVICE = "give seconds, or a text such as 2h, 90m or 1h30m"


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


def asked_mb(memory_mb: float | None, memory: str | float | None, name: str = "memory") -> float | None:
    """The amount that a request names in one of the two ways; ValueError where it uses both."""
    if memory is None:
        return memory_mb
    if memory_mb is not None:
        raise ValueError(f"{name} is {memory!r} and {name}_mb is {memory_mb!r}; give one of the two")
    try:
        return parse_memory_mb(memory)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def parse_span(value: float | str, name: str = "time_limit") -> float:
    """Seconds, from a number or from `2h`, `90m`, `1h30m`, `45s`, `2d`."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{name} is {value!r}; {_SPAN_ADVICE}")  # noqa: TRY004 - one kind of error for a bad value
    if not isinstance(value, str):
        return float(value)
    total_s, rest, last_s = 0.0, value.strip(), inf
    while rest:
        found = _PART.match(rest)
        unit = found[2].lower() if found else ""
        unit = _ALSO.get(unit, unit)
        # A bare number is in seconds only where it stands alone: `1h30` could mean anything.
        if found is None or (unit not in UNITS_S and (unit or found[0] != value.strip())):
            raise ValueError(f"{name} is {value!r}; {_SPAN_ADVICE}")
        unit_s = UNITS_S.get(unit, 1.0)
        if unit_s >= last_s:
            raise ValueError(f"{name} is {value!r}; {_SPAN_ADVICE}")
        last_s = unit_s
        total_s += float(found[1]) * unit_s
        rest = rest[found.end() :]
    if not value.strip():
        raise ValueError(f"{name} is empty; {_SPAN_ADVICE}")
    return total_s
