"""The answer to a call, and what its caller accepts."""

from __future__ import annotations

import re
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


_QUALITY = re.compile(r"\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*", re.IGNORECASE)


def wants_page(accept: str | None) -> bool:
    """Whether this Accept header prefers a page to JSON. A caller that names no page gets JSON."""
    ranges: dict[str, float] = {}
    for part in (accept or "").split(","):
        kind, _, parameters = part.partition(";")
        ranges[kind.strip().lower()] = _quality(parameters)
    page = ranges.get("text/html", 0.0)
    json = next((ranges[kind] for kind in ("application/json", "application/*", "*/*") if kind in ranges), 0.0)
    return page > 0 and page >= json


def takes_gzip(accept_encoding: str | None) -> bool:
    for part in (accept_encoding or "").split(","):
        coding, _, parameters = part.partition(";")
        if coding.strip().lower() == "gzip":
            return _quality(parameters) > 0
    return False


def _quality(parameters: str) -> float:
    """The parameter q; 1 if it is missing or invalid."""
    for parameter in parameters.split(";"):
        found = _QUALITY.fullmatch(parameter)
        if found is not None:
            return float(found[1])
    return 1.0
