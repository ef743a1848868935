"""The page, its files and its data; pages of another origin must not read them."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.agent.handshake import VERSION
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.box.sampler import Sampler
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import WRITER, PoolRouter
from gpu_worker_pool.server.http.response import JSON, Headers, Refusal, Response, redirect, secure_headers, takes_gzip
from gpu_worker_pool.server.http.shared_answer import SharedAnswers
from gpu_worker_pool.server.http.tokens import Tokens
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.views.pool_view import forecast_view, pool_view, predicted_ends
from gpu_worker_pool.server.views.target import Target
from gpu_worker_pool.wire.pool import MeView, PageView

from .events import Streams
from .fleet import box_views

MOST_QUEUED = 200
POOL_PACE_S = 0.5
# A forecast takes a pass over the queue for each size and model.
FORECAST_PACE_S = 1.0
# A body up to this size is compressed in the event loop: a thread would take longer.
SMALL_BYTES = 4096

FOLDER = Path(__file__).parents[1] / "ui" / "page"
INDEX = "index.html"
MODULES = b"<!-- modules -->"
# How the version of the files begins in their paths.
VERSION_MARK = "v-"
FOR_EVER = b"public, max-age=31536000, immutable"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
# On every answer of the page, errors included.
PAGE_HEADERS: Headers = secure_headers(POLICY)
_DATA: Headers = (*JSON, (b"cache-control", b"no-store"))
_SHARED: Headers = (*_DATA, (b"vary", b"Accept-Encoding"))
_SHARED_GZIPPED: Headers = (*_SHARED, (b"content-encoding", b"gzip"))


router = PoolRouter(tags=("page",), headers=PAGE_HEADERS)


@router.get("/ui", ignores_query=True, media_type="text/html", help="The page: see the pool in a browser")
async def page(call: Call) -> Response:
    """The page."""
    return _file(call, INDEX)


@router.get(
    "/ui/data/me",
    caller=WRITER,
    answered_by="leader",
    problems=(401, 403, 422),
    response_model=MeView,
    is_known_to_box=True,
)
async def page_me(call: Call) -> Response:
    """Who calls."""
    caller = call.caller()
    return Response(200, encode(MeView(name=caller.name, is_admin=caller.is_admin, role=caller.role)), _DATA)


@router.get("/ui/data/pool", answered_by="leader", problems=(422, 503), response_model=PageView)
async def page_pool(call: Call) -> Response:
    """The pool, for the page."""
    body = await call.part(PageData).body(call.target)
    if takes_gzip(call.headers.get("accept-encoding")):
        return Response(200, body.gzipped, _SHARED_GZIPPED)
    return Response(200, body.plain, _SHARED)


@router.get("/ui/{file:path}", ignores_query=True, problems=(404,), media_type="*/*")
async def page_file(call: Call, file: str) -> Response:
    """A file of the page."""
    # The page itself is not among them: it has a path of its own.
    return redirect("../ui") if not file else _file(call, "" if file == INDEX else file)


def _file(call: Call, name: str) -> Response:
    files = call.part(PageFiles)
    version, _, rest = name.partition("/")
    is_versioned = version == files.version
    file = files.by_name.get(rest if version.startswith(VERSION_MARK) else name)
    if file is None:
        path = call.scope["path"]
        raise Refusal(404, f"There is nothing at {path[:200]}; the page is at {path.partition('/ui')[0]}/ui.")
    headers: Headers = ((b"etag", file.etag), (b"cache-control", FOR_EVER if is_versioned else b"no-cache"))
    known = [tag.strip().removeprefix("W/") for tag in call.headers.get("if-none-match", "").split(",")]
    if file.etag.decode() in known or known == ["*"]:
        return Response(304, b"", headers)
    headers = (*headers, (b"content-type", file.content_type), (b"vary", b"Accept-Encoding"))
    if takes_gzip(call.headers.get("accept-encoding")):
        return Response(200, file.body.gzipped, (*headers, (b"content-encoding", b"gzip")))
    return Response(200, file.body.plain, headers)


class Body(NamedTuple):
    """A body in both forms."""

    plain: bytes
    gzipped: bytes

    @classmethod
    async def of(cls, plain: bytes) -> Body:
        """Compress a body; a large one in a thread."""
        compress = partial(gzip.compress, plain, 1, mtime=0)
        return cls(plain, compress() if len(plain) <= SMALL_BYTES else await asyncio.to_thread(compress))


@dataclass(frozen=True, slots=True)
class PageData:
    """What all open pages show, made once for all of them. `tokens` are those of the server."""

    settings: ServerSettings
    pool: Pool
    sampler: Sampler
    shared: SharedAnswers
    streams: Streams
    tokens: Tokens
    started_at: str | None = field(default_factory=lambda: iso_time(time.time()))

    async def body(self, target: Target) -> Body:
        return await self.shared.get(("page", target), partial(self._make, target), POOL_PACE_S)

    async def _make(self, target: Target) -> Body:
        pool = await pool_view(self.pool, target, MOST_QUEUED)
        expected = await self.shared.get(
            ("forecast of pages", target), partial(forecast_view, self.pool, target), FORECAST_PACE_S, may_be_old=True
        )
        settings, sampler = self.settings, self.sampler
        view = PageView(
            pool=pool,
            # By the clock of the leases' times; by the wall clock before the journal is open.
            now=iso_time(self.pool.wall_now() if self.pool.is_open else time.time()),
            started_at=self.started_at,
            measured_at=sampler.snapshot.taken.timestamp(),
            reading_age_s=round(sampler.age_s(), 3) if sampler.has_sampled else None,
            stale_after_s=settings.stale_after_s,
            refresh_interval_s=settings.refresh_interval,
            max_history=settings.max_history,
            advice=sampler.snapshot.error,
            ends=predicted_ends(self.pool, target),
            forecast=expected,
            happened=self.streams.recent(target),
            has_tokens=not self.tokens.is_unset,
            title=settings.title,
            docs=settings.docs_url.lstrip("/") or None,
            version=VERSION,
            boxes=None if self.pool.membership is None else box_views(self.pool),
        )
        return await Body.of(encode(view))


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file. Its tag changes with its content."""

    content_type: bytes
    etag: bytes
    body: Body


