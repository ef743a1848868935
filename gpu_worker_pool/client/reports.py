"""What a client tells about its pool: status, metrics and health, read from its endpoints at the time of the call, and the leases
that its servers show.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import Any
from urllib.parse import quote

from gpu_worker_pool.errors import EndpointError, NoEndpointAnsweredError
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.models import EndpointInfo, GpuId, LeaseInfo, MultiEndpointPoolStatus, PoolStatus, WorkerInfo
from gpu_worker_pool.wire.leases import DrainingLeaseView, LeaseList, LeaseView
from gpu_worker_pool.wire.reader import plain, read, read_time

from .acquire.acquisition import request_of
from .acquire.places import Place, Places
from .backends.lease_backend import local_time
from .backends.server_leases import ServerLeases
from .endpoints.endpoint import Endpoint
from .endpoints.seen_pool import SeenGpu
from .events import Tally

# What a user sees under the name that the server gives it.
_SAME = ("state", "owner", "worker_id", "host", "pid", "priority", "memory_mb", "preemptible", "position")
_TIMES = ("requested_at", "granted_at", "ends_at", "ended_at")


class Reports:
    """Status, metrics and health of a client, from its endpoints and its tally."""

    def __init__(self, places: Places, tally: Tally) -> None:
        self._config, self._places, self._tally = places.config, places, tally

    def status(self) -> PoolStatus:
        """The whole pool; with endpoints in multi-endpoint mode."""
        assignments: dict[GpuId, list[WorkerInfo]] = {}
        total = available = unseen = 0
        blocked = set(self._tally.waiting)
        workers: set[tuple[str, str]] = set()
        for place in self._usable():
            view = place.gpus()
            total += len(view.gpus)
            available += view.available
            blocked.update(map(request_of, view.queued))
            unseen += view.queue_length - len(view.queued)
            for gpu in view.gpus:
                if gpu.workers:
                    assignments[self._gpu_id(place, gpu)] = [
                        WorkerInfo(worker_id=worker) for worker in gpu.workers.values()
                    ]
                workers.update((place.key, worker) for worker in gpu.workers.values())
        waiting = len(blocked.difference(self._tally.done)) + unseen
        counts = (total, available, len(workers), waiting, assignments)
        if not self._config.is_multi:
            return PoolStatus(*counts)
        infos = [self._info(endpoint) for endpoint in self._places.endpoints.values()]
        return MultiEndpointPoolStatus(
            *counts,
            total_endpoints=len(infos),
            healthy_endpoints=sum(info.is_healthy for info in infos),
            endpoint_details=self.endpoints(),
            endpoints=infos,
        )

    def endpoints(self) -> list[dict[str, Any]]:
        """A dict for each endpoint."""
        return list(map(self._endpoint, self._places.endpoints.values()))

    def metrics(self) -> dict[str, Any]:
        """All counts, for monitoring."""
        status, tally = self.status(), self._tally
        counts = {
            "total_gpus": status.total_gpus,
            "available_gpus": status.available_gpus,
            "active_workers": status.active_workers,
            "blocked_workers": status.blocked_workers,
        }
        return {
            **counts,
            "thresholds": {
                "memory_threshold_percent": self._config.memory_threshold,
                "utilization_threshold_percent": self._config.utilization_threshold,
            },
            "gpu_metrics": [self._gpu(place, gpu) for place in self._usable() for gpu in place.gpus().gpus],
            "assignments": {
                str(gpu_id): [worker.worker_id for worker in workers]
                for gpu_id, workers in status.gpu_assignments.items()
            },
            "pool_summary": {
                **counts,
                "efficiency_percent": _percent(status.total_gpus - status.available_gpus, status.total_gpus),
            },
            "endpoints": {
                "total": len(self._places.endpoints),
                "healthy": len(self._healthy()),
                "details": {id_: self._details(endpoint) for id_, endpoint in self._places.endpoints.items()},
            },
            "load_balancer": {
                "strategy_name": self._places.balancer.name,
                "total_requests": tally.requests,
                "successful_requests": tally.granted,
                "failed_requests": tally.failed,
                "success_rate": tally.success_rate,
                "requests_by_endpoint": dict(tally.by_endpoint),
            },
            "error_recovery": self.recovery(),
        }

    def recovery(self) -> dict[str, Any]:
        """Which endpoints are up, which are not and why, and how their breakers stand."""
        endpoints, now = self._places.endpoints, boot_time()
        healthy = [endpoint.id for endpoint in self._healthy()]
        degraded = [id_ for id_ in endpoints if id_ not in healthy]
        found = {
            "healthy_endpoints": healthy,
            "degraded_endpoints": degraded,
            "circuit_breaker_stats": {id_: endpoint.breaker.stats(now) for id_, endpoint in endpoints.items()},
        }
        return {
            **found,
            "degradation_manager": {
                "is_fully_degraded": not healthy,
                "is_partially_degraded": bool(healthy) and bool(degraded),
                **found,
                "total_endpoints": len(endpoints),
            },
            "endpoint_health_summary": {
                "total_count": len(endpoints),
                "healthy_count": len(healthy),
                "degraded_count": len(degraded),
                "health_percent": _percent(len(healthy), len(endpoints)),
            },
            "errors": self._places.reasons(),
        }

    def recovery_summary(self) -> str:
        """The recovery status for people."""
        found = self.recovery()
        healthy, total = len(found["healthy_endpoints"]), len(self._places.endpoints)
        word = "None" if healthy == total else "Full" if not healthy else "Partial"
        lines = ["=== Error Recovery Status ===", f"Degradation Status: {word} ({healthy}/{total} endpoints healthy)"]
        for id_, endpoint in self._places.endpoints.items():
            stats = found["circuit_breaker_stats"][id_]
            state = "healthy" if endpoint.is_healthy else f"degraded: {endpoint.last_error}"
            lines.append(
                f"  {id_} ({endpoint.url.url}): {state}; circuit breaker {stats['state']}, "
                f"{stats['failure_rate']}% of the last calls failed"
            )
        return "\n".join(lines)

    def _usable(self) -> list[Place]:
        """Each pool that is up once: a fleet is one, however many of its boxes are endpoints."""
        return [place for place, _ in self._places.all() if place.is_healthy]

    def _healthy(self) -> list[Endpoint]:
        return [endpoint for endpoint in self._places.endpoints.values() if endpoint.is_healthy]

    def _info(self, endpoint: Endpoint) -> EndpointInfo:
        view = self._places.gpus_of(endpoint)
        return EndpointInfo(
            endpoint_id=endpoint.id,
            url=endpoint.url.url,
            is_healthy=endpoint.is_healthy,
            last_seen=endpoint.last_seen,
            total_gpus=len(view.gpus),
            available_gpus=view.available if endpoint.is_healthy else 0,
            response_time_ms=endpoint.response_time_ms,
        )

    def _endpoint(self, endpoint: Endpoint) -> dict[str, Any]:
        has_leases = endpoint.kind == "leases"
        return {**asdict(self._info(endpoint)), "has_leases": has_leases, "error": endpoint.last_error}

    def _details(self, endpoint: Endpoint) -> dict[str, Any]:
        found = self._endpoint(endpoint)
        del found["last_seen"]  # all here is ready for JSON
        return {
            **found,
            "avg_response_time_ms": endpoint.response_time_ms,
            "requests": self._tally.by_endpoint.get(endpoint.id, 0),
            "calls": endpoint.calls,
        }

    def _gpu(self, place: Place, gpu: SeenGpu) -> dict[str, Any]:
        return {
            "gpu_id": self._gpu_id(place, gpu),
            "endpoint_id": place.name_of(gpu.node),
            "name": gpu.name,
            "memory_usage_percent": gpu.memory_percent,
            "utilization_percent": gpu.utilization_percent,
            "is_available": gpu.is_free,
            "assigned_workers": len(gpu.workers),
        }

    def _gpu_id(self, place: Place, gpu: SeenGpu) -> GpuId:
        return f"{place.name_of(gpu.node)}:{gpu.index}" if self._config.is_multi else gpu.index


def _percent(part: int, whole: int) -> float:
    return round(100.0 * part / whole, 2) if whole else 0.0


# --- leases ------------------------------------------------------------------------------------------------------------


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
