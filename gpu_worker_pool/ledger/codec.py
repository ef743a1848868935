"""Data classes as JSON text, with an exact round trip: events, ended leases, messages between boxes.

The classes are the format. What a field may hold follows from its type, and a field that has its default is not written. So
a new kind of event needs no change here, and an older program reads what does not use a new field. Golden lines in the tests
pin the format on disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints
from zlib import crc32

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import TABLES, Key
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndedLease

# A class with slots leaves its first draft in __subclasses__(), so the module's names are used.
EVENT_KINDS: dict[str, Any] = {
    name: kind
    for name, kind in vars(ev).items()
    if isinstance(kind, type) and issubclass(kind, ev.DurableEvent) and kind is not ev.DurableEvent
}

# Turns a JSON value back into the original value. NotUnderstood says what is wrong with it.
Reader = Callable[[Any], Any]
# A text, and its checksum.
Row = tuple[str, int]


class NotUnderstood(ValueError):  # noqa: N818 - a state of affairs, not a mistake
    """A text is not of the format, or has something that is not known here: a newer version of this program wrote it."""


def encode_event(event: ev.DurableEvent) -> str:
    """Encode as one line of ASCII, with kind and time."""
    kind = type(event).__name__
    if kind not in EVENT_KINDS:
        raise ValueError(f"{kind} is not a durable event; it does not belong in a journal")
    return encode({"kind": kind, **as_object(event)})


def decode_event(text: str, node: str | None = None) -> ev.DurableEvent:
    """Decode one line. With a `node`, every node is read as this one: see `reader`."""
    parts = parse_object(text)
    kind = EVENT_KINDS.get(str(parts.pop("kind", None)))
    if kind is None:
        raise NotUnderstood(f"not an event of a known kind: {shortened(text)}")
    table = str(parts.get("table")) if kind is ev.Configured else None
    if table is not None and table not in TABLES:
        raise NotUnderstood(f"{table!r} is not a table that is known here")
    return cast("ev.DurableEvent", reader(kind, node=node, table=table)(parts))


def decode_ended(text: str) -> EndedLease:
    kind: Any = EndedLease
    return cast("EndedLease", reader(kind)(parse_object(text)))


def event_rows(events: Sequence[ev.DurableEvent], crc: int, prefix: str = "") -> list[Row]:
    """The rows of events. The checksum of each goes on from that of the row before, first from `crc`, and covers `prefix`."""
    rows: list[Row] = []
    for event in events:
        body = encode_event(event)
        crc = crc32((prefix + body).encode(), crc)
        rows.append((body, crc))
    return rows


def ended_row(lease: EndedLease) -> Row:
    body = encode(lease)
    return body, crc32(body.encode())


def checked_crc(body: object, noted_crc: object, crc: int = 0) -> int:
    """The checksum with this body; a ValueError if it is not the one that was noted."""
    if not isinstance(body, str):
        raise ValueError(f"{body!r} is not a text")  # noqa: TRY004 - the file is wrong, not a type
    crc = crc32(body.encode(), crc)
    if crc != noted_crc:
        raise ValueError(f"this was altered, or what came before it: {shortened(body)}")
    return crc


def parse_object(text: str) -> dict[str, Any]:
    """The object that this text is."""
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotUnderstood(f"not JSON ({error}): {shortened(text)}") from error
    if not isinstance(parts, dict):
        raise NotUnderstood(f"not a JSON object: {shortened(text)}")
    return parts


def shortened(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:120]}..."


def as_object(thing: object) -> dict[str, object]:
    """The fields of an object of a data class that do not have their defaults."""
    if not is_dataclass(thing):
        raise ValueError(f"{thing!r} cannot be written as JSON")
    parts: dict[str, object] = {}
    kind: Any = type(thing)
    for name, default, is_object in _defaults(kind):
        value = getattr(thing, name)
        if is_object:
            # Equality leaves out some fields of such an object.
            if inner := as_object(value):
                parts[name] = inner
        elif value is not default and (value != default or type(value) is not type(default)):
            parts[name] = value
    return parts


@cache
def _defaults(kind: Any) -> list[tuple[str, object, bool]]:
    return [(field.name, field.default, is_dataclass(field.default)) for field in fields(kind)]


# Named tuples become arrays, and reasons strings. ASCII, because a client may send a lone surrogate in a label, which UTF-8
# cannot store.
encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=as_object).encode


@cache
def reader(kind: Any, *, is_tolerant: bool = False, node: str | None = None, table: str | None = None) -> Reader:
    """The reader of a type. A tolerant one leaves out fields that are not known here: the next version writes them.

    With a `node`, every node is read as this one: the journal of one box is about that box, whatever its name was. What key
    and value of a row are depends on its `table`.
    """

    def of(kind: Any, name: str = "") -> Reader:
        if name == "node" and node is not None:
            return lambda value: None if value is None else node
        return reader(kind, is_tolerant=is_tolerant, node=node)

    parts = get_args(kind)
    if isinstance(kind, UnionType):
        (inner,) = (of(part) for part in parts if part is not NoneType)
        return lambda value: None if value is None else inner(value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if table is not None:
            hints |= {"key": GpuKey if table == "excluded" else Key, "value": TABLES[table] | None}
        return _record(kind, {name: of(hint, name) for name, hint in hints.items()}, is_tolerant=is_tolerant)
    if get_origin(kind) is tuple:
        if parts[-1] is Ellipsis:
            item = of(parts[0])
            return lambda value: tuple([item(each) for each in _typed(value, list)])
        return _array(tuple, [of(part) for part in parts])
    if issubclass(kind, tuple):
        return _array(kind._make, [of(hint, name) for name, hint in get_type_hints(kind).items()])
    if issubclass(kind, StrEnum):
        return cast("Reader", kind)
    # A float field may hold an int, which stays one: 8000 does not become 8000.0.
    return lambda value: _typed(value, kind, int if kind is float else kind)


def _record(kind: Any, readers: dict[str, Reader], *, is_tolerant: bool) -> Reader:
    def read(parts: Any) -> Any:
        values, name = {}, ""
        _typed(parts, dict)
        try:
            for name, value in parts.items():
                if name in readers:
                    values[name] = readers[name](value)
                elif not is_tolerant:
                    raise NotUnderstood("is not a field that is known here")
        except ValueError as error:
            raise NotUnderstood(f"{kind.__name__}.{name} {error}") from None
        try:
            return kind(**values)
        except (TypeError, ValueError) as error:
            raise NotUnderstood(f"{kind.__name__} has the wrong fields: {error}") from None

    return read


def _array(make: Callable[[list[Any]], Any], readers: list[Reader]) -> Reader:
    def read(value: Any) -> Any:
        if len(_typed(value, list)) != len(readers):
            raise NotUnderstood(f"is {shortened(repr(value))}, not an array of {len(readers)}")
        return make([inner(item) for inner, item in zip(readers, value, strict=True)])

    return read


def _typed(value: Any, kind: type, or_kind: type | None = None) -> Any:
    if type(value) is not kind and type(value) is not or_kind:
        raise NotUnderstood(f"is {shortened(repr(value))}, not of type {kind.__name__}")
    return value
