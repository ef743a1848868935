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


class LeaseLister:
    """Asks every place of a client. `is_mine` tells the workers of the client."""

    def __init__(self, places: Places, is_mine: Callable[[str], bool], *, is_multi: bool) -> None:
        self._places = places
        self._is_mine = is_mine
        self._is_multi = is_multi

    async def all(self) -> list[LeaseInfo]:
        """Those of all servers that answer; NoEndpointAnsweredError where none does."""
        found = await self._ask("")
        lists = [(place, endpoint, read(LeaseList, data, clean=plain)) for place, endpoint, data in found if data]
        return [
            self._info(place, endpoint, lease)
            for place, endpoint, shown in lists
            for lease in (() if shown is None else shown.leases)
        ]

    async def one(self, lease_id: str) -> LeaseInfo | None:
        """A lease by its id, also one that has ended while its server remembers it; None where no server knows it, a ValueError
        where it cannot be an id.
        """
        for place, endpoint, data in await self._ask(f"/{quote(lease_id, safe='')}"):
            lease = read(LeaseView, data, clean=plain)
            if lease is not None and lease.id == lease_id:
                return self._info(place, endpoint, lease)
        return None

    async def _ask(self, path: str) -> list[tuple[Place, Endpoint, Any]]:
        """What each place answers; None where it does not know it."""
        with_leases = [
            (place, endpoint, leases)
            for place, endpoint in self._places.all()
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
                found.append((place, endpoint, answer))
        if reasons and not found:
            raise NoEndpointAnsweredError(reasons, waited_s=0.0)
        return found

    def _info(self, place: Place, endpoint: Endpoint, lease: LeaseView | DrainingLeaseView) -> LeaseInfo:
        gpus = [(place.name_of(gpu.node), gpu.gpu_id) for gpu in lease.gpus if gpu.gpu_id is not None]
        facts: dict[str, Any] = {name: getattr(lease, name) for name in _SAME}
        facts |= {name: _shown_time(getattr(lease, name)) for name in _TIMES}
        return LeaseInfo(
            lease_id=lease.id,
            endpoint_id=gpus[0][0] if gpus else endpoint.id,
            is_mine=self._is_mine(lease.worker_id or ""),
            gpu_ids=tuple(f"{name}:{index}" if self._is_multi else index for name, index in gpus),
            uuids=tuple(gpu.uuid for gpu in lease.gpus),
            labels=dict(lease.labels),
            reason=lease.reason or lease.end_reason,
            **facts,
        )


def _shown_time(text: str | None) -> datetime | None:
    at = read_time(text)
    return None if at is None else local_time(at)
