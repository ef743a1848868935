"""The leases that the servers of a client show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import quote

from gpu_worker_pool.errors import EndpointError, NoEndpointAnsweredError
from gpu_worker_pool.models import LeaseInfo
from gpu_worker_pool.wire.leases import DrainingLeaseView, LeaseList, LeaseView
from gpu_worker_pool.wire.reader import plain, read, read_time

from .acquire.places import Place, Places
from .backends.lease_backend import local_time
from .backends.server_leases import ServerLeases
from .endpoints.endpoint import Endpoint

# What a user sees under the name that the server gives it.
_SAME = ("state", "owner", "worker_id", "host", "pid", "priority", "memory_mb", "preemptible", "position")
_TIMES = ("requested_at", "granted_at", "ends_at", "ended_at")


async def list_leases(places: Places, is_mine: Callable[[str], bool], lease_id: str | None = None) -> list[LeaseInfo]:
    """All leases of the servers that answer, or those of this id; NoEndpointAnsweredError where no server answers, a ValueError
    where it cannot be an id. `is_mine` tells the workers of the client.
    """
    path = "" if lease_id is None else f"/{quote(lease_id, safe='')}"
    with_leases = [
        (place, endpoint, leases)
        for place, endpoint in places.all()
        if isinstance(leases := place.backend(endpoint), ServerLeases)
    ]
    answers = await asyncio.gather(*(leases.look_up(path) for _, _, leases in with_leases), return_exceptions=True)
    reasons: dict[str, str] = {}
    found = []
    for (place, endpoint, _), answer in zip(with_leases, answers, strict=True):
        if isinstance(answer, EndpointError):
            reasons[endpoint.id] = answer.reason
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found += [
                _info(place, endpoint, lease, is_mine=is_mine(lease.worker_id or ""))
                for lease in _leases_in(answer, lease_id)
            ]
    if len(reasons) == len(answers) > 0:
        raise NoEndpointAnsweredError(reasons, waited_s=0.0)
    return found


def _leases_in(answer: Any, lease_id: str | None) -> tuple[LeaseView | DrainingLeaseView, ...]:
    if lease_id is None:
        shown = read(LeaseList, answer, clean=plain)
        return () if shown is None else tuple(shown.leases)
    lease = read(LeaseView, answer, clean=plain)
    return () if lease is None or lease.id != lease_id else (lease,)


def _info(place: Place, endpoint: Endpoint, lease: LeaseView | DrainingLeaseView, *, is_mine: bool) -> LeaseInfo:
    gpus = [(place.name_of(gpu.node), gpu.gpu_id) for gpu in lease.gpus if gpu.gpu_id is not None]
    facts: dict[str, Any] = {name: getattr(lease, name) for name in _SAME}
    facts |= {name: _shown_time(getattr(lease, name)) for name in _TIMES}
    return LeaseInfo(
        lease_id=lease.id,
        endpoint_id=gpus[0][0] if gpus else endpoint.id,
        is_mine=is_mine,
        gpu_ids=tuple(f"{name}:{index}" if place.is_multi else index for name, index in gpus),
        uuids=tuple(gpu.uuid for gpu in lease.gpus),
        labels=dict(lease.labels),
        reason=lease.reason or lease.end_reason,
        **facts,
    )


def _shown_time(text: str | None) -> datetime | None:
    at = read_time(text)
    return None if at is None else local_time(at)
