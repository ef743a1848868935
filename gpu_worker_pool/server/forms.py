"""The bodies that callers send, and the types of the parameters in paths and queries, each with its bounds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from fastapi import Path, Query
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, ConfigDict, Field, Strict, WithJsonSchema
from pydantic_core import PydanticKnownError

from gpu_worker_pool.core.model.bounds import DEFAULT_TTL_S, MAX_TTL_S
from gpu_worker_pool.core.model.configured import MAX_NOTE, MAX_QUOTA, MAX_WEIGHT
from gpu_worker_pool.core.model.gpu_names import GPU_NAME, MAX_NAME, MAX_NAMES, as_gpu_names
from gpu_worker_pool.core.model.request import MAX_GPUS, MAX_NODES, MAX_PRIORITY, MAX_TIME_LIMIT_S
from gpu_worker_pool.wire.bounds import (
    FEWEST_HOURS,
    FEWEST_PACE_S,
    LEASE_ID,
    MAX_IDS,
    MAX_LABELS,
    MAX_LABELS_BYTES,
    MAX_MEMORY_MB,
    MAX_MODEL,
    MAX_PID,
    MAX_PROCESS_NAME,
    MAX_QUEUE,
    MAX_REASON,
    MAX_RENEW_WAIT_S,
    MAX_TEXT,
    MAX_TIME,
    MAX_WAIT_S,
    MIN_TTL_S,
    MOST_HOURS,
    MOST_PACE_S,
    PRINTABLE,
    is_label_key,
    is_lease_id,
    is_printable,
)

from .http.validation import show

# Unknown fields are refused: a misspelt wish must not be dropped in silence.
STRICT = ConfigDict(extra="forbid")


def _printable(text: str) -> str:
    if not is_printable(text):
        raise ValueError(f"{show(text)} has characters that cannot be printed; leave them out")
    return text


def _shown_everywhere(text: str) -> str:
    """Check a name that every terminal shows: owners that look the same would be taken for one."""
    if not text.isprintable():
        raise ValueError(f"{show(text)} has characters that are not shown everywhere; use letters, digits and signs")
    return text


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("it is blank; leave it out to take any model")
    return text


def _lease_id(text: str) -> str:
    if not is_lease_id(text):
        raise ValueError(f"{show(text)} is not a lease id; it must be 1 to 128 letters, digits or signs (. _ ~ -).")
    return text


def _gpu_names(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"{show(value)} is not a list")  # noqa: TRY004 - pydantic reports a ValueError as a fault
    try:
        return as_gpu_names(value)
    except ValueError as error:
        raise ValueError(f"it {str(error).removeprefix('among ')}") from None


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


def _labels(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{show(value)} is not an object")  # noqa: TRY004 - as above
    if len(value) > MAX_LABELS:
        raise ValueError(f"{len(value)} are too many; there must be at most {MAX_LABELS}")
    for key, text in value.items():
        if not is_label_key(key):
            raise ValueError(f"the key {show(key)} is not valid; it must be 1 to 64 letters, digits or signs (. _ / -)")
        if not isinstance(text, str) or len(text) > MAX_TEXT or not is_printable(text):
            raise ValueError(f"{key} is {show(text)}; it must be a text of at most {MAX_TEXT} printable characters")
    size = sum(len(key) + len(text.encode()) for key, text in value.items())
    if size > MAX_LABELS_BYTES:
        raise ValueError(
            f"keys and values together have {size} bytes of UTF-8; there must be at most {MAX_LABELS_BYTES}. Keep a long "
            "text elsewhere, and put its name here"
        )
    return value


def _some_queued(number: int) -> int:
    if number == 0:
        raise ValueError("0 keeps every request out, since each waits for a moment; give 1 or more, or set gpus to 0")
    return number


Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False)]  # noqa: FBT003 - pydantic's own
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), AfterValidator(_printable), Field(json_schema_extra={"pattern": PRINTABLE})]
Name = Annotated[Text, MaxLen(MAX_TEXT)]
Owner = Annotated[Name, AfterValidator(_shown_everywhere)]
Model = Annotated[Text, MaxLen(MAX_MODEL), AfterValidator(_not_blank)]
Reason = Annotated[Text, MaxLen(MAX_REASON)]
Time = Annotated[
    float, BeforeValidator(_time), WithJsonSchema({"type": "string", "maxLength": MAX_TIME, "pattern": PRINTABLE})
]
Percent = Annotated[Number, Ge(0), Le(100)]
Gpus = Annotated[Whole, Ge(1), Le(MAX_GPUS)]
IdInForm = Annotated[str, Strict(), AfterValidator(_lease_id), Field(json_schema_extra={"pattern": LEASE_ID})]

_GPU_NAME_SCHEMA = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_NAME, "pattern": f"^(?:{GPU_NAME})$"},
        {"type": "integer", "minimum": 0},
    ]
}
_GPU_NAMES_SCHEMA = {"type": "array", "minItems": 1, "maxItems": MAX_NAMES, "items": _GPU_NAME_SCHEMA}
GpuNames = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(_gpu_names),
    WithJsonSchema({"anyOf": [_GPU_NAMES_SCHEMA, {"type": "null"}]}),
]
Labels = Annotated[Mapping[str, str], BeforeValidator(_labels), Field(max_length=MAX_LABELS)]


def noted(text: str) -> Any:
    """The description of a field in the OpenAPI document."""
    return Field(description=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseForm:
    """A request for a lease, and its holder. Every field may be left out."""

    __pydantic_config__ = STRICT

    gpus: Annotated[Gpus, noted("Number of GPUs, all on this node, all or nothing.")] = 1
    memory_mb: Annotated[
        Annotated[Number, Ge(1), Le(MAX_MEMORY_MB)] | None,
        noted("Memory for this lease on each GPU, which is then shared; without it, the GPU is exclusive."),
    ] = None
    model: Annotated[Model | None, noted("A word of the GPU's name, or a pattern: *A100*.")] = None
    among: Annotated[
        GpuNames, noted("Only these GPUs: indices as nvidia-smi shows them, UUIDs, or unambiguous beginnings of UUIDs.")
    ] = None
    priority: Annotated[Whole, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY), noted("Higher is served first.")] = 0
    ttl_s: Annotated[
        Number, Ge(MIN_TTL_S), Le(MAX_TTL_S), noted("The lease expires after this time without a heartbeat.")
    ] = DEFAULT_TTL_S
    wait_s: Annotated[
        Number,
        Ge(0),
        Le(MAX_WAIT_S),
        noted("How long the server may hold back the answer while the request is queued."),
    ] = 0.0
    memory_threshold_percent: Percent | None = None
    utilization_threshold_percent: Percent | None = None
    worker_id: Name | None = None
    owner: Owner | None = None
    host: Name | None = None
    pid: Annotated[Whole, Ge(1), Le(MAX_PID)] | None = None
    pid_started: Annotated[
        Annotated[Number, Ge(0), Le(1e15)] | None,
        noted("Start time of the process in clock ticks since boot, as in /proc."),
    ] = None
    boot_id: Name | None = None
    pid_namespace: Name | None = None
    labels: Labels = field(default_factory=dict)
    time_limit_s: Annotated[
        Annotated[Number, Ge(1), Le(MAX_TIME_LIMIT_S)] | None,
        noted("The lease ends this long after its grant. With it, GPUs may be had that are reserved for later."),
    ] = None
    preemptible: Annotated[
        Flag, noted("Whether the lease may be ended, after a warning, when another request needs its GPUs.")
    ] = False
    nodes: Annotated[
        Whole,
        Ge(1),
        Le(MAX_NODES),
        noted("`gpus` on each of this many nodes, all or nothing; more than 1 only of a fleet."),
    ] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewForm:
    """The leases to renew."""

    __pydantic_config__ = STRICT

    ids: Annotated[tuple[IdInForm, ...], MinLen(1), MaxLen(MAX_IDS)]
    wait_s: Annotated[
        Number,
        Ge(0),
        Le(MAX_RENEW_WAIT_S),
        noted("How long to hold back the answer while none of the leases has ended or been warned."),
    ] = 0.0
    warned: Annotated[
        tuple[IdInForm, ...],
        MaxLen(MAX_IDS),
        noted("Of these leases the caller knows the warning; only a change of it is told at once."),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainForm:
    """The reason for taking a GPU out of service, and from when on."""

    __pydantic_config__ = STRICT

    reason: Reason = ""
    at: Annotated[Time | None, noted("ISO 8601, or seconds since 1970; without it, now.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BookingForm:
    """GPUs to keep for an owner in a span of time. Without `among` the server chooses them."""

    __pydantic_config__ = STRICT

    gpus: Annotated[Gpus, noted("Number of GPUs, all on this node.")] = 1
    model: Model | None = None
    among: GpuNames = None
    starts_at: Annotated[Time, noted("ISO 8601, or seconds since 1970, as a string.")]
    ends_at: Annotated[Time, noted("ISO 8601, or seconds since 1970, as a string.")]
    owner: Annotated[Owner | None, noted("For whom; without it, the caller.")] = None
    reason: Reason = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaForm:
    """What an owner may use. Fields that are left out, or null, have no limit."""

    __pydantic_config__ = STRICT

    gpus: Annotated[
        Annotated[Whole, Ge(0), Le(MAX_QUOTA)] | None,
        noted("The owner never has more GPUs than this; preemptible leases do not count."),
    ] = None
    weight: Annotated[Number, Ge(0.001), Le(MAX_WEIGHT), noted("The owner's part in a fair share.")] = 1.0
    max_priority: Annotated[Whole, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY)] | None = None
    max_time_limit_s: Annotated[Number, Ge(1), Le(MAX_TIME_LIMIT_S)] | None = None
    max_queued: Annotated[
        Annotated[Whole, Ge(0), Le(MAX_QUOTA), AfterValidator(_some_queued)] | None,
        noted("This many requests may wait. To keep an owner out, set gpus to 0."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenForm:
    """A token to accept."""

    __pydantic_config__ = STRICT

    name: Annotated[Name, noted("Whose it is: the owner of leases that are requested with it.")]
    role: Literal["user", "operator", "administrator"] = "user"
    note: Annotated[Text, MaxLen(MAX_NOTE), noted("Where it is used, in words.")] = ""


# --- parameters ----------------------------------------------------------------------------------------------------


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
    """Refuse the underscores, signs and exponents that Python's numbers may have."""
    if not _DECIMAL.fullmatch(text):
        raise PydanticKnownError("float_parsing")
    return text


