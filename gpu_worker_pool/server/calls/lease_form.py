"""What is sent to ask for a lease or to renew some: its fields, their bounds, and every fault in words."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.gpu_names import GPU_NAME, MAX_NAME, MAX_NAMES, as_gpu_names
from gpu_worker_pool.core.model.request import DEFAULT_TTL_S, MAX_GPUS, MAX_PRIORITY, MAX_TTL_S, Holder, Request, Wishes

MIN_TTL_S = 0.1
MAX_WAIT_S = 300.0
MAX_MEMORY_MB = 1e9
MAX_PID = 2**23
MAX_IDS = 1000
MAX_LABELS = 32
MAX_TEXT = 256
MAX_MODEL = 128
MAX_FAULTS = 5

# Neither control characters nor those that break a line or turn its direction: these texts stand in logs and terminals.
# The same pattern is read by Python, by pydantic's Rust and, from the OpenAPI document, by others.
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]*$"
_PRINTABLE = re.compile(PRINTABLE.removesuffix("$") + r"\Z")
LABEL_KEY = re.compile(r"[A-Za-z0-9._/-]{1,64}")
# Signs that need no escape in a URL; "." and ".." would not arrive, as a path is shortened by them.
LEASE_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._~-]{1,128}")


class BadForm(ValueError):  # noqa: N818 - reads as what it is
    """What was sent cannot be used: 400 where it could not be read, 422 where it was read and makes no sense."""

    def __init__(self, detail: str, status: int = 422) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def check_lease_id(text: str) -> str:
    """The id itself; BadForm if it is none."""
    if not LEASE_ID.fullmatch(text):
        raise BadForm(f"{_show(text)} is no lease id; 1 to 128 letters, digits, or any of . _ ~ - are possible.")
    return text


def _check_model(text: str | None) -> str | None:
    if text is not None and not text.strip():
        raise ValueError("it is blank; leave it out to take any model")
    return text


def _check_among(names: object) -> object:
    # By hand and before pydantic: numbers will do as well, and one sentence is enough for a thousand wrong ones.
    if not isinstance(names, list):
        return names
    try:
        return as_gpu_names(names)
    except ValueError as error:
        raise ValueError(f"it {str(error).removeprefix('among ')}") from None


def _check_labels(labels: object) -> object:
    # By hand and before pydantic: one sentence, however many of thousands of labels are wrong.
    if not isinstance(labels, dict):
        return labels
    if len(labels) > MAX_LABELS:
        raise ValueError(f"{len(labels)} are too many; at most {MAX_LABELS} are possible")
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key):
            raise ValueError(f"the key {_show(key)} is not usable; 1 to 64 of A-Z a-z 0-9 . _ / - are possible")
        if not isinstance(value, str) or len(value) > MAX_TEXT or not _is_printable(value):
            raise ValueError(f"{key} is {_show(value)}; at most {MAX_TEXT} printable characters are possible")
    return labels


Text = Annotated[str | None, Field(max_length=MAX_TEXT, pattern=PRINTABLE)]
Percent = Annotated[float | None, Field(ge=0, le=100)]
Labels = Annotated[dict[str, str], BeforeValidator(_check_labels), Field(max_length=MAX_LABELS)]
_GPU_NAME_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_NAME, "pattern": f"^(?:{GPU_NAME})$"},
        {"type": "integer", "minimum": 0},
    ]
}
Among = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(_check_among),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "minItems": 1, "maxItems": MAX_NAMES, "items": _GPU_NAME_SCHEMA},
                {"type": "null"},
            ]
        }
    ),
]
LeaseId = Annotated[
    str,
    AfterValidator(check_lease_id),
    WithJsonSchema({"type": "string", "pattern": r"^(?!\.{1,2}$)[A-Za-z0-9._~-]{1,128}$"}),
]


class Form(BaseModel):
    """Taken literally: no unknown fields, no numbers in quotes, no true for 1, nothing infinite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class LeaseForm(Form):
    """What is asked for, and who asks. Everything may be left out."""

    gpus: int = Field(1, ge=1, le=MAX_GPUS, description="How many, all on this node, all or nothing.")
    memory_mb: float | None = Field(
        None, ge=1, le=MAX_MEMORY_MB, description="Share each GPU and use this much of it; without it, it is exclusive."
    )
    model: Annotated[str | None, AfterValidator(_check_model)] = Field(
        None, max_length=MAX_MODEL, pattern=PRINTABLE, description="A word of the GPU's name, or a pattern: *A100*."
    )
    among: Among = Field(
        None, description="Only these GPUs: indices as nvidia-smi has them, UUIDs, or unambiguous beginnings of UUIDs."
    )
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Higher is served first.")
    ttl_s: float = Field(
        DEFAULT_TTL_S, ge=MIN_TTL_S, le=MAX_TTL_S, description="Ends after so long without a sign of life."
    )
    wait_s: float = Field(0.0, ge=0, le=MAX_WAIT_S, description="How long the answer may be held back while queued.")
    memory_threshold_percent: Percent = None
    utilization_threshold_percent: Percent = None
    worker_id: Text = None
    owner: Text = None
    host: Text = None
    pid: int | None = Field(None, ge=1, le=MAX_PID)
    pid_started: float | None = Field(
        None, ge=0, le=1e15, description="In clock ticks since the machine was started, as /proc has it."
    )
    boot_id: Text = None
    pid_namespace: Text = None
    labels: Labels = Field(default_factory=dict)

    def to_request(self, owner: str | None, process: ProcessId | None, *, max_ttl_s: float = MAX_TTL_S) -> Request:
        """For the core: with the owner that was proven or let pass, and the process where it is one of this node."""
        if self.ttl_s > max_ttl_s:
            raise BadForm(f"ttl_s: {self.ttl_s:g} is out of range; {_range(MIN_TTL_S, max_ttl_s)}.")
        return Request(
            wishes=Wishes(
                gpus=self.gpus,
                memory_mb=self.memory_mb,
                model=self.model,
                memory_threshold_percent=self.memory_threshold_percent,
                utilization_threshold_percent=self.utilization_threshold_percent,
                among=self.among,
            ),
            holder=Holder(
                worker_id=self.worker_id,
                owner=owner,
                host=self.host,
                pid=self.pid,
                pid_started=self.pid_started,
                boot_id=self.boot_id,
                pid_namespace=self.pid_namespace,
                process=process,
            ),
            priority=self.priority,
            ttl_s=self.ttl_s,
            # In one order, so that the same labels are the same request.
            labels=tuple(sorted(self.labels.items())),
        )


