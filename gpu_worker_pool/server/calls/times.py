"""Times that callers write: ISO 8601, or seconds since 1970."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime

from gpu_worker_pool.server.http.problems import Refusal

LATEST_S = 253_402_300_799.0  # the last second of the year 9999


def read_time(name: str, text: str | None) -> float | None:
    """Read a time, in seconds since 1970; None if it is not given. Refusal if it is none."""
    if text is None:
        return None
    found = _seconds(text.strip())
    if found is None or not 0 <= found <= LATEST_S:
        raise Refusal(
            422,
            f"{name}: {text[:40]!r} is not a time; write it as 2026-11-01, 2026-11-01T12:00:00Z (UTC unless it says "
            "otherwise) or in seconds since 1970. A number of four digits is a year.",
        )
    return found


_YEAR = re.compile("(19[7-9]|2[0-9]{2})[0-9]")
_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")


def _seconds(text: str) -> float | None:
    if _YEAR.fullmatch(text):
        return datetime(int(text), 1, 1, tzinfo=UTC).timestamp()  # and not half an hour after 1970 began
    if _DECIMAL.fullmatch(text):
        return float(text)
    # A plus sign in a query means a blank, and few callers know that.
    for attempt in (text, "+".join(text.rsplit(" ", 1))):
        with suppress(ValueError, OverflowError):
            found = datetime.fromisoformat(attempt)
            return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    return None
