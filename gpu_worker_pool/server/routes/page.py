"""The page, its files and its data; pages of another origin must not read them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import WRITER, PoolRouter
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import JSON, Headers, Response, redirect, secure_headers, takes_gzip
from gpu_worker_pool.server.parameters import PageHours, PageWeeks
from gpu_worker_pool.server.ui.data import Body, PageData
from gpu_worker_pool.wire.accounting import TimelineView, UsageView, WeeksView
from gpu_worker_pool.wire.page import MeView, PageView, PastView
from gpu_worker_pool.wire.plans import QuotaList

PACKAGE = "gpu_worker_pool.server.ui"
FOLDER = "page"
INDEX = "index.html"
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


@router.get("/ui/data/me", caller=WRITER, answered_by="leader", problems=(401, 403, 422), response_model=MeView)
async def page_me(call: Call) -> Response:
    """Who calls."""
    caller = call.caller()
    return Response(200, encode(MeView(name=caller.name, is_admin=caller.is_admin, role=caller.role)), _DATA)


@router.get("/ui/data/pool", answered_by="leader", problems=(422, 503), response_model=PageView)
async def page_pool(call: Call) -> Response:
    """The pool, for the page."""
    return _shared(call, await call.part(PageData).pool(call.target))


@router.get("/ui/data/history", problems=(422, 503), response_model=PastView)
async def page_history(call: Call) -> Response:
    """Past readings, for the page."""
    return _shared(call, await call.part(PageData).history(call.target))


@router.get("/ui/data/usage", answered_by="leader", problems=(422, 503), response_model=UsageView)
async def page_usage(call: Call) -> Response:
    """GPU-hours of today."""
    return _shared(call, await call.part(PageData).usage(call.target))


@router.get("/ui/data/weeks", answered_by="leader", problems=(422, 503), response_model=WeeksView)
async def page_weeks(call: Call, weeks: PageWeeks = "4") -> Response:
    """GPU-hours by owner and week."""
    return _shared(call, await call.part(PageData).weeks(call.target, weeks))


@router.get("/ui/data/quotas", answered_by="leader", problems=(422, 503), response_model=QuotaList)
async def page_quotas(call: Call) -> Response:
    """All quotas, for the page."""
    return _shared(call, await call.part(PageData).quotas(call.target))


@router.get("/ui/data/timeline", answered_by="leader", problems=(422, 503), response_model=TimelineView)
async def page_timeline(call: Call, hours: PageHours = "6") -> Response:
    """Who held which GPU, for the page."""
    return _shared(call, await call.part(PageData).timeline(call.target, hours))


@router.get("/ui/{file:path}", ignores_query=True, problems=(404,), media_type="*/*")
async def page_file(call: Call, file: str) -> Response:
    """A file of the page."""
    # The page itself is not among them: it has a path of its own.
    return redirect("../ui") if not file else _file(call, "" if file == INDEX else file)


def _file(call: Call, name: str) -> Response:
    file = call.part(PageFiles).find(name)
    if file is None:
        path = call.scope["path"]
        raise Refusal(404, f"There is nothing at {path[:200]}; the page is at {path.partition('/ui')[0]}/ui.")
    headers: Headers = ((b"etag", file.etag), (b"cache-control", b"no-cache"))
    if _is_known(file.etag.decode(), call.headers.get("if-none-match")):
        return Response(304, b"", headers)
    return Response(200, file.body, (*headers, (b"content-type", file.content_type)))


def _shared(call: Call, body: Body) -> Response:
    if takes_gzip(call.headers.get("accept-encoding")):
        return Response(200, body.gzipped, _SHARED_GZIPPED)
    return Response(200, body.plain, _SHARED)


def _is_known(etag: str, if_none_match: str | None) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return etag in tags or tags == ["*"]


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file. Its tag changes with its content."""

    content_type: bytes
    etag: bytes
    body: bytes


class PageFiles:
    """The files of the page by name, each read on first use. A caller's text never becomes part of a path."""

    def __init__(self) -> None:
        folder = files(PACKAGE) / FOLDER
        found = list(folder.iterdir()) if folder.is_dir() else []
        self._paths: dict[str, Traversable] = {path.name: path for path in found if _type_of(path.name)}
        self._read: dict[str, PageFile] = {}

    def find(self, name: str) -> PageFile | None:
        known = self._read.get(name)
        if known is not None:
            return known
        path, content_type = self._paths.get(name), _type_of(name)
        if path is None or content_type is None:
            return None
        body = path.read_bytes()
        etag = f'"{sha256(body).hexdigest()[:32]}"'
        return self._read.setdefault(name, PageFile(content_type.encode(), etag.encode(), body))


def _type_of(name: str) -> str | None:
    return next((kind for suffix, kind in TYPES.items() if name.endswith(suffix)), None)
