"""The page, its files and its data; pages of another origin must not read them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from gpu_worker_pool.server.http.accept import takes_gzip
from gpu_worker_pool.server.http.call import Call, Handler, Handlers
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import JSON, Headers, Response, encode, redirect, secure_headers
from gpu_worker_pool.wire.page import MeView
from gpu_worker_pool.wire.routes import HOURS_OF_PAGE, WEEKS_OF_PAGE

from .data import PageData, ScopedAnswer

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


class PageCalls:
    def __init__(self, data: PageData, *, prefix: str) -> None:
        self._data = data
        self._files = PageFiles()
        self._path = f"{prefix}/ui"

    def handlers(self) -> Handlers:
        data = self._data
        return {
            "page": self.page,
            "page_file": self.file,
            "page_me": self.me,
            "page_pool": _share(data.pool),
            "page_history": _share(data.history),
            "page_usage": _share(data.usage),
            "page_quotas": _share(data.quotas),
            "page_timeline": self.timeline,
            "page_weeks": self.weeks,
        }

    async def page(self, call: Call) -> Response:
        return self._file(INDEX, call)

    async def file(self, call: Call) -> Response:
        """A file of the page. The page itself is not among them: it has a path of its own."""
        name = call.parameters["file"]
        return redirect("../ui") if not name else self._file("" if name == INDEX else name, call)

    async def me(self, call: Call) -> Response:
        call.query()
        caller = call.caller()
        return Response(200, encode(MeView(name=caller.name, is_admin=caller.is_admin, role=caller.role)), _DATA)

    async def timeline(self, call: Call) -> Response:
        return await _get(self._data.timelines[call.query(HOURS_OF_PAGE)["hours"]], call)

    async def weeks(self, call: Call) -> Response:
        return await _get(self._data.weeks[call.query(WEEKS_OF_PAGE)["weeks"]], call)

    def _file(self, name: str, call: Call) -> Response:
        file = self._files.find(name)
        if file is None:
            raise Refusal(404, f"There is nothing at {call.scope['path'][:200]}; the page is at {self._path}.")
        headers: Headers = ((b"etag", file.etag), (b"cache-control", b"no-cache"))
        if _is_known(file.etag.decode(), call.headers.get("if-none-match")):
            return Response(304, b"", headers)
        return Response(200, file.body, (*headers, (b"content-type", file.content_type)))


def _share(answer: ScopedAnswer) -> Handler:
    async def share(call: Call) -> Response:
        call.query()
        return await _get(answer, call)

    return share


async def _get(answer: ScopedAnswer, call: Call) -> Response:
    body = await answer.get(call.target)
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
        folder = files(__package__) / FOLDER
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
