"""Bounds on a request's head that hold under every server, also one that has no such bounds (see protocol.py)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from starlette.types import Scope

from .problems import Refusal

MAX_TARGET_BYTES = 8 * 1024
MAX_HEADERS = 100
MAX_HEADERS_BYTES = 64 * 1024
CLOSE = {"Connection": "close"}


def check_head(scope: Scope) -> None:
    """Raise Refusal if the address or the headers are too large."""
    target = len(scope.get("raw_path") or scope["path"]) + len(scope.get("query_string", b""))
    if target > MAX_TARGET_BYTES:
        detail = f"The address has {target} bytes; there must be at most {MAX_TARGET_BYTES}."
        raise Refusal(414, detail, CLOSE)
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise Refusal(431, f"There are {len(headers)} headers; there must be at most {MAX_HEADERS}.", CLOSE)
    size = size_of(headers)
    if size > MAX_HEADERS_BYTES:
        raise Refusal(431, f"The headers have {size} bytes; there must be at most {MAX_HEADERS_BYTES}.", CLOSE)


def size_of(headers: Iterable[tuple[bytes, bytes]]) -> int:
    return sum(map(len, chain.from_iterable(headers)))
