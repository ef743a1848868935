"""The answer to a call, and its JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, NamedTuple

from pydantic_core import to_json

Headers = tuple[tuple[bytes, bytes], ...]
JSON: Headers = ((b"content-type", b"application/json"),)


class Response(NamedTuple):
    """Status, body and headers, without the length. A body in pieces is streamed until the caller disconnects."""

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
