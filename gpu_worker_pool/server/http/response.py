"""The answer to a call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple

Headers = tuple[tuple[bytes, bytes], ...]
JSON: Headers = ((b"content-type", b"application/json"),)


class Response(NamedTuple):
    """Status, body and headers, without the length. A generator is streamed until the caller disconnects."""

    status: int
    body: bytes | AsyncGenerator[bytes, None]
    headers: Headers = JSON


def as_headers(headers: Mapping[str, str]) -> Headers:
    return tuple((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())


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
