"""Reads a request's body, with bounds on its size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Receive

from gpu_worker_pool.server.authority.presence import ClientGone

from .problems import Refusal

MAX_BODY_BYTES = 65_536
BODY_TIMEOUT_S = 10.0

# The rest of the body is not read, so the connection cannot be used again.
CLOSE = {"Connection": "close"}


async def read_body(
    receive: Receive,
    headers: Mapping[str, str],
    *,
    limit: int = MAX_BODY_BYTES,
    timeout_s: float = BODY_TIMEOUT_S,
) -> bytes:
    """Read the whole body; Refusal if it is too large, too slow, compressed or incomplete.

    The time is for the whole body: a client that sends a byte now and then is too slow.
    """
    encoding = headers.get("content-encoding")
    if encoding is not None and encoding.strip().lower() not in {"", "identity"}:
        detail = "The body must not be compressed; send it without Content-Encoding."
        raise Refusal(415, detail, {"Accept-Encoding": "identity"})
    if _says_more_than(limit, headers.get("content-length", "")):
        raise _too_large(limit)
    try:
        async with asyncio.timeout(timeout_s):
            return await _collect(receive, limit)
    except TimeoutError:
        detail = f"The body did not arrive within {timeout_s:g} seconds; send it at once."
        raise Refusal(408, detail, CLOSE) from None


async def _collect(receive: Receive, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("The connection was closed before the body had arrived.")
        chunk = message.get("body", b"")
        size += len(chunk)
        # Content-Length may be missing or wrong: only the bytes that arrive count.
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _says_more_than(limit: int, length: str) -> bool:
    digits = length.strip()
    if not (digits.isascii() and digits.isdigit()):
        return False  # missing or invalid: the counting decides
    # Python does not convert numbers of thousands of digits.
    return len(digits) > 18 or int(digits) > limit


def _too_large(limit: int) -> Refusal:
    return Refusal(413, f"The body is too large; it must be at most {limit} bytes.", CLOSE)