class RenewForm(Form):
    """The leases that show a sign of life."""

    ids: list[LeaseId] = Field(min_length=1, max_length=MAX_IDS)


FormT = TypeVar("FormT", bound=Form)


def parse_form(model: type[FormT], body: bytes) -> FormT:
    """The form in a body, an empty one being `{}`; BadForm, with a sentence for each of the first faults, otherwise."""
    data = _read_object(body) if body else {}
    unknown = data.keys() - model.model_fields.keys()
    if not unknown:
        try:
            return model.model_validate(data)
        except ValidationError as error:
            raise _bad_form(_faults(model, error)) from None
    # Sorted out by hand: pydantic would make an error of each of thousands.
    first = islice((name for name in data if name in unknown), MAX_FAULTS + 1)
    faults = [_unknown_fault(model, name) for name in first]
    try:
        model.model_validate({name: value for name, value in data.items() if name not in unknown})
    except ValidationError as error:
        faults += _faults(model, error)
    raise _bad_form(faults)


# --- JSON ----------------------------------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        for name, _ in pairs:
            if fields.pop(name, pairs) is pairs:  # taken out already, so it was there before
                raise BadForm(f"{_show(name)} is there twice; send each field once.")
    return fields


def _whole(digits: str) -> int | float:
    # Beyond every range here, and Python reads no number of thousands of digits: a float, if need be infinite, will do.
    return int(digits) if len(digits) <= 30 else float(digits)


# Python's own reader, because it shows every pair, so that a name that comes twice is seen at next to no cost.
# It lets NaN and Infinity pass; then the field they stand in is named, as no field takes them.
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole)


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        data = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise BadForm(f"The body is not UTF-8, from byte {error.start + 1} on; send JSON in UTF-8.", 400) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise BadForm(f"The body is not JSON ({where}): {error.msg}.", 400) from None
    except RecursionError:
        raise BadForm("The body is nested too deeply; send one object of plain fields.") from None
    if not isinstance(data, dict):
        raise BadForm(f"The body is {_show(data)}; send an object of fields.")
    return data


# --- faults in words -----------------------------------------------------------------------------------------------


def _bad_form(faults: list[str]) -> BadForm:
    said = [fault if fault[-1] in ".?" else f"{fault}." for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        said.append("And more.")
    return BadForm(" ".join(said))


def _unknown_fault(model: type[Form], name: str) -> str:
    known = list(model.model_fields)
    # Not for texts of any length: comparing is slow.
    close = get_close_matches(name, known, n=2) if len(name) <= 64 else []
    hint = f"did you mean {' or '.join(close)}?" if close else f"possible are {', '.join(known)}"
    return f"{_show(name).strip(chr(34))}: there is no such field; {hint}"


def _faults(model: type[Form], error: ValidationError) -> list[str]:
    return [_fault(model, item) for item in error.errors(include_url=False)[: MAX_FAULTS + 1]]


def _fault(model: type[Form], error: ErrorDetails) -> str:
    """One sentence: the field, what was wrong, and what is possible."""
    place = ".".join(map(str, error["loc"]))
    value, context = _show(error["input"]), error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal" | "less_than_equal":
            return f"{place}: {value} is out of range; {_possible(model, place)}"
        case "int_type" | "int_from_float":
            return f"{place}: {value} is not a whole number; {_possible(model, place)}"
        case "float_type" | "finite_number":
            return f"{place}: {value} is not a finite number; {_possible(model, place)}"
        case "string_too_long":
            return (
                f"{place}: {len(error['input'])} characters are too many; at most {context['max_length']} are possible"
            )
        case "string_pattern_mismatch" | "string_unicode":
            return f"{place}: {value} has characters that cannot be printed; leave them out"
        case "missing":
            return f"{place} is missing; send it"
        case "too_short" | "too_long":
            return f"{place}: 1 to {MAX_IDS} are possible"
        case "value_error":
            return f"{place}: {context['error']}"
    wanted = {"string_type": "a text", "list_type": "a list", "tuple_type": "a list", "dict_type": "an object"}
    return f"{place}: {value} is not {wanted.get(error['type'], 'usable')}"


def _possible(model: type[Form], field: str) -> str:
    bounds = model.model_fields[field].metadata
    low = next(bound.ge for bound in bounds if isinstance(bound, Ge))
    high = next(bound.le for bound in bounds if isinstance(bound, Le))
    return _range(low, high)


def _range(low: object, high: object) -> str:
    return f"{_number(low)} to {_number(high)} are possible"


def _number(value: object) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _is_printable(text: str) -> bool:
    return _PRINTABLE.match(text) is not None and not any("\ud800" <= sign <= "\udfff" for sign in text)


def _show(value: object) -> str:
    """What was sent, short, in ASCII, and without going into it: it may be large, or deep."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 40 else f"{value[:40]}...")
    return json.dumps(value)
