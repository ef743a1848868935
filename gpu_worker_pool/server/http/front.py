"""What is answered before a route is looked for, and where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Final
from urllib.parse import quote

from starlette.datastructures import Headers as RequestHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from .access import merge_headers
from .response import CLOSE, JSON, Headers, Refusal, Response, problem_of, redirect, wants_page

# A page of any origin may read an answer with this header.
READABLE: Final = (b"access-control-allow-origin", b"*")
READING: Final = frozenset({"GET", "HEAD"})
# A longer answer is sent in pieces, by its route.
PIECE_BYTES: Final = 64 * 1024
VARY: Final = (b"vary", b"Accept")
# Bounds of a head that hold under every server, also one that has none of its own (see protocol.py).
MAX_TARGET_BYTES: Final = 8 * 1024
MAX_HEADERS: Final = 100
MAX_HEADERS_BYTES: Final = 64 * 1024


class PolledStatistics:
    """Middleware that answers the statistics that are polled most, by their path, from bytes that are encoded already."""

    def __init__(self, app: ASGIApp, polled: Mapping[str, Callable[[], bytes]], headers: Headers) -> None:
        self._app = app
        self._polled = polled
        self._headers = (*JSON, *headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        polled = self._polled.get(scope["path"])
        if polled is None or scope["method"] not in READING or len(body := polled()) > PIECE_BYTES:
            await self._app(scope, receive, send)
            return
        headers = [*self._headers, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


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


def nowhere(scope: Scope, prefix: str, is_known: Callable[[str], bool]) -> Response:
    """The answer to a call of which no route knows the path; `is_known` says whether there is something at another one. Some
    are redirected, by relative addresses: the Host header is the caller's, and a proxy may use other addresses.
    """
    path: str = scope["path"]
    if prefix and scope["method"] in READING:
        if path == prefix:
            return redirect(f"{prefix.rpartition('/')[2]}/", VARY)
        if path == "/" and wants_page(merge_headers(scope["headers"]).get("accept")):
            return redirect(f"{prefix.lstrip('/')}/ui", VARY)
    shorter = path.rstrip("/")
    if shorter != path and is_known(shorter):
        query = scope.get("query_string", b"").decode("latin-1")
        return redirect(f"../{quote(shorter.rpartition('/')[2])}{'?' if query else ''}{query}")
    return problem_of(Refusal(404, f"There is nothing at {path[:200]}; {prefix}/ lists all calls."))


def is_preflight(scope: Scope) -> bool:
    """Whether a browser asks if a page of another origin may make a call."""
    names = {name for name, _ in scope["headers"]}
    return scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names


async def answer_preflight(scope: Scope, receive: Receive, send: Send) -> None:
    """Say that it may, by GET only and never with credentials: a page of any origin may read, none may write."""
    rules = CORSMiddleware(_unused_app, allow_origins=["*"], allow_methods=sorted(READING))
    await rules.preflight_response(RequestHeaders(scope=scope))(scope, receive, send)


async def _unused_app(*_: object) -> None:
    raise AssertionError("only its headers are used")
