"""Points in time, as people write and read them: in the time zone of the caller."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final

import typer

from .failure import USAGE, Failure
from .units import parse_duration_s

_NEAR_S: Final = 6 * 86_400.0
_CLOCK: Final = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")


def parse_moment(text: str, now: float, option: str) -> float:
    """`2026-12-01 09:00`, in local time unless it says otherwise; `09:00`, the next time it is so late; `2h`, from now on.
    Returns seconds since 1970.
    """
    words = text.strip()
    if clock := _CLOCK.fullmatch(words):
        today = datetime.fromtimestamp(now).replace(  # noqa: DTZ006 - in local time
            hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0
        )
        at = today.timestamp()
        # Not a day of 86,400 s: clocks may be changed in the night.
        return at if at > now else (today + timedelta(days=1)).timestamp()
    try:
        return max(datetime.fromisoformat(words).timestamp(), 0.0)
    except (ValueError, OverflowError, OSError):
        pass
    try:
        if not words.isdigit():  # it might be a year, or meant in any unit
            return now + parse_duration_s(words)
    except typer.BadParameter:
        pass
    raise Failure(f"{option}: {text!r} is not a time; write '2026-12-01 09:00', 09:00 or 2h (from now on)", USAGE)


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
