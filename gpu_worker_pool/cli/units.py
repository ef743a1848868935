"""Memory, durations and times of day, as people write and read them. A time is in the time zone of the caller."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from math import inf
from typing import Final

from gpu_worker_pool.amounts import parse_memory_mb as parse_memory_mb  # noqa: PLC0414 - for all commands
from gpu_worker_pool.amounts import parse_span
from gpu_worker_pool.failure import USAGE, Failure

_NEAR_S: Final = 6 * 86_400.0
_MOST_AHEAD_S: Final = 100 * 365.25 * 86_400
_CLOCK: Final = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")


def parse_duration_s(text: str | float) -> float:
    """Read `90`, `90s`, `15m`, `1h`, `1h30m`, `2d`; a number alone is in seconds."""
    try:
        seconds = parse_span(str(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a duration; write 90s, 15m, 1h30m, 2d or 90 (in seconds)") from None
    if not 0 <= seconds <= 1e9:
        raise ValueError(f"{text!r} is too long; it must be at most a billion seconds")
    return seconds


def parse_moment(text: str, now: float, option: str, *, is_past: bool = False) -> float:
    """Read `2026-12-01 09:00`, in local time unless it says otherwise; `09:00`, the next one; `2h`, from now. Where the
    past is meant: the last 09:00, and 2h ago. Returns seconds since 1970.
    """
    at = _moment(text.strip(), now, -1 if is_past else 1)
    if at is None:
        example = (
            "7d, 12h, 2026-11-01 or '2026-11-01 12:00'" if is_past else "'2026-12-01 09:00', 09:00, or 2h from now"
        )
        raise Failure(f"{option}: {text!r} is not a time; write {example}", USAGE)
    if at > now + _MOST_AHEAD_S:
        raise Failure(f"{option}: {text!r} is too far ahead; it must be within a hundred years", USAGE)
    return max(at, 0.0)


def _moment(words: str, now: float, step: int) -> float | None:
    if clock := _CLOCK.fullmatch(words):
        today = datetime.fromtimestamp(now).replace(  # noqa: DTZ006 - in local time
            hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0
        )
        at = today.timestamp()
        # Not a day of 86,400 s: clocks may be changed in the night.
        return at if (at - now) * step > 0 else (today + timedelta(days=step)).timestamp()
    try:
        date = datetime.fromisoformat(words)
    except ValueError:
        pass
    else:
        try:
            return date.timestamp()
        except (ValueError, OverflowError, OSError):  # the first and last days of the calendar
            return 0.0 if date.year < 1970 else inf
    try:
        # A number alone might be a year, or meant in any unit.
        return None if words.isdigit() else now + step * parse_span(words)
    except ValueError:
        return None


def show_duration(seconds: float) -> str:
    """A duration in its two largest units: `42s`, `5m 12s`, `3h 5m`, `2d 4h`."""
    left = max(int(seconds), 0)
    if left < 60:
        return f"{left}s"
    units = [(left // 86_400, "d"), (left // 3600 % 24, "h"), (left // 60 % 60, "m"), (left % 60, "s")]
    first = next(index for index, (number, _) in enumerate(units) if number)
    return " ".join(f"{number}{unit}" for number, unit in units[first : first + 2] if number)


def show_moment(at: float | None, now: float) -> str:
    """`14:20`, on a day near `Sat 14:20`, else `2026-12-01 14:20`."""
    if at is None:
        return "an unknown time"
    try:
        then, today = (datetime.fromtimestamp(moment).astimezone() for moment in (at, now))
    except (ValueError, OverflowError, OSError):
        return "an unknown time"
    if then.date() == today.date():
        return f"{then:%H:%M}"
    return f"{then:%a %H:%M}" if abs(at - now) < _NEAR_S else f"{then:%Y-%m-%d %H:%M}"


def show_memory(memory_mb: float) -> str:
    """Memory in GiB, `9.2 GiB`; below one GiB in MiB, `800 MiB`."""
    return f"{memory_mb / 1024:.1f} GiB" if memory_mb >= 1024 else f"{memory_mb:.0f} MiB"


def count(number: int, noun: str) -> str:
    """`1 GPU`, `4 GPUs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
