"""What a call is answered with."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple

Headers = tuple[tuple[bytes, bytes], ...]
JSON: Headers = ((b"content-type", b"application/json"),)


class Response(NamedTuple):
    """Status, body and headers, the length aside. A body in pieces is sent as they come, until the caller is gone."""

    status: int
    body: bytes | AsyncGenerator[bytes, None]
    headers: Headers = JSON


def as_headers(headers: Mapping[str, str]) -> Headers:
    """Headers as they are sent."""
    return tuple((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())
