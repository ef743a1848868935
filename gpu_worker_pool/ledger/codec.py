"""Durable events and ended leases as JSON text, exactly there and back.

The data classes themselves are the format: what each field may hold is read off its type, so that a new kind of event
cannot be forgotten here. What that comes to on disk is pinned by the golden lines in the tests; whoever changes it
has to write a migration.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.core.model.request import Holder, Request, Wishes

# Takes what JSON made of a value and gives the value back, or raises a ValueError that begins with where it stands.
FieldReader = Callable[[object, str], Any]

# A class made anew for its slots leaves its first draft among __subclasses__(), so the module is asked instead.
EVENT_KINDS: dict[str, type] = {
    name: kind
    for name, kind in vars(ev).items()
    if isinstance(kind, type) and issubclass(kind, ev.DurableEvent) and kind is not ev.DurableEvent
}

_NAMES: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (*EVENT_KINDS.values(), EndedLease, Request, Wishes, Holder)
}

# Fields that came later, with what they were before: while they are that, they are not written, so that a journal from
# before is read and one that has no use for them can be read by an older program.
_LATER: dict[type, dict[str, object]] = {Wishes: {"among": None}}


def encode_event(event: ev.DurableEvent) -> str:
    """One line of ASCII, its kind and time included."""
    kind = type(event)
    if kind.__name__ not in EVENT_KINDS:
        raise ValueError(f"{kind.__name__} is no durable event; it does not belong into a journal")
    return _to_text({"kind": kind.__name__, **_as_object(event)})


def decode_event(text: str) -> ev.DurableEvent:
    """What was encoded; a ValueError says what is wrong with the text."""
    parts = _parts(text)
    kind = EVENT_KINDS.get(str(parts.pop("kind", None)))
    if kind is None:
        raise ValueError(f"not an event of a known kind: {_shortened(text)}")
    return cast("ev.DurableEvent", _reader(kind)(parts, kind.__name__))


def encode_ended(lease: EndedLease) -> str:
    """One line of ASCII."""
    return _to_text(_as_object(lease))


def decode_ended(text: str) -> EndedLease:
    """What was encoded; a ValueError says what is wrong with the text."""
    return cast("EndedLease", _reader(EndedLease)(_parts(text), "EndedLease"))


# One call for all fields of an object is a third quicker than one a field, and this runs for every lease.
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


# Named tuples become arrays and the reasons strings by themselves. ASCII, because a lone half of a surrogate pair, which
# a client may well send in a label, is no UTF-8 and could not be stored otherwise.
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


# Readers, by type


@cache
def _reader(kind: Any) -> FieldReader:
    """Reads one type. The order matters where one kind of type is also another: a named tuple is a tuple."""
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
    # A float field may hold a whole number, and stays one: 8000 does not come back as 8000.0.
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


def _array(value: object, where: str, length: int | None = None) -> list[object]:
    if not isinstance(value, list) or length not in (None, len(value)):
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
