"""The lease and admin calls as the interactive documentation lists them.

The application answers them before routing (see PoolApp), so that nothing here ever runs.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel

from gpu_worker_pool.server.http.problems import Problem
from gpu_worker_pool.server.streams.streams import FEWEST_PACE_S, MOST_PACE_S

from .admin import DrainForm
from .lease_answers import (
    IgnoredProcesses,
    Lease,
    LeaseList,
    PeersAnswer,
    Pool,
    PoolGpu,
    RenewAnswer,
    TimelineAnswer,
    UsageAnswer,
)
from .lease_form import MAX_WAIT_S, LeaseForm, LeaseId, RenewForm
from .timeline import DEFAULT_HOURS, FEWEST_HOURS, MOST_HOURS

LeaseIdInPath = Annotated[LeaseId, Path()]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Hold the answer back while it is queued.")]
Shown = Annotated[int | None, Query(ge=0, le=999_999_999, description="Show at most so many of those who wait.")]
Since = Annotated[
    str | None,
    Query(
        description="From when on: ISO 8601 (UTC unless it says otherwise) or seconds since 1970. A day before the end."
    ),
]
Until = Annotated[str | None, Query(description="To before when, likewise. Now.")]
Hours = Annotated[float, Query(ge=FEWEST_HOURS, le=MOST_HOURS, description="How far back from now.")]
Pace = Annotated[
    float | None,
    Query(
        ge=FEWEST_PACE_S,
        le=MOST_PACE_S,
        description="Only that something happened (`changed`), and at most once in so many seconds.",
    ),
]
Devices = Annotated[str, Query(pattern="^(index|uuid)$", description="How `env` names the GPUs.")]

_WRITING = (400, 401, 403, 408, 413, 415, 422, 503)


async def _list_leases() -> None: ...
async def _ask(lease_id: LeaseIdInPath, form: LeaseForm, devices: Devices = "index") -> None: ...
async def _show(lease_id: LeaseIdInPath, wait_s: Wait = 0.0, devices: Devices = "index") -> None: ...
async def _release(lease_id: LeaseIdInPath) -> None: ...
async def _renew(form: RenewForm) -> None: ...
async def _pool(queue: Shown = None) -> None: ...
async def _usage(since: Since = None, until: Until = None) -> None: ...
async def _timeline(hours: Hours = DEFAULT_HOURS) -> None: ...
async def _peers() -> None: ...
async def _events(pace_s: Pace = None) -> None: ...
async def _revoke(lease_id: LeaseIdInPath) -> None: ...
async def _drain(gpu: str, form: DrainForm | None = None) -> None: ...
async def _undrain(gpu: str) -> None: ...
async def _ignore(name: str) -> None: ...
async def _count(name: str) -> None: ...


def make_lease_docs() -> APIRouter:
    """All of them, for the OpenAPI document."""
    router = APIRouter(tags=["leases"])
    admin = APIRouter(tags=["admin"])

    _list(router, "GET", "/leases", _list_leases, LeaseList, "All live leases", ())
    _list(router, "POST", "/leases/renew", _renew, RenewAnswer, "A sign of life for leases", _WRITING)
    _list(router, "PUT", "/leases/{lease_id}", _ask, Lease, "Ask for GPUs, or ask again", (*_WRITING, 409, 429), _ASKED)
    _list(router, "GET", "/leases/{lease_id}", _show, Lease, "The lease as it is", (404, 422, 503))
    _list(router, "DELETE", "/leases/{lease_id}", _release, Lease, "Give back, or leave the queue", (*_WRITING, 404))
    _list(router, "GET", "/pool", _pool, Pool, "The node at a glance", (422,))
    _list(router, "GET", "/usage", _usage, UsageAnswer, "GPU-hours by owner", (422, 503))
    _list(router, "GET", "/timeline", _timeline, TimelineAnswer, "Who held which GPU", (422, 503))
    _list(router, "GET", "/peers", _peers, PeersAnswer, "The pools of other servers", (422,))
    router.add_api_route(
        "/events",
        _events,
        methods=["GET"],
        summary="What happens, as Server-Sent Events",
        response_class=Response,
        responses={200: {"content": {"text/event-stream": {}}}, 422: {"model": Problem}, 503: {"model": Problem}},
    )
    _list(admin, "POST", "/admin/leases/{lease_id}/revoke", _revoke, Lease, "Take a lease away", (*_WRITING, 404))
    _list(admin, "POST", "/admin/gpus/{gpu}/drain", _drain, PoolGpu, "Take a GPU out of service", (*_WRITING, 404))
    _list(admin, "POST", "/admin/gpus/{gpu}/undrain", _undrain, PoolGpu, "Put it back", (*_WRITING, 404))
    path = "/admin/ignored-processes/{name}"
    _list(admin, "PUT", path, _ignore, IgnoredProcesses, "Leave processes of this name out", _WRITING)
    _list(admin, "DELETE", path, _count, IgnoredProcesses, "Count processes of this name again", _WRITING)
    router.include_router(admin)
    return router


_ASKED: dict[int, str] = {201: "Granted", 202: "Queued, after up to wait_s", 200: "It was there already"}


def _list(  # noqa: PLR0917 - one line a call reads like a table
    router: APIRouter,
    method: str,
    path: str,
    endpoint: Any,
    model: type[BaseModel],
    summary: str,
    problems: tuple[int, ...],
    answers: dict[int, str] | None = None,
) -> None:
    responses: dict[int | str, dict[str, Any]] = {status: {"model": Problem} for status in problems}
    responses |= {status: {"model": model, "description": text} for status, text in (answers or {}).items()}
    router.add_api_route(path, endpoint, methods=[method], summary=summary, response_model=model, responses=responses)
