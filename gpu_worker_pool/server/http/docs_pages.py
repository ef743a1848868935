"""Swagger UI and ReDoc without the internet: their scripts come with an installed package, or the page says so."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

# Carries the scripts of both pages; nothing else of it is used.
ASSETS_PACKAGE = "fastapi_offline"
MISSING = (
    "<!doctype html><title>API documentation</title><p>The scripts of this page are not installed. Install them with "
    "<code>pip install 'gpu-worker-pool[server]'</code>. The description of the API itself is at "
    '<a href="{openapi}">{openapi}</a>.'
)


def assets_folder() -> Path | None:
    """Where the scripts are; None where they are not installed."""
    if find_spec(ASSETS_PACKAGE) is None:
        return None
    folder = Path(str(files(ASSETS_PACKAGE) / "static"))
    return folder if (folder / "swagger-ui-bundle.js").is_file() else None


def add_docs_pages(app: FastAPI, *, prefix: str, docs_url: str, redoc_url: str, assets: Path | None) -> None:
    """Serve both pages at their addresses; an empty address switches a page off."""
    openapi = f"{prefix}/openapi.json"
    static = f"{prefix}/docs-assets"
    if assets is not None and (docs_url or redoc_url):
        app.mount(static, StaticFiles(directory=assets), name="docs-assets")

    async def swagger() -> Response:
        if assets is None:
            return HTMLResponse(MISSING.format(openapi=openapi))
        return get_swagger_ui_html(
            openapi_url=openapi,
            title=escape(app.title),
            swagger_js_url=f"{static}/swagger-ui-bundle.js",
            swagger_css_url=f"{static}/swagger-ui.css",
            swagger_favicon_url=f"{static}/favicon.png",
        )

    async def redoc() -> Response:
        if assets is None:
            return HTMLResponse(MISSING.format(openapi=openapi))
        return get_redoc_html(
            openapi_url=openapi,
            title=escape(app.title),
            redoc_js_url=f"{static}/redoc.standalone.js",
            redoc_favicon_url=f"{static}/favicon.png",
            with_google_fonts=False,
        )

    if docs_url:
        app.add_api_route(f"{prefix}{docs_url}", swagger, include_in_schema=False)
    if redoc_url:
        app.add_api_route(f"{prefix}{redoc_url}", redoc, include_in_schema=False)
