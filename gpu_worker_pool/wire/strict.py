"""Reads a caller's body strictly: no unknown fields, no numbers in quotes, no true for 1, no infinities."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import lru_cache, partial
from itertools import islice
from math import isfinite
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from gpu_worker_pool.core.model.gpu_names import as_gpu_names

from .bounds import (
    MAX_IDS,
    MAX_LABELS,
    MAX_LABELS_BYTES,
    MAX_MODEL,
    MAX_TEXT,
    Printable,
    Range,
    is_label_key,
    is_lease_id,
    is_printable,
)

MAX_FAULTS = 5
FormT = TypeVar("FormT")


class FormError(ValueError):
    """A body that cannot be used: 400 if it cannot be read, 422 if a value is invalid."""

    def __init__(self, detail: str, status: int = 422) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def parse_form(kind: type[FormT], body: bytes) -> FormT:
    """Read a form; an empty body counts as `{}`. A FormError has a sentence for each of the first faults."""
    data = _read_object(body) if body else {}
    hashable: Any = kind
    known = _fields(hashable)
    unknown = (name for name in data if name not in known)
    faults = [_unknown_fault(known, name) for name in islice(unknown, MAX_FAULTS + 1)]
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name in data:
            value = data[name]
            try:
                values[name] = None if value is None and field.is_nullable else field.check(name, value)
            except _Faults as found:
                faults += found.args[0]
        elif field.is_required:
            faults.append(f"{name} is missing; send it")
    if faults:
        raise _error(faults)
    return kind(**values)


def check_lease_id(text: str) -> str:
    """Return the id; FormError if it is invalid."""
    if not is_lease_id(text):
        raise FormError(_not_an_id(text))
    return text


def _not_an_id(text: str) -> str:
    return f"{_show(text)} is not a lease id; it must be 1 to 128 letters, digits or signs (. _ ~ -)."


class _Field(NamedTuple):
    check: Callable[[str, Any], Any]
    is_nullable: bool
    is_required: bool


class _Faults(Exception):  # noqa: N818 - several of them
    pass


@lru_cache(maxsize=16)
def _fields(kind: type) -> dict[str, _Field]:
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for item in fields(kind):
        hint = hints[item.name]
        bounds = getattr(hint, "__metadata__", ())
        bare = hint.__origin__ if bounds else hint
        is_nullable = type(None) in get_args(bare)
        is_required = item.default is MISSING and item.default_factory is MISSING
        found[item.name] = _Field(_CHECKS.get(item.name) or _check_of(bare, bounds), is_nullable, is_required)
    return found


def _check_of(bare: Any, bounds: tuple[Any, ...]) -> Callable[[str, Any], Any]:
    if bare is bool:
        return _truth
    for bound in bounds:
        if isinstance(bound, Printable):
            return partial(_text, longest=bound.longest)
        if isinstance(bound, Range):
            return partial(_number, limits=bound, is_whole=int in (bare, *get_args(bare)))
    raise TypeError(f"{bare} has neither bounds nor a check of its own")


def _number(name: str, value: Any, limits: Range, *, is_whole: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float) or not isfinite(value):
        raise _fault(name, f"{_show(value)} is not a {'whole' if is_whole else 'finite'} number; it must be {limits}")
    if not limits.low <= value <= limits.high:
        raise _fault(name, f"{_show(value)} is out of range; it must be {limits}")
    return value if is_whole else float(value)


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _fault(name, f"{_show(value)} is neither true nor false")
    return value


def _text(name: str, value: Any, longest: int) -> str:
    if not isinstance(value, str):
        raise _fault(name, f"{_show(value)} is not a text")
    if len(value) > longest:
        raise _fault(name, f"{len(value)} characters are too many; there must be at most {longest}")
    if not is_printable(value):
        raise _fault(name, f"{_show(value)} has characters that cannot be printed; leave them out")
    return value


def _owner(name: str, value: Any) -> str:
    """A name that every terminal shows: owners that look the same would be taken for one."""
    text = _text(name, value, MAX_TEXT)
    if not text.isprintable():
        raise _fault(
            name, f"{_show(value)} has characters that are not shown everywhere; use letters, digits and signs"
        )
    return text


def _model(name: str, value: Any) -> str:
    text = _text(name, value, MAX_MODEL)
    if not text.strip():
        raise _fault(name, "it is blank; leave it out to take any model")
    return text


def _among(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _fault(name, f"{_show(value)} is not a list")
    try:
        return as_gpu_names(value)
    except ValueError as error:
        raise _fault(name, f"it {str(error).removeprefix('among ')}") from None


def _labels(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _fault(name, f"{_show(value)} is not an object")
    if len(value) > MAX_LABELS:
        raise _fault(name, f"{len(value)} are too many; there must be at most {MAX_LABELS}")
    for key, text in value.items():
        if not is_label_key(key):
            raise _fault(
                name, f"the key {_show(key)} is not valid; it must be 1 to 64 letters, digits or signs (. _ / -)"
            )
        if not isinstance(text, str) or len(text) > MAX_TEXT or not is_printable(text):
            raise _fault(name, f"{key} is {_show(text)}; it must be a text of at most {MAX_TEXT} printable characters")
    size = sum(len(key) + len(text.encode()) for key, text in value.items())
    if size > MAX_LABELS_BYTES:
        raise _fault(
            name,
            f"keys and values together have {size} bytes of UTF-8; there must be at most {MAX_LABELS_BYTES}. Keep a long "
            "text elsewhere, and put its name here",
        )
    return value


def _ids(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _fault(name, f"{_show(value)} is not a list")
    least = 0 if name == "warned" else 1
    if not least <= len(value) <= MAX_IDS:
        raise _fault(name, f"there are {len(value)}; there must be {least} to {MAX_IDS}")
    faults = []
    for number, item in enumerate(value):
        if not isinstance(item, str):
            faults.append(f"{name}.{number}: {_show(item)} is not a text")
        elif not is_lease_id(item):
            faults.append(f"{name}.{number}: {_not_an_id(item)}")
    if faults:
        raise _Faults(faults[: MAX_FAULTS + 1])
    return tuple(value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "owner": _owner,
    "model": _model,
    "among": _among,
    "labels": _labels,
    "ids": _ids,
    "warned": _ids,
}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        for name, _ in pairs:
            if found.pop(name, pairs) is pairs:  # removed already, so it is repeated
                raise FormError(f"{_show(name)} is there twice; send each field once.")
    return found


def _whole(digits: str) -> int | float:
    # Beyond every range here, and Python refuses to convert thousands of digits: a float will do, even an infinite one.
    return int(digits) if len(digits) <= 30 else float(digits)


# Python's decoder passes on every pair, so a repeated name is found at almost no cost. It accepts NaN and Infinity; no
# field does, so the fault names the field.
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole)


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        data = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise FormError(f"The body is not UTF-8, from byte {error.start + 1} on; send JSON in UTF-8.", 400) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise FormError(f"The body is not JSON ({where}): {error.msg}.", 400) from None
    except RecursionError:
        raise FormError("The body is nested too deeply; send one object of plain fields.") from None
    if not isinstance(data, dict):
        raise FormError(f"The body is {_show(data)}; send an object of fields.")
    return data


def _fault(name: str, text: str) -> _Faults:
    return _Faults([f"{name}: {text}"])


def _error(faults: list[str]) -> FormError:
    sentences = [fault if fault[-1] in ".?" else f"{fault}." for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        sentences.append("And more.")
    return FormError(" ".join(sentences))


def _unknown_fault(known: dict[str, _Field], name: str) -> str:
    # Comparing long texts is slow.
    close = get_close_matches(name, known, n=2) if len(name) <= 64 else []
    hint = f"did you mean {' or '.join(close)}?" if close else f"it must be one of {', '.join(known)}"
    return f"{_show(name).strip(chr(34))}: there is no such field; {hint}"


def _show(value: object) -> str:
    """Quote a value briefly, in ASCII, and without its parts: it may be large or deep."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 40 else f"{value[:40]}...")
    return json.dumps(value)
