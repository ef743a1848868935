"""JSON of answers and events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import to_json

NULL = b"null"


def encode(value: Any) -> bytes:
    """Encode as JSON; infinities and NaN become null."""
    return to_json(value, inf_nan_mode="null")


def encode_with(frame: object, **lists: Iterable[bytes]) -> bytes:
    """Encode an object; its empty lists of these names, in the order of its keys, get items that are encoded already."""
    return fill(encode(frame), **lists)


def fill(rest: bytes, **lists: Iterable[bytes]) -> bytes:
    """Put items into the empty lists of these names of an encoded object, in the order of its keys."""
    parts: list[bytes] = []
    for name, items in lists.items():
        key = b'"%b":[' % name.encode()
        before, rest = rest.split(key + b"]", 1)
        parts += (before, key, b",".join(items), b"]")
    return b"".join((*parts, rest))


class JsonFrame:
    """An encoded object with gaps, which is encoded once. `keys` are null in it, and in the order of its keys."""

    def __init__(self, frame: object, keys: Iterable[str]) -> None:
        # What is between the gaps, and in the gaps.
        self._pieces: list[bytes] = []
        rest = encode(frame)
        for name in keys:
            key = b'"%b":' % name.encode()
            before, rest = rest.split(key + NULL, 1)
            self._pieces += (before + key, NULL)
        self._pieces.append(rest)

    def fill(self, values: Iterable[Any]) -> bytes:
        """The object with these values of its keys."""
        return self.join([NULL if value is None else encode(value) for value in values])

    def join(self, encoded: Sequence[bytes]) -> bytes:
        """The same with values that are encoded already. A ValueError unless there is one for each key."""
        pieces = self._pieces.copy()
        pieces[1::2] = encoded
        return b"".join(pieces)
