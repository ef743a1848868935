"""The OpenAPI document and the two pages that show it. They work without the internet: a package has their scripts."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute

from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.wire.routes import Resource, Route

from .call import Call, Handlers
from .problems import Refusal
from .response import Headers, Response, encode, secure_headers

if TYPE_CHECKING:
    from starlette.responses import HTMLResponse

# The package with the scripts of both pages; nothing else of it is used.
ASSETS_PACKAGE = "fastapi_offline"
MISSING = (
    "<!doctype html><title>API documentation</title><p>The scripts of this page are not installed. Install them with "
    "<code>pip install 'gpu-worker-pool[server]'</code>. The description of the API itself is at "
    '<a href="{openapi}">{openapi}</a>.'
)
HTML: Headers = ((b"content-type", b"text/html; charset=utf-8"),)
# As the page's own, but for what the two scripts do: they write styles, show small images, and search in a worker.
POLICY = (
    "default-src 'none'; script-src 'self'{inline}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    "connect-src 'self'; worker-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# The only script within the page; its hash is in the policy.
_INLINE = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def assets_folder() -> Path | None:
    """The folder of the scripts; None if they are not installed."""
    # Only located: importing the package would load FastAPI.
    found = find_spec(ASSETS_PACKAGE)
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "static"
    return folder if (folder / "swagger-ui-bundle.js").is_file() else None


class Docs:
    """Handles the document and its pages. An empty path in the settings turns one off."""

    def __init__(self, table: Iterable[Resource], settings: ServerSettings, assets: Path | None) -> None:
        self._documented = tuple(table)
        self._settings = settings
        self._assets = assets
        self._body: bytes | None = None
        self._making = asyncio.Lock()

    def resources(self) -> list[Resource]:
        pages = {"openapi": "/openapi.json", "swagger": self._settings.docs_url, "redoc": self._settings.redoc_url}
        if self._assets is not None and (pages["swagger"] or pages["redoc"]):
            pages["docs_asset"] = "/docs-assets/{file}"
        return [
            Resource(path, None, (Route("GET", name, "", None),), cors="asks") for name, path in pages.items() if path
        ]

    def handlers(self) -> Handlers:
        known = {"openapi": self.openapi, "swagger": self.swagger, "redoc": self.redoc, "docs_asset": self.asset}
        return {route.name: known[route.name] for resource in self.resources() for route in resource.routes}

    def document(self, routes: Iterable[BaseRoute]) -> dict[str, Any]:
        from .openapi import make_document  # noqa: PLC0415 - it loads FastAPI, which takes longer than a whole start

        settings = self._settings
        return make_document(
            self._documented,
            routes,
            prefix=settings.api_prefix,
            title=settings.title,
            version=settings.version,
            description=settings.description,
        )

    async def openapi(self, call: Call) -> Response:
        """The document, made once in a thread: it takes long, and no other caller must wait for it."""
        async with self._making:
            if self._body is None:
                self._body = await asyncio.to_thread(lambda: encode(call.app.openapi()))
        return Response(200, self._body)

    async def swagger(self, _: Call) -> Response:
        await asyncio.to_thread(import_module, "fastapi.openapi.docs")
        from fastapi.openapi.docs import get_swagger_ui_html  # noqa: PLC0415 - as above

        scripts = {"swagger_js_url": "swagger-ui-bundle.js", "swagger_css_url": "swagger-ui.css"}
        return self._page(get_swagger_ui_html, swagger_favicon_url="favicon.png", **scripts)

    async def redoc(self, _: Call) -> Response:
        await asyncio.to_thread(import_module, "fastapi.openapi.docs")
        from fastapi.openapi.docs import get_redoc_html  # noqa: PLC0415 - as above

        make = partial(get_redoc_html, with_google_fonts=False)
        return self._page(make, redoc_favicon_url="favicon.png", redoc_js_url="redoc.standalone.js")

    def _page(self, make: Callable[..., HTMLResponse], **files: str) -> Response:
        prefix = self._settings.api_prefix
        openapi = f"{prefix}/openapi.json"
        if self._assets is None:
            return self._shown(MISSING.format(openapi=openapi).encode())
        urls = {name: f"{prefix}/docs-assets/{file}" for name, file in files.items()}
        page = make(openapi_url=openapi, title=escape(self._settings.title), **urls)
        return self._shown(bytes(page.body))

    def _shown(self, body: bytes) -> Response:
        hashes = (b64encode(sha256(script).digest()).decode() for script in _INLINE.findall(body))
        policy = POLICY.format(inline="".join(f" 'sha256-{one}'" for one in hashes))
        return Response(200, body, (*HTML, *secure_headers(policy)))

    async def asset(self, call: Call) -> Response:
        from starlette.exceptions import HTTPException  # noqa: PLC0415 - few servers are asked for these
        from starlette.responses import FileResponse  # noqa: PLC0415
        from starlette.staticfiles import StaticFiles  # noqa: PLC0415

        try:
            static = StaticFiles(directory=self._assets)
            found = await static.get_response(call.parameters["file"], {**call.scope, "method": "GET"})
        except HTTPException:
            path, prefix = call.scope["path"][:200], self._settings.api_prefix
            raise Refusal(404, f"There is nothing at {path}; {prefix}/ lists all calls.") from None
        body = await asyncio.to_thread(Path(found.path).read_bytes) if isinstance(found, FileResponse) else b""
        headers = tuple(item for item in found.raw_headers if item[0] != b"content-length")
        return Response(found.status_code, body, headers)