LeaseId = Annotated[str, AfterValidator(_lease_id), Path(json_schema_extra={"pattern": LEASE_ID})]
WaitS = Annotated[
    float,
    AllowInfNan(False),  # noqa: FBT003 - as above
    Query(ge=0, le=MAX_WAIT_S, description="How long to hold the answer back while the request is queued, in seconds."),
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
    AfterValidator(_printable),
    AfterValidator(_stripped),
]
QueueLimit = Annotated[
    int | None,
    Query(ge=0, le=MAX_QUEUE, description="Show at most this many waiters."),
    BeforeValidator(_or_none),
]
LeasesLimit = Annotated[
    int | None,
    Query(ge=0, le=MAX_QUEUE, description="Show at most this many leases that are not queued."),
    BeforeValidator(_or_none),
]
PaceS = Annotated[
    float | None,
    AllowInfNan(False),  # noqa: FBT003 - as above
    Query(
        ge=FEWEST_PACE_S,
        le=MOST_PACE_S,
        description="Send only the event `changed`, at most once in this many seconds.",
    ),
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
PageHours = Annotated[Literal["1", "6", "24", "168"], Query(description="How far back from now, in hours.")]
PageWeeks = Annotated[Literal["4", "12"], Query(description="How many weeks, with this one.")]
