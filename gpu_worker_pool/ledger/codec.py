"""Durable events and ended leases as JSON text, with an exact round trip.

The data classes are the format: what a field may hold follows from its type, so a new kind of event cannot be forgotten
here. Golden lines in the tests pin the format on disk; a change to it needs a migration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.booking import Booking
from gpu_worker_pool.core.model.gpu import InventoryGpu
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.core.model.quota import Quota
from gpu_worker_pool.core.model.request import Holder, Request, Wishes

# Turns a JSON value back into the original value. A ValueError begins with the position of the fault.
FieldReader = Callable[[object, str], Any]

# A class with slots leaves its first draft in __subclasses__(), so the module's names are used.
EVENT_KINDS: dict[str, type] = {
    name: kind
    for name, kind in vars(ev).items()
    if isinstance(kind, type) and issubclass(kind, ev.DurableEvent) and kind is not ev.DurableEvent
}

_NAMES: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (*EVENT_KINDS.values(), InventoryGpu, EndedLease, Request, Wishes, Holder, Quota, Booking)
}

# Fields added later, with their former meaning. A field with that value is not written: then old journals can be read,
# and older programs can read journals that do not use the field.
_LATER: dict[type, dict[str, object]] = {
    Wishes: {"among": None, "nodes": 1, "node": None},
    Holder: {"node": None},
    Request: {"parent": None, "time_limit_s": None, "preemptible": False},
    ev.HistoryCondensed: {"recent": ()},
    ev.LeaseGranted: {"limit": None, "weight": None},
    ev.LeaseEnded: {"by": None, "why": None},
    EndedLease: {"by": None, "why": None, "warned": None},
}


def encode_event(event: ev.DurableEvent) -> str:
    """Encode as one line of ASCII, with kind and time."""
    kind = type(event)
    if kind.__name__ not in EVENT_KINDS:
        raise ValueError(f"{kind.__name__} is not a durable event; it does not belong in a journal")
    return _to_text({"kind": kind.__name__, **_as_object(event)})


def decode_event(text: str) -> ev.DurableEvent:
    """Decode one line; a ValueError says what is wrong with it."""
    parts = _parts(text)
    kind = EVENT_KINDS.get(str(parts.pop("kind", None)))
    if kind is None:
        raise ValueError(f"not an event of a known kind: {_shortened(text)}")
    return cast("ev.DurableEvent", _reader(kind)(parts, kind.__name__))


def encode_ended(lease: EndedLease) -> str:
    return _to_text(_as_object(lease))


def decode_ended(text: str) -> EndedLease:
    return cast("EndedLease", _reader(EndedLease)(_parts(text), "EndedLease"))


# One call for all fields is a third quicker than one per field, and this runs for every lease.
_VALUES = {kind: attrgetter(*names) for kind, names in _NAMES.items()}
_NOTHING: dict[str, object] = {}


def _as_object(thing: object) -> dict[str, object]:
    kind = type(thing)
    if kind not in _NAMES:
        raise ValueError(f"{thing!r} cannot be written into a journal")
    parts = dict(zip(_NAMES[kind], _VALUES[kind](thing), strict=True))
    for name, before in _LATER.get(kind, _NOTHING).items():
        if parts[name] == before:
            del parts[name]
    return parts


# Named tuples become arrays, and reasons strings. ASCII, because a client may send a lone surrogate in a label, which
# UTF-8 cannot store.
_to_text = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_as_object).encode


def _parts(text: str) -> dict[str, object]:
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): {_shortened(text)}") from error
    if not isinstance(parts, dict):
        raise ValueError(f"not a JSON object: {_shortened(text)}")  # noqa: TRY004 - the text is wrong, not a type
    return parts


def _shortened(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:120]}..."


# --- readers by type -------------------------------------------------------------------------------------------------


@cache
def _reader(kind: Any) -> FieldReader:
    """The reader of a type. The order matters: a named tuple is also a tuple."""
    if isinstance(kind, UnionType):
        (inner,) = (part for part in get_args(kind) if part is not NoneType)
        return _optional(_reader(inner))
    if get_origin(kind) is tuple:
        first, second = get_args(kind)
        return _many(_reader(first)) if second is Ellipsis else _pair(_reader(first), _reader(second))
    if is_dataclass(kind):
        return _record(cast("type", kind))
    if issubclass(kind, tuple):
        return _named_tuple(kind)
    if issubclass(kind, StrEnum):
        return _choice(kind)
    # A float field may hold an int, which stays one: 8000 does not become 8000.0.
    return _plain((int, float) if kind is float else (kind,), kind.__name__)


def _plain(kinds: tuple[type, ...], name: str) -> FieldReader:
    def read(value: object, where: str) -> object:
        if type(value) not in kinds:
            raise ValueError(f"{where} is {value!r}, not of type {name}")
        return value

    return read


def _optional(inner: FieldReader) -> FieldReader:
    return lambda value, where: None if value is None else inner(value, where)


def _many(inner: FieldReader) -> FieldReader:
    def read(value: object, where: str) -> tuple[object, ...]:
        return tuple([inner(item, where) for item in _array(value, where)])

    return read


def _pair(first: FieldReader, second: FieldReader) -> FieldReader:
    def read(value: object, where: str) -> tuple[object, object]:
        items = _array(value, where, 2)
        return (first(items[0], where), second(items[1], where))

    return read


def _named_tuple(kind: type) -> FieldReader:
    readers = [_reader(hint) for hint in get_type_hints(kind).values()]

    def read(value: object, where: str) -> object:
        items = _array(value, where, len(readers))
        return kind(*[inner(item, where) for inner, item in zip(readers, items, strict=True)])

    return read


def _array(value: object, where: str, length: int | None = None) -> Sequence[object]:
    if not isinstance(value, list | tuple) or length not in (None, len(value)):
        raise ValueError(f"{where} is {value!r}, not an array{'' if length is None else f' of {length}'}")
    return value


def _choice(kind: type[StrEnum]) -> FieldReader:
    choices = {str(choice): choice for choice in kind}

    def read(value: object, where: str) -> StrEnum:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{where} is {value!r}, not one of {', '.join(choices)}")
        return choices[value]

    return read


def _record(kind: type) -> FieldReader:
    hints = get_type_hints(kind)
    readers = [(name, f"{kind.__name__}.{name}", _reader(hints[name])) for name in _NAMES[kind]]
    known, later = frozenset(_NAMES[kind]), _LATER.get(kind, _NOTHING)

    def read(value: object, where: str) -> object:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {value!r}, not an object")  # noqa: TRY004 - the text is wrong, not a type
        if value.keys() != known:
            value = {**later, **value}
            missing, extra = sorted(known - value.keys()), sorted(value.keys() - known)
            if missing or extra:
                raise ValueError(f"{where} has the wrong fields: missing {missing}, not known {extra}")
        return kind(*[inner(value[name], place) for name, place, inner in readers])

    return read
