"""The description of the API and its two pages, which work without the internet."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from html import escape
from math import inf
from pathlib import Path
from typing import Any, Final

from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse
from starlette.staticfiles import StaticFiles

from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import PoolRoute, PoolRouter
from gpu_worker_pool.server.http.response import Headers, Refusal, Response, secure_headers
from gpu_worker_pool.server.http.shared_answer import SharedAnswers
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.wire.leases import ObstacleView, VerdictView
from gpu_worker_pool.wire.service import Problem

# The package with the scripts of both pages; nothing else of it is used.
ASSETS_PACKAGE: Final = "fastapi_offline"
HTML: Final[Headers] = ((b"content-type", b"text/html; charset=utf-8"),)
# As the page's own, but for what the two scripts do: they write styles, show small images, and search in a worker.
POLICY: Final = (
    "default-src 'none'; script-src 'self'{inline}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    "connect-src 'self'; worker-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# The only script within the page; its hash is in the policy.
_INLINE = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
# Types of which not all keys are always sent; these always are.
_ALWAYS: Final = {VerdictView: {"code", "text"}, ObstacleView: {"code", "text", "node", "gpu_id", "uuid"}}


def describe(app: Any, settings: ServerSettings) -> dict[str, Any]:
    """The OpenAPI document: FastAPI makes it from the functions that answer the calls."""
    routes = [
        route.documented()
        for route in app.routes
        if isinstance(route, PoolRoute)
        and route.include_in_schema
        and (settings.gpu_pool_fleet or not route.declared.is_fleet)
    ]
    document = get_openapi(
        title=settings.title, version=settings.version, description=settings.description, routes=routes
    )
    schemas = document["components"]["schemas"]
    of_fastapi = {"$ref": "#/components/schemas/HTTPValidationError"}
    for path in document["paths"].values():
        for call in path.values():
            for status, answer in list(call["responses"].items()):
                if answer.get("content", {}).get("application/json", {}).get("schema") == of_fastapi:
                    del call["responses"][status]  # FastAPI's own, which this server never sends
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas[Problem.__name__] = TypeAdapter(Problem).json_schema(mode="serialization")
    for name, schema in schemas.items():
        if not name.endswith("Form"):  # an answer has all of its keys
            schema["required"] = list(schema.get("properties", ()))
    for kind, always in _ALWAYS.items():
        schemas[kind.__name__]["required"] = sorted(always)
    return document


def docs_router(settings: ServerSettings) -> PoolRouter:
    """The pages at the addresses of the settings; an empty one turns a page off."""
    router = PoolRouter(ignores_query=True, is_readable_everywhere=True, is_documented=False)
    router.get("/openapi.json")(openapi)
    if settings.docs_url:
        router.get(settings.docs_url, help="Swagger API documentation")(swagger)
    if settings.redoc_url:
        router.get(settings.redoc_url, help="ReDoc API documentation")(redoc)
    if settings.docs_url or settings.redoc_url:
        router.get("/docs-assets/{file:path}")(docs_asset)
    return router


async def openapi(call: Call) -> bytes:
    """The OpenAPI document, made once in a thread: it takes long, and no other caller must wait for it."""
    app = call.app

    async def make() -> bytes:
        return await asyncio.to_thread(lambda: encode(app.openapi()))

    return await call.part(SharedAnswers).get("openapi", make, inf, may_be_old=True)


async def swagger(call: Call) -> Response:
    """The page of Swagger UI."""
    scripts = {"swagger_js_url": "swagger-ui-bundle.js", "swagger_css_url": "swagger-ui.css"}
    return _page(call, get_swagger_ui_html, swagger_favicon_url="favicon.png", **scripts)


async def redoc(call: Call) -> Response:
    """The page of ReDoc."""
    make = partial(get_redoc_html, with_google_fonts=False)
    return _page(call, make, redoc_favicon_url="favicon.png", redoc_js_url="redoc.standalone.js")


async def docs_asset(call: Call, file: str) -> Response:
    """A script of these pages."""
    try:
        static = StaticFiles(packages=[(ASSETS_PACKAGE, "static")])
        found = await static.get_response(file, {**call.scope, "method": "GET"})
    except HTTPException:
        path, prefix = call.scope["path"][:200], call.part(ServerSettings).api_prefix
        raise Refusal(404, f"There is nothing at {path}; {prefix}/ lists all calls.") from None
    body = await asyncio.to_thread(Path(found.path).read_bytes) if isinstance(found, FileResponse) else b""
    headers = tuple(item for item in found.raw_headers if item[0] != b"content-length")
    return Response(found.status_code, body, headers)


def _page(call: Call, make: Callable[..., HTMLResponse], **files: str) -> Response:
    settings = call.part(ServerSettings)
    prefix = settings.api_prefix
    address = f"{prefix}/openapi.json"
    urls = {name: f"{prefix}/docs-assets/{file}" for name, file in files.items()}
    return _shown(bytes(make(openapi_url=address, title=escape(settings.title), **urls).body))


def _shown(body: bytes) -> Response:
    hashes = (b64encode(sha256(script).digest()).decode() for script in _INLINE.findall(body))
    policy = POLICY.format(inline="".join(f" 'sha256-{one}'" for one in hashes))
    return Response(200, body, (*HTML, *secure_headers(policy)))
