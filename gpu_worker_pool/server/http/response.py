"""The answer to a call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple

Headers = tuple[tuple[bytes, bytes], ...]
JSON: Headers = ((b"content-type", b"application/json"),)


class Response(NamedTuple):
    """Status, body and headers, without the length. A body in pieces is streamed until the caller disconnects."""

    status: int
    body: bytes | AsyncGenerator[bytes, None]
    headers: Headers = JSON


def as_headers(headers: Mapping[str, str]) -> Headers:
    return tuple((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())