class PageFiles:
    """The files of the page. A caller's text never becomes part of a path.

    Their version changes with the content of any of them. The page names each file below its version, so that a browser keeps a
    file until another version is there, and a module finds the others beside it. Under the name of another version there is the
    present file, which is not kept: a page that was loaded just before the server was replaced still works.
    """

    def __init__(self) -> None:
        found = {str(path.relative_to(FOLDER)): path for path in FOLDER.rglob("*") if path.suffix in TYPES}
        self._bodies = {name: found[name].read_bytes() for name in sorted(found)}
        digest = sha256(b"\0".join(name.encode() + body for name, body in self._bodies.items()))
        self.version = f"{VERSION_MARK}{digest.hexdigest()[:12]}"

    @cached_property
    def by_name(self) -> Mapping[str, PageFile]:
        modules = [f'<link rel="modulepreload" href="ui/{name}">' for name in self._bodies if name.endswith(".js")]
        index = self._bodies[INDEX].replace(MODULES, "\n    ".join(modules).encode())
        index = index.replace(b'"ui/', f'"ui/{self.version}/'.encode())
        return {name: _page_file(name, body) for name, body in {**self._bodies, INDEX: index}.items()}


def _page_file(name: str, body: bytes) -> PageFile:
    etag = f'"{sha256(body).hexdigest()[:32]}"'
    return PageFile(TYPES[Path(name).suffix].encode(), etag.encode(), Body(body, gzip.compress(body, mtime=0)))
