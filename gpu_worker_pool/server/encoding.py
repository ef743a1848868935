"""The JSON of answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import to_json


def encode(value: Any) -> bytes:
    """Encode as JSON; infinities and NaN become null."""
    return to_json(value, inf_nan_mode="null")


def encode_with(frame: object, **lists: Iterable[bytes]) -> bytes:
    """Encode an object; its empty lists of these names, in the order of its keys, get items that are encoded already."""
    parts: list[bytes] = []
    rest = encode(frame)
    for name, items in lists.items():
        key = b'"%b":[' % name.encode()
        before, rest = rest.split(key + b"]", 1)
        parts += (before, key, b",".join(items), b"]")
    return b"".join((*parts, rest))
