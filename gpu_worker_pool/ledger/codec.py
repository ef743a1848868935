"""Data classes as JSON text, with an exact round trip: events, ended leases, messages between boxes.

The classes are the format. What a field may hold follows from its type, and a field that has its default is not written. So
a new kind of event needs no change here, and an older program reads what does not use a new field. Golden lines in the tests
pin the format on disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import TABLES, Key
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndedLease

# A class with slots leaves its first draft in __subclasses__(), so the module's names are used.
EVENT_KINDS: dict[str, type[ev.DurableEvent]] = {
    name: kind
    for name, kind in vars(ev).items()
    if isinstance(kind, type) and issubclass(kind, ev.DurableEvent) and kind is not ev.DurableEvent
}

# Turns a JSON value back into the original value. A ValueError says what is wrong with it.
Reader = Callable[[Any], Any]


def encode_event(event: ev.DurableEvent) -> str:
    """Encode as one line of ASCII, with kind and time."""
    kind = type(event).__name__
    if kind not in EVENT_KINDS:
        raise ValueError(f"{kind} is not a durable event; it does not belong in a journal")
    return encode({"kind": kind, **as_object(event)})


def decode_event(text: str, readers: Readers | None = None) -> ev.DurableEvent:
    """Decode one line, strictly unless other readers are given; a ValueError says what is wrong with it."""
    parts = parse_object(text)
    kind = EVENT_KINDS.get(str(parts.pop("kind", None)))
    if kind is None:
        raise ValueError(f"not an event of a known kind: {shortened(text)}")
    return cast("ev.DurableEvent", (readers or STRICT).of(kind)(parts))


def encode_ended(lease: EndedLease) -> str:
    return encode(lease)


def decode_ended(text: str) -> EndedLease:
    return cast("EndedLease", STRICT.of(EndedLease)(parse_object(text)))


def parse_object(text: str) -> dict[str, Any]:
    """The object that this text is; a ValueError says why it is none."""
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): {shortened(text)}") from error
    if not isinstance(parts, dict):
        raise ValueError(f"not a JSON object: {shortened(text)}")  # noqa: TRY004 - the text is wrong, not a type
    return parts


def shortened(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:120]}..."


def as_object(thing: object) -> dict[str, object]:
    """The fields of an object of a data class that do not have their defaults."""
    kind = type(thing)
    if not is_dataclass(kind):
        raise ValueError(f"{thing!r} cannot be written as JSON")
    names, values_of, defaults, nested = _plan(kind)
    parts = {
        name: value
        for name, value, default in zip(names, values_of(thing), defaults, strict=True)
        if value is not default and (value != default or type(value) is not type(default))
    }
    for name in nested:
        if inner := as_object(getattr(thing, name)):
            parts[name] = inner
        else:
            parts.pop(name, None)
    return parts


@cache
def _plan(kind: Any) -> tuple[tuple[str, ...], Callable[[object], tuple[object, ...]], tuple[object, ...], list[str]]:
    """Names, values and defaults of the fields, and those whose default is an object. Equality leaves out some fields of
    such an object, so it is compared field by field.
    """
    found = fields(kind)
    names = tuple(field.name for field in found)
    values = attrgetter(*names)
    values_of = values if len(names) > 1 else lambda thing: (values(thing),)
    nested = [field.name for field in found if field.default is not MISSING and is_dataclass(field.default)]
    return names, values_of, tuple(MISSING if field.name in nested else field.default for field in found), nested


# Named tuples become arrays, and reasons strings. ASCII, because a client may send a lone surrogate in a label, which UTF-8
# cannot store.
encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=as_object).encode


class Readers:
    """The readers of types. A tolerant one leaves out fields that are not known here: the next version writes them.

    With a `node`, every node is read as this one: the journal of one box is about that box, whatever its name was.
    """

    def __init__(self, *, is_tolerant: bool, node: str | None = None) -> None:
        self._is_tolerant = is_tolerant
        self._node = node
        self._known: dict[Any, Reader] = {}

    def of(self, kind: Any) -> Reader:
        if kind not in self._known:
            self._known[kind] = self._make(kind)
        return self._known[kind]

    def _make(self, kind: Any) -> Reader:
        """The order matters: a named tuple is also a tuple."""
        parts = get_args(kind)
        if isinstance(kind, UnionType):
            (inner,) = (self.of(part) for part in parts if part is not NoneType)
            return lambda value: None if value is None else inner(value)
        if get_origin(kind) is tuple:
            if parts[-1] is Ellipsis:
                item = self.of(parts[0])
                return lambda value: tuple([item(each) for each in _array(value)])
            return _row(tuple, [self.of(part) for part in parts])
        if is_dataclass(kind):
            return self._record(kind)
        if issubclass(kind, tuple):
            return _row(kind._make, [self._field(*hint) for hint in get_type_hints(kind).items()])
        return cast("Reader", kind) if issubclass(kind, StrEnum) else _plain(kind)

    def _field(self, name: str, kind: Any) -> Reader:
        if name != "node" or self._node is None:
            return self.of(kind)
        return lambda value: None if value is None else self._node

    def _record(self, kind: Any) -> Reader:
        hints = get_type_hints(kind)
        has_tables = kind is ev.Configured
        in_tables = {"key", "value"} if has_tables else ()
        names = [field.name for field in fields(kind) if field.name not in in_tables]
        readers = {name: self._field(name, hints[name]) for name in names}

        def read(parts: Any) -> Any:
            if not isinstance(parts, dict):
                raise ValueError(f"is {shortened(repr(parts))}, not an object")  # noqa: TRY004 - the text is wrong, not a type
            known = {**readers, **self._row_of(parts.get("table"))} if has_tables else readers
            values, name = {}, ""
            try:
                for name, value in parts.items():
                    if name in known:
                        values[name] = known[name](value)
                    elif not self._is_tolerant:
                        raise ValueError("is not a field that is known here")  # noqa: TRY301 - the name is added below
            except ValueError as error:
                raise ValueError(f"{kind.__name__}.{name} {error}") from None
            try:
                return kind(**values)
            except TypeError as error:
                raise ValueError(f"{kind.__name__} has the wrong fields: {error}") from None

        return read

    def _row_of(self, table: object) -> dict[str, Reader]:
        kind = TABLES.get(str(table))
        if kind is None:
            raise ValueError(f"{table!r} is not a table that is known here")
        return {"key": self.of(GpuKey if table == "excluded" else Key), "value": self.of(kind | None)}


def _row(make: Callable[[list[Any]], Any], readers: list[Reader]) -> Reader:
    def read(value: Any) -> Any:
        if len(_array(value)) != len(readers):
            raise ValueError(f"is {shortened(repr(value))}, not an array of {len(readers)}")
        return make([inner(item) for inner, item in zip(readers, value, strict=True)])

    return read


def _plain(kind: type) -> Reader:
    # A float field may hold an int, which stays one: 8000 does not become 8000.0.
    kinds = (int, float) if kind is float else (kind,)

    def read(value: Any) -> Any:
        if type(value) not in kinds:
            raise ValueError(f"is {shortened(repr(value))}, not of type {kind.__name__}")
        return value

    return read


def _array(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"is {shortened(repr(value))}, not an array")  # noqa: TRY004 - the text is wrong, not a type
    return value


STRICT, TOLERANT = Readers(is_tolerant=False), Readers(is_tolerant=True)
