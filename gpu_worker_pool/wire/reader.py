"""Reads the answers of other servers tolerantly: a value that is missing or of another kind is None, never 0.

A body is read by its type. A field that cannot be read becomes its default, or None if the type allows that; otherwise
the body cannot be read, and a list leaves it out. Unknown keys are ignored. So the client can use an older, a newer or a
foreign server for all that it reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
# No measurement and no count is so large.
MOST = 1e15
MOST_WHOLE = 2**63
_UNREADABLE: Any = object()

Clean = Callable[[str], str]
_Read = Callable[[Any, Clean], Any]


def read(kind: type[T], data: object, *, clean: Clean = str) -> T | None:
    """Read a body of this kind from JSON; None if it cannot be read. Every text goes through `clean`."""
    hashable: Any = kind
    found = _reader(hashable)(data, clean)
    return None if found is _UNREADABLE else found


def plain(value: object) -> str:
    """The text without control characters, which a terminal would obey, and without those that change its direction."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def has_all(body: object, data: object, *names: str) -> bool:
    """Whether a body has every item of these lists: none was left out because it could not be read."""
    found = [data.get(name) if isinstance(data, dict) else None for name in names]
    return all(
        isinstance(items, list) and len(items) == len(getattr(body, name))
        for name, items in zip(names, found, strict=True)
    )


def read_number(value: object) -> float | None:
    """Read a measured number; None if it is not one."""
    # Compared before the conversion: a whole number of a thousand digits cannot become a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST:
        return None
    return float(value)


def read_whole(value: object) -> int | None:
    """Read a count; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST_WHOLE:
        return None
    return int(value) if int(value) == value else None


def read_time(text: str | None) -> float | None:
    """Read an ISO 8601 time as wall-clock seconds; None if it is not one, or some time zone cannot show it."""
    try:
        at = datetime.fromisoformat(text or "")
        wall_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
    return wall_s if 0 <= wall_s < 2**36 else None


@lru_cache(maxsize=128)
def _reader(kind: Any) -> _Read:
    """The reader for this type; it returns _UNREADABLE for a value of another type."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _body(kind)
    if origin in {UnionType, Union}:
        return _first_of(inner)
    if origin is Literal:
        return lambda value, _: value if isinstance(value, str) and value in inner else _UNREADABLE
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return lambda value, _: kind(value) if isinstance(value, str) and value in set(kind) else _UNREADABLE
    if origin is tuple:
        return _list(_reader(inner[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_reader(inner[1]))
    return _PLAIN[kind]


def _or_unreadable(read_one: Callable[[object], Any]) -> _Read:
    def read_it(value: Any, _: Clean) -> Any:
        found = read_one(value)
        return _UNREADABLE if found is None else found

    return read_it


_PLAIN: dict[Any, _Read] = {
    str: lambda value, clean: clean(value) if isinstance(value, str) else _UNREADABLE,
    bool: lambda value, _: value if isinstance(value, bool) else _UNREADABLE,
    int: _or_unreadable(read_whole),
    float: _or_unreadable(read_number),
    NoneType: lambda value, _: None if value is None else _UNREADABLE,
}


def _first_of(kinds: tuple[Any, ...]) -> _Read:
    # Of several bodies the last is tried first, because it extends the others.
    readers = [_reader(kind) for kind in reversed(kinds)]

    def read_first(value: Any, clean: Clean) -> Any:
        for one in readers:
            if (found := one(value, clean)) is not _UNREADABLE:
                return found
        return _UNREADABLE

    return read_first


def _list(read_item: _Read) -> _Read:
    def read_list(value: Any, clean: Clean) -> Any:
        if not isinstance(value, list | tuple):
            return _UNREADABLE
        found = (read_item(item, clean) for item in value)
        return tuple(item for item in found if item is not _UNREADABLE)

    return read_list


def _mapping(read_value: _Read) -> _Read:
    def read_mapping(value: Any, clean: Clean) -> Any:
        if not isinstance(value, dict):
            return _UNREADABLE
        found = {clean(key): read_value(item, clean) for key, item in value.items()}
        return {key: item for key, item in found.items() if item is not _UNREADABLE}

    return read_mapping


def _body(kind: Any) -> _Read:
    hints = get_type_hints(kind)
    plan = []
    for item in fields(kind):
        hint = hints[item.name]
        has_default = item.default is not MISSING or item.default_factory is not MISSING
        plan.append((item.name, _reader(hint), has_default, NoneType in get_args(hint)))

    def read_body(value: Any, clean: Clean) -> Any:
        if not isinstance(value, dict):
            return _UNREADABLE
        found = {}
        for name, read_field, has_default, is_nullable in plan:
            item = value.get(name)
            if item is not None or not is_nullable:
                item = read_field(item, clean)
            if item is not _UNREADABLE:
                found[name] = item
            elif has_default:
                continue  # the class adds it
            elif is_nullable:
                found[name] = None
            else:
                return _UNREADABLE
        return kind(**found)

    return read_body
