"""Errors as `application/problem+json` (RFC 9457), with a detail that says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from gpu_worker_pool.server.authority.snapshot import encode


class Problem(BaseModel):
    """What an error looks like."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


class Refused(Exception):  # noqa: N818 - reads as what happened to the caller
    """A call that is answered with a problem: how, and what to do about it."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers or {}


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    """A response that says what is wrong and what to do."""
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail).model_dump()
    return Response(encode(body), status, headers, media_type="application/problem+json")


def install_problem_handlers(app: FastAPI) -> None:
    """Answer every error of the application in this form."""

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        return problem(error.status_code, _detail(request, error), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        said = "; ".join(f"{_place(item['loc'])}: {item['msg']}" for item in error.errors()[:5])
        return problem(422, said)

    @app.exception_handler(Exception)
    async def _unexpected(*_: object) -> Response:
        return problem(500, "The server failed on this request; its log says why.")


def _detail(request: Request, error: HTTPException) -> str:
    if error.status_code == HTTPStatus.NOT_FOUND and error.detail == "Not Found":
        home = f"{request.app.settings.api_prefix}/"
        return f"There is nothing at {request.url.path[:200]}; {home} lists what there is."
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "GET")
        return f"{request.method} is not possible at {request.url.path}; use {allowed}."
    return str(error.detail)


def _place(location: tuple[Any, ...]) -> str:
    return ".".join(map(str, location))
