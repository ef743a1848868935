"""Data classes as JSON text, with an exact round trip: what a field may hold follows from its type."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

# Turns a JSON value back into the original value. A ValueError begins with the position of the fault.
FieldReader = Callable[[object, str], Any]

_NOTHING: dict[str, object] = {}


class RecordCodec:
    """The codec of these classes, for one `purpose`. `later` are fields that are not written if they have this value.

    A tolerant one reads what the next version writes: it leaves out fields that it does not know, and a field that is
    missing has the default of its class.
    """

    def __init__(
        self,
        kinds: Iterable[type],
        later: Mapping[type, Mapping[str, object]],
        purpose: str,
        *,
        is_tolerant: bool = False,
    ) -> None:
        self._names = {kind: tuple(field.name for field in fields(kind)) for kind in kinds}
        # One call for all fields is a third quicker than one per field, and this runs for every lease.
        self._values = {kind: attrgetter(*names) for kind, names in self._names.items()}
        self._is_alone = {kind for kind, names in self._names.items() if len(names) == 1}
        self._later = later
        self._purpose = purpose
        self._is_tolerant = is_tolerant
        self._readers: dict[Any, FieldReader] = {}
        # Named tuples become arrays, and reasons strings. ASCII, because a client may send a lone surrogate in a label,
        # which UTF-8 cannot store.
        self.encode = _encoder(self.as_object)

    def as_object(self, thing: object) -> dict[str, object]:
        kind = type(thing)
        if kind not in self._names:
            raise ValueError(f"{thing!r} cannot be written into {self._purpose}")
        values = self._values[kind](thing)
        parts = dict(zip(self._names[kind], (values,) if kind in self._is_alone else values, strict=True))
        for name, before in self._later.get(kind, _NOTHING).items():
            if parts[name] == before:
                del parts[name]
        return parts

    def reader(self, kind: Any) -> FieldReader:
        known = self._readers.get(kind)
        if known is None:
            known = self._readers[kind] = self._reader(kind)
        return known

    def _reader(self, kind: Any) -> FieldReader:
        """The reader of a type. The order matters: a named tuple is also a tuple."""
        if isinstance(kind, UnionType):
            (inner,) = (part for part in get_args(kind) if part is not NoneType)
            return _optional(self.reader(inner))
        if get_origin(kind) is tuple:
            first, second = get_args(kind)
            return _many(self.reader(first)) if second is Ellipsis else _pair(self.reader(first), self.reader(second))
        if is_dataclass(kind):
            return self._record(cast("type", kind))
        if issubclass(kind, tuple):
            return _named_tuple(kind, [self.reader(hint) for hint in get_type_hints(kind).values()])
        if issubclass(kind, StrEnum):
            return _choice(kind)
        # A float field may hold an int, which stays one: 8000 does not become 8000.0.
        return _plain((int, float) if kind is float else (kind,), kind.__name__)

    def _record(self, kind: type) -> FieldReader:
        hints = get_type_hints(kind)
        readers = [(name, f"{kind.__name__}.{name}", self.reader(hints[name])) for name in self._names[kind]]
        known, is_tolerant = frozenset(self._names[kind]), self._is_tolerant
        later = (
            {**_defaults(kind), **self._later.get(kind, _NOTHING)} if is_tolerant else self._later.get(kind, _NOTHING)
        )

        def read(value: object, where: str) -> object:
            if not isinstance(value, dict):
                raise ValueError(f"{where} is {value!r}, not an object")  # noqa: TRY004 - the text is wrong, not a type
            if value.keys() != known:
                value = {**later, **value}
                missing, extra = sorted(known - value.keys()), sorted(value.keys() - known)
                if missing or (extra and not is_tolerant):
                    raise ValueError(f"{where} has the wrong fields: missing {missing}, not known {extra}")
            return kind(*[inner(value[name], place) for name, place, inner in readers])

        return read


def _encoder(default: Callable[[object], object]) -> Callable[[object], str]:
    """Encode as JSONEncoder does, which makes a new encoder in C for every text; this runs for every lease."""
    encoder = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=default)
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return encoder.encode
    pieces = make(None, default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)  # noqa: FBT003
    return lambda thing: "".join(pieces(thing, 0))


def _defaults(kind: type) -> dict[str, object]:
    """The defaults of its fields, as they are in JSON."""
    return {
        field.name: field.default
        for field in fields(kind)
        if field.default is not MISSING and not is_dataclass(field.default)
    }


def parse_object(text: str) -> dict[str, object]:
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


def _named_tuple(kind: type, readers: Sequence[FieldReader]) -> FieldReader:
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
