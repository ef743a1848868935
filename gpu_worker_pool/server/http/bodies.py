"""A request's body, read with bounds on its size and on the time it takes."""
# ruff: noqa: N818 - the errors are named by what happened to the body

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Receive

MAX_BODY_BYTES = 65_536
BODY_TIMEOUT_S = 10.0

# The rest of such a body is not read, so nothing else can come over that connection.
CLOSE = {"Connection": "close"}


class BodyError(Exception):
    """The body could not be had. Carries how to answer."""

    status = 400
    headers: Mapping[str, str] = {}

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class BodyTooLarge(BodyError):
    """It has, or is said to have, more bytes than are taken."""

    status = 413
    headers = CLOSE


class BodyTooSlow(BodyError):
    """It did not arrive in time."""

    status = 408
    headers = CLOSE


class BodyEncoded(BodyError):
    """It is compressed: a few bytes that could become many."""

    status = 415
    headers: Mapping[str, str] = {"Accept-Encoding": "identity"}


class ClientGone(BodyError):
    """The client left before it had sent everything; nobody hears the answer."""


async def read_body(
    receive: Receive,
    headers: Mapping[str, str],
    *,
    limit: int = MAX_BODY_BYTES,
    timeout_s: float = BODY_TIMEOUT_S,
) -> bytes:
    """The whole body; a BodyError if it is too large, too slow, compressed, or does not come to its end.

    The time is for the body as a whole: a client that sends a byte now and then is slow, too.
    """
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in {"", "identity"}:
        raise BodyEncoded("The body must not be compressed; send it without Content-Encoding.")
    if _says_more_than(limit, headers.get("content-length", "")):
        raise _too_large(limit)
    try:
        async with asyncio.timeout(timeout_s):
            return await _collect(receive, limit)
    except TimeoutError:
        raise BodyTooSlow(f"The body did not arrive within {timeout_s:g} seconds; send it at once.") from None


async def _collect(receive: Receive, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("The connection was closed before the body had arrived.")
        chunk = message.get("body", b"")
        size += len(chunk)
        # Also where Content-Length promised less, or said nothing: what counts is what comes.
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _says_more_than(limit: int, length: str) -> bool:
    digits = length.strip()
    if not (digits.isascii() and digits.isdigit()):
        return False  # absent or nonsense: the counting decides
    # Python refuses to read numbers of thousands of digits, and so need not be asked to.
    return len(digits) > 18 or int(digits) > limit


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is too large; at most {limit} bytes are taken.")
