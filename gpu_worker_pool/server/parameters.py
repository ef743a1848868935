"""The types of the parameters in paths and queries, each with its bounds, and of the ids, texts and times in them."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import AfterValidator, BeforeValidator, WithJsonSchema
from pydantic_core import PydanticKnownError

from gpu_worker_pool.core.model.request import MAX_GPUS
from gpu_worker_pool.wire.bounds import (
    FEWEST_HOURS,
    FEWEST_PACE_S,
    LEASE_ID,
    MAX_MODEL,
    MAX_PROCESS_NAME,
    MAX_QUEUE,
    MAX_REASON,
    MAX_TEXT,
    MAX_TIME,
    MAX_WAIT_S,
    MOST_HOURS,
    MOST_PACE_S,
    PRINTABLE,
    is_lease_id,
    is_printable,
)

from .http.validation import show


def check_printable(text: str) -> str:
    if not is_printable(text):
        raise ValueError(f"{show(text)} has characters that cannot be printed; leave them out")
    return text


def check_lease_id(text: str) -> str:
    if not is_lease_id(text):
        raise ValueError(f"{show(text)} is not a lease id; it must be 1 to 128 letters, digits or signs (. _ ~ -).")
    return text


_YEAR = re.compile("(19[7-9]|2[0-9]{2})[0-9]")
_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?|\.[0-9]{1,18}")
LATEST_S = 253_402_300_799.0  # the last second of the year 9999


def _time(value: Any) -> float:
    """Read a time, in seconds since 1970."""
    if not isinstance(value, str):
        raise PydanticKnownError("string_type")
    found = _seconds(value.strip())
    if found is None or not 0 <= found <= LATEST_S:
        raise ValueError(
            f"{value[:40]!r} is not a time; write it as 2026-11-01, 2026-11-01T12:00:00Z (UTC unless it says otherwise) or in "
            "seconds since 1970. A number of four digits is a year."
        )
    return found


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


def _stripped(text: str) -> str | None:
    return text.strip() or None


def _or_none(text: str | None) -> str | None:
    """A number that is left empty counts as not given."""
    return text or None


def _free_text(note: str) -> Any:
    return Query(description=note, max_length=MAX_REASON, json_schema_extra={"pattern": PRINTABLE})


def _owner_or_all(text: str) -> str:
    if not text or len(text) > MAX_TEXT or not is_printable(text) or re.search(r"\s", text):
        raise ValueError(
            f"{show(text)} is not the name of an owner; it must have at most {MAX_TEXT} printable characters without blanks, or be "
            "* for all others"
        )
    return text


def _process_name(text: str) -> str:
    # A server decodes bytes of the path that are not UTF-8 to a character that no process has in its name.
    is_text = "\N{REPLACEMENT CHARACTER}" not in text
    if len(text) > MAX_PROCESS_NAME or not is_text or not is_printable(text) or not text.strip():
        raise ValueError(
            f"{show(text)} is not a process name; it must be 1 to {MAX_PROCESS_NAME} printable characters, as `ps -o comm` shows "
            "them"
        )
    return text


def _decimal(text: str) -> str:
    """Refuse the underscores, blanks and exponents that numbers of Python may have."""
    if not _DECIMAL.fullmatch(text.removeprefix("-")):
        raise PydanticKnownError("float_parsing")
    return text


Time = Annotated[
    float, BeforeValidator(_time), WithJsonSchema({"type": "string", "maxLength": MAX_TIME, "pattern": PRINTABLE})
]
LeaseId = Annotated[str, AfterValidator(check_lease_id), Path(json_schema_extra={"pattern": LEASE_ID})]
WaitS = Annotated[
    float,
    Query(ge=0, le=MAX_WAIT_S, description="How long to hold the answer back while the request is queued, in seconds."),
    BeforeValidator(_decimal),
]
Devices = Annotated[Literal["index", "uuid"], Query(description="How `env` names the GPUs.")]
AsHolder = Annotated[
    Literal["holder"] | None,
    Query(
        alias="as",
        description="`holder`: the lease's own holder releases it; its process may go on and leave a context.",
    ),
]
ReasonWords = Annotated[
    str | None,
    _free_text("Why, in words. The holder, the log and the events show it."),
    AfterValidator(check_printable),
    AfterValidator(_stripped),
]
QueueLimit = Annotated[
    int | None,
    Query(ge=0, le=MAX_QUEUE, description="Show at most this many waiters."),
    BeforeValidator(_or_none),
]
GpusAsked = Annotated[
    int | None, Query(ge=1, le=MAX_GPUS, description="This many GPUs of one box."), BeforeValidator(_or_none)
]
ModelAsked = Annotated[
    str | None,
    Query(max_length=MAX_MODEL, description="A word of the GPU's name, or a pattern."),
    AfterValidator(_stripped),
]
LeasesLimit = Annotated[
    int | None,
    Query(ge=0, le=MAX_QUEUE, description="Show at most this many leases that are not queued."),
    BeforeValidator(_or_none),
]
PaceS = Annotated[
    float | None,
    Query(
        ge=FEWEST_PACE_S,
        le=MOST_PACE_S,
        description="Send only the event `changed`, at most once in this many seconds.",
    ),
    BeforeValidator(_decimal),
]
Hours = Annotated[
    float,
    Query(ge=FEWEST_HOURS, le=MOST_HOURS, description="How far back from now, in hours."),
    BeforeValidator(_decimal),
]
Since = Annotated[
    Time | None,
    Query(
        description="Start of the span: ISO 8601 (UTC unless it says otherwise) or seconds since 1970. Default: a day before "
        "its end."
    ),
]
Until = Annotated[Time | None, Query(description="End of the span, likewise. Default: now.")]
OwnerInPath = Annotated[str, AfterValidator(_owner_or_all)]
ProcessName = Annotated[str, AfterValidator(_process_name)]
