"""The bodies that callers send, each field with its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, ConfigDict, Field, Strict, WithJsonSchema

from gpu_worker_pool.core.model.bounds import DEFAULT_TTL_S, MAX_TTL_S
from gpu_worker_pool.core.model.configured import MAX_MEMBERS, MAX_NOTE, MAX_QUOTA, MAX_WEIGHT
from gpu_worker_pool.core.model.request import (
    GPU_NAME,
    MAX_GPUS,
    MAX_NAME,
    MAX_NAMES,
    MAX_NODES,
    MAX_PRIORITY,
    MAX_TIME_LIMIT_S,
    Holder,
    Request,
    Wishes,
    as_gpu_names,
)
from gpu_worker_pool.wire.bounds import (
    LEASE_ID,
    MAX_IDS,
    MAX_LABELS,
    MAX_LABELS_BYTES,
    MAX_MEMORY_MB,
    MAX_MODEL,
    MAX_PID,
    MAX_REASON,
    MAX_RENEW_WAIT_S,
    MAX_TEXT,
    MAX_WAIT_S,
    MIN_TTL_S,
    PRINTABLE,
    is_label_key,
)

from .encoding import shared_fields
from .http.validation import show
from .parameters import Time, check_lease_id, check_printable

# Unknown fields are refused: a misspelt wish must not be dropped in silence.
STRICT = ConfigDict(extra="forbid")


def _shown_everywhere(text: str) -> str:
    """Check a name that every terminal shows: owners that look the same would be taken for one."""
    if not text.isprintable():
        raise ValueError(f"{show(text)} has characters that are not shown everywhere; use letters, digits and signs")
    return text


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("it is blank; leave it out to take any model")
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


def _label_key(key: str) -> str:
    if not is_label_key(key):
        raise ValueError(f"the key {show(key)} is not valid; it must be 1 to 64 letters, digits or signs (. _ / -)")
    return key


def _labels(value: dict[str, str]) -> dict[str, str]:
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
_PRINTED: Any = Field(json_schema_extra={"pattern": PRINTABLE})
Text = Annotated[str, Strict(), AfterValidator(check_printable), _PRINTED]
Name = Annotated[str, Strict(), MaxLen(MAX_TEXT), AfterValidator(check_printable), _PRINTED]
Owner = Annotated[Name, AfterValidator(_shown_everywhere)]
Model = Annotated[
    str, Strict(), MaxLen(MAX_MODEL), AfterValidator(check_printable), AfterValidator(_not_blank), _PRINTED
]
Reason = Annotated[str, Strict(), MaxLen(MAX_REASON), AfterValidator(check_printable), _PRINTED]
Note = Annotated[str, Strict(), MaxLen(MAX_NOTE), AfterValidator(check_printable), _PRINTED]
Percent = Annotated[Number, Ge(0), Le(100)]
Gpus = Annotated[Whole, Ge(1), Le(MAX_GPUS)]
IdInForm = Annotated[str, Strict(), AfterValidator(check_lease_id), Field(json_schema_extra={"pattern": LEASE_ID})]

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
Labels = Annotated[
    dict[Annotated[str, AfterValidator(_label_key)], Name],
    MaxLen(MAX_LABELS),
    AfterValidator(_labels),
    WithJsonSchema({"type": "object", "maxProperties": MAX_LABELS, "additionalProperties": {"type": "string"}}),
]


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
    model: Annotated[
        Model | None, noted("A word of the GPU's name, or a pattern: *A100*; or several, separated by commas.")
    ] = None
    min_memory_mb: Annotated[
        Annotated[Number, Ge(1), Le(MAX_MEMORY_MB)] | None,
        noted("Only GPUs that are sold with at least this much memory: 40960 for 40 GB."),
    ] = None
    among: Annotated[
        GpuNames, noted("Only these GPUs: indices as nvidia-smi shows them, UUIDs, or unambiguous beginnings of UUIDs.")
    ] = None
    exclude: Annotated[GpuNames, noted("None of these GPUs, named as in `among`.")] = None
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

    def holder(self, owner: str | None) -> Holder:
        """The holder that it names, with the owner that was proven or accepted."""
        return Holder(**{**shared_fields(Holder, self), "owner": owner})

    def request(self, holder: Holder, node: str | None = None) -> Request:
        """The request for the core, with the only node that it means. ValueError where the core does not allow it."""
        wishes = Wishes(node=node, **shared_fields(Wishes, self))
        labels = tuple(sorted(self.labels.items()))  # so that the same labels make the same request
        return Request(**{**shared_fields(Request, self), "wishes": wishes, "holder": holder, "labels": labels})


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
class GroupForm:
    """Owners who share a quota, or have first right on GPUs."""

    __pydantic_config__ = STRICT

    members: Annotated[
        tuple[Owner, ...],
        MinLen(1),
        MaxLen(MAX_MEMBERS),
        noted("Owners; a Unix group of the server's machine as @name."),
    ]
    quota: Annotated[
        Annotated[Whole, Ge(0), Le(MAX_QUOTA)] | None,
        noted("Together they never have more GPUs than this; preemptible leases do not count."),
    ] = None
    first_right: Annotated[
        tuple[Name, ...],
        MaxLen(MAX_NAMES),
        noted("GPUs on which their requests go first: `box1:4-7`, `box1`, `4-7`, or a UUID."),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenForm:
    """A token to accept."""

    __pydantic_config__ = STRICT

    name: Annotated[Name, noted("Whose it is: the owner of leases that are requested with it.")]
    role: Literal["user", "operator", "administrator"] = "user"
    note: Annotated[Note, noted("Where it is used, in words.")] = ""
