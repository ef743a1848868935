"""The answer to a call, and its JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import to_json

Headers = tuple[tuple[bytes, bytes], ...]
JSON: Headers = ((b"content-type", b"application/json"),)
NULL = b"null"


class Response(NamedTuple):
    """Status, body and headers, without the length. A generator is streamed until the caller disconnects."""

    status: int
    body: bytes | AsyncGenerator[bytes, None]
    headers: Headers = JSON


def as_headers(headers: Mapping[str, str]) -> Headers:
    return tuple((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())


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


def redirect(location: str, *headers: tuple[bytes, bytes]) -> Response:
    """Redirect to an address relative to this one: the Host header is the caller's, and a proxy may use other addresses."""
    return Response(307, b"", (*headers, (b"location", location.encode("latin-1"))))


def secure_headers(policy: str) -> Headers:
    """The headers of a page for people: what it may load, and that no other site may embed or read it."""
    return (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-frame-options", b"DENY"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cross-origin-resource-policy", b"same-origin"),
    )
