"""Spans of time, as people write them: `90m`, `2h`, `1.5d`. A plain number is in seconds."""

from __future__ import annotations

import re
from math import inf

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_ALSO = {"sec": "s", "min": "m", "hour": "h", "hours": "h", "day": "d", "days": "d"}
_PART = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_span(value: float | str, name: str = "time_limit") -> float:
    """Seconds, from a number or from `2h`, `90m`, `1h30m`, `45s`, `2d`."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{name} is {value!r}; {_ADVICE}")  # noqa: TRY004 - one kind of error for a bad value
    if not isinstance(value, str):
        return float(value)
    total_s, rest, last_s = 0.0, value.strip(), inf
    while rest:
        found = _PART.match(rest)
        unit = found[2].lower() if found else ""
        unit = _ALSO.get(unit, unit)
        # A bare number is in seconds only where it stands alone: `1h30` could mean anything.
        if found is None or (unit not in _UNITS_S and (unit or found[0] != value.strip())):
            raise ValueError(f"{name} is {value!r}; {_ADVICE}")
        unit_s = _UNITS_S.get(unit, 1.0)
        if unit_s >= last_s:
            raise ValueError(f"{name} is {value!r}; {_ADVICE}")
        last_s = unit_s
        total_s += float(found[1]) * unit_s
        rest = rest[found.end() :]
    if not value.strip():
        raise ValueError(f"{name} is empty; {_ADVICE}")
    return total_s


def show_span(seconds: float) -> str:
    """`2h`, `90m`, `45s`: as `parse_span` reads it."""
    for unit in ("d", "h", "m"):
        if seconds >= _UNITS_S[unit] and seconds % _UNITS_S[unit] == 0:
            return f"{seconds / _UNITS_S[unit]:g}{unit}"
    return f"{seconds:g}s"


_ADVICE = "give seconds, or a text such as 2h, 90m or 1h30m"
