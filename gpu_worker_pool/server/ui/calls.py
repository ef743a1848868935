"""GET /ui and all that is below it: the page, its files and its data. None of it is for pages of another origin."""

from __future__ import annotations

import re

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpu_worker_pool.ledger.driver import NotWritten
from gpu_worker_pool.server.authority.snapshot import encode
from gpu_worker_pool.server.calls.leases import LeaseCalls
from gpu_worker_pool.server.http.access import CHALLENGE, Denied
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.problems import Refused
from gpu_worker_pool.server.http.shared_answer import SharedAnswer

from .data import PageData
from .files import INDEX, PageFile, PageFiles

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
Headers = list[tuple[bytes, bytes]]
_ON_EVERYTHING: Headers = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_DATA: Headers = [*_ON_EVERYTHING, (b"content-type", b"application/json"), (b"cache-control", b"no-store")]
_SHARED: Headers = [*_DATA, (b"vary", b"Accept-Encoding")]
_SHARED_GZIPPED: Headers = [*_SHARED, (b"content-encoding", b"gzip")]
_QUALITY = re.compile(r"\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*", re.IGNORECASE)


class PageCalls:
    """Answers them."""

    def __init__(self, leases: LeaseCalls, data: PageData, *, prefix: str) -> None:
        self._leases = leases
        self._data = data
        self._files = PageFiles()
        self._path = f"{prefix}/ui"
        self._below = f"{prefix}/ui/"

    def is_mine(self, path: str) -> bool:
        """Whether this is answered here."""
        return path == self._path or path.startswith(self._below)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call, errors included."""
        call = Call(scope, receive, self._leases.tokens)
        try:
            status, headers, body = await self._answer(scope["method"], scope["path"], call)
        except (Denied, Refused, NotWritten) as error:
            response: Response = self._leases.problem_of(error)
            response.raw_headers += _ON_EVERYTHING
            await response(scope, receive, send)
            return
        headers = [*headers, (b"content-length", b"%d" % len(body))] if status != 304 else headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def stop(self) -> None:
        """Let nobody wait any more."""
        self._data.stop()

    async def close(self) -> None:
        """Leave nothing running."""
        await self._data.close()

    async def _answer(self, method: str, path: str, call: Call) -> tuple[int, Headers, bytes]:
        if method != "GET":
            detail = f"{method} is not possible at {path[:200]}; use GET."
            raise Refused(405, detail, {"Allow": "GET, HEAD"})
        name = path[len(self._below) :]
        if path == self._below:
            return 307, [*_ON_EVERYTHING, (b"location", b"../ui")], b""
        if name == "data/me":
            return 200, _DATA, _me(call)
        if name.startswith("data/"):
            shared = self._data.find(name.removeprefix("data/"), call)
            if shared is not None:
                return await _shared(shared, call)
        file = self._files.find(name or INDEX) if name != INDEX else None
        if file is None:
            raise Refused(404, f"There is nothing at {path[:200]}; the page is at {self._path}.")
        return _file(file, call)


def wants_page(accept: str | None) -> bool:
    """Whether whoever sends this Accept header would rather have a page than JSON. Who names no page gets JSON."""
    ranges: dict[str, float] = {}
    for part in (accept or "").split(","):
        kind, _, parameters = part.partition(";")
        ranges[kind.strip().lower()] = _quality(parameters)
    page = ranges.get("text/html", 0.0)
    json = next((ranges[kind] for kind in ("application/json", "application/*", "*/*") if kind in ranges), 0.0)
    return page > 0 and page >= json


def takes_gzip(accept_encoding: str | None) -> bool:
    """Whether whoever sends this Accept-Encoding header can read what is compressed."""
    for part in (accept_encoding or "").split(","):
        coding, _, parameters = part.partition(";")
        if coding.strip().lower() == "gzip":
            return _quality(parameters) > 0
    return False


def _quality(parameters: str) -> float:
    """How much it is wanted, by its parameter q; one that cannot be read is none."""
    for parameter in parameters.split(";"):
        found = _QUALITY.fullmatch(parameter)
        if found is not None:
            return float(found[1])
    return 1.0


async def _shared(answer: SharedAnswer, call: Call) -> tuple[int, Headers, bytes]:
    body = await answer.get()
    if takes_gzip(call.headers.get("accept-encoding")):
        return 200, _SHARED_GZIPPED, body.gzipped
    return 200, _SHARED, body.plain


def _me(call: Call) -> bytes:
    call.query()
    if "authorization" not in call.headers:
        raise Denied(401, 'Send "Authorization: Bearer" with a token, to hear whose it is.', CHALLENGE)
    caller = call.caller()
    return encode({"name": caller.name, "is_admin": caller.is_admin})


def _file(file: PageFile, call: Call) -> tuple[int, Headers, bytes]:
    headers = [*_ON_EVERYTHING, (b"etag", file.etag), (b"cache-control", b"no-cache")]
    if _is_known(file.etag.decode(), call.headers.get("if-none-match")):
        return 304, headers, b""
    return 200, [*headers, (b"content-type", file.content_type)], file.body


def _is_known(etag: str, if_none_match: str | None) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return etag in tags or tags == ["*"]
