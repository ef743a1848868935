"""What a client tells about its pool: status, metrics, health. Everything is read from the fleet at the time of the
call.
"""

from __future__ import annotations

from typing import Any

from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.models import EndpointInfo, MultiEndpointPoolStatus, PoolStatus, WorkerInfo

from .acquire.tally import Tally
from .endpoints.fleet import Fleet, Member
from .endpoints.seen_pool import SeenGpu


class Reports:
    """Status, metrics and health of a client, from its fleet and its tally."""

    def __init__(self, config: ClientConfig, fleet: Fleet, tally: Tally) -> None:
        self._config = config
        self._fleet = fleet
        self._tally = tally

    def status(self) -> PoolStatus:
        """The whole pool; with endpoints in multi-endpoint mode."""
        assignments: dict[Any, list[WorkerInfo]] = {}
        total = available = unseen = 0
        blocked = set(self._tally.waiting)
        workers: set[tuple[str, str]] = set()
        for member in self._members():
            view = member.gpus()
            total += len(view.gpus)
            available += view.available
            blocked.update(view.queued)
            unseen += view.queue_length - len(view.queued)
            for gpu in view.gpus:
                key = f"{member.id}:{gpu.index}" if self._config.is_multi else gpu.index
                if gpu.workers:
                    assignments[key] = [WorkerInfo(worker_id=worker) for worker in gpu.workers]
                workers.update((member.id, worker) for worker in gpu.workers)
        waiting = len(blocked.difference(self._tally.done)) + unseen
        if not self._config.is_multi:
            return PoolStatus(total, available, len(workers), waiting, assignments)
        infos = [self._info(member) for member in self._fleet.members.values()]
        return MultiEndpointPoolStatus(
            total_gpus=total,
            available_gpus=available,
            active_workers=len(workers),
            blocked_workers=waiting,
            gpu_assignments=assignments,
            total_endpoints=len(infos),
            healthy_endpoints=sum(info.is_healthy for info in infos),
            endpoint_details=self.endpoints(),
            endpoints=infos,
        )

    def endpoints(self) -> list[dict[str, Any]]:
        """A dict for each endpoint."""
        return [
            {
                "endpoint_id": info.endpoint_id,
                "url": info.url,
                "is_healthy": info.is_healthy,
                "last_seen": info.last_seen,
                "total_gpus": info.total_gpus,
                "available_gpus": info.available_gpus,
                "response_time_ms": info.response_time_ms,
                "has_leases": self._fleet.members[info.endpoint_id].endpoint.kind == "leases",
                "error": self._fleet.members[info.endpoint_id].endpoint.last_error,
            }
            for info in map(self._info, self._fleet.members.values())
        ]

    def metrics(self) -> dict[str, Any]:
        """All counts, for monitoring."""
        status = self.status()
        used = status.total_gpus - status.available_gpus
        strategy = self._fleet.balancer.name
        return {
            "total_gpus": status.total_gpus,
            "available_gpus": status.available_gpus,
            "active_workers": status.active_workers,
            "blocked_workers": status.blocked_workers,
            "thresholds": {
                "memory_threshold_percent": self._config.memory_threshold,
                "utilization_threshold_percent": self._config.utilization_threshold,
            },
            "gpu_metrics": [self._gpu(member, gpu) for member in self._members() for gpu in member.gpus().gpus],
            "assignments": {
                str(gpu_id): [worker.worker_id for worker in workers]
                for gpu_id, workers in status.gpu_assignments.items()
            },
            "pool_summary": {
                "total_gpus": status.total_gpus,
                "available_gpus": status.available_gpus,
                "active_workers": status.active_workers,
                "blocked_workers": status.blocked_workers,
                "efficiency_percent": round(100.0 * used / status.total_gpus, 2) if status.total_gpus else 0.0,
            },
            "endpoints": {
                "total": len(self._fleet.members),
                "healthy": sum(member.endpoint.is_healthy for member in self._fleet.members.values()),
                "details": {id_: self._details(member) for id_, member in self._fleet.members.items()},
            },
            "load_balancer": {
                "strategy_name": strategy,
                "total_requests": self._tally.requests,
                "successful_requests": self._tally.granted,
                "failed_requests": self._tally.failed,
                "success_rate": self._tally.success_rate,
                "requests_by_endpoint": dict(self._tally.by_endpoint),
            },
            "error_recovery": self.recovery(),
        }

    def recovery(self) -> dict[str, Any]:
        """Which endpoints are up, which are not and why, and how their breakers stand."""
        healthy = [id_ for id_, member in self._fleet.members.items() if member.endpoint.is_healthy]
        degraded = [id_ for id_ in self._fleet.members if id_ not in healthy]
        breakers = {id_: dict(member.endpoint.breaker_stats()) for id_, member in self._fleet.members.items()}
        total = len(self._fleet.members)
        return {
            "healthy_endpoints": healthy,
            "degraded_endpoints": degraded,
            "circuit_breaker_stats": breakers,
            "degradation_manager": {
                "is_fully_degraded": not healthy,
                "is_partially_degraded": bool(healthy) and bool(degraded),
                "healthy_endpoints": healthy,
                "degraded_endpoints": degraded,
                "circuit_breaker_stats": breakers,
                "total_endpoints": total,
            },
            "endpoint_health_summary": {
                "total_count": total,
                "healthy_count": len(healthy),
                "degraded_count": len(degraded),
                "health_percent": round(100.0 * len(healthy) / total, 2) if total else 0.0,
            },
            "errors": self._fleet.reasons(),
        }

    def recovery_summary(self) -> str:
        """The recovery status for people."""
        found = self.recovery()
        healthy, total = len(found["healthy_endpoints"]), len(self._fleet.members)
        word = "None" if healthy == total else "Full" if not healthy else "Partial"
        lines = ["=== Error Recovery Status ===", f"Degradation Status: {word} ({healthy}/{total} endpoints healthy)"]
        for id_, member in self._fleet.members.items():
            stats, endpoint = found["circuit_breaker_stats"][id_], member.endpoint
            state = "healthy" if endpoint.is_healthy else f"degraded: {endpoint.last_error}"
            lines.append(
                f"  {id_} ({endpoint.url.url}): {state}; circuit breaker {stats['state']}, "
                f"{stats['failure_rate']}% of the last calls failed"
            )
        return "\n".join(lines)

    def _members(self) -> list[Member]:
        return [member for member in self._fleet.members.values() if member.endpoint.is_healthy]

    def _info(self, member: Member) -> EndpointInfo:
        view, endpoint = member.gpus(), member.endpoint
        is_up = endpoint.is_healthy
        return EndpointInfo(
            endpoint_id=member.id,
            url=endpoint.url.url,
            is_healthy=is_up,
            last_seen=endpoint.last_seen,
            total_gpus=len(view.gpus),
            available_gpus=view.available if is_up else 0,
            response_time_ms=endpoint.response_time_ms,
        )

    def _details(self, member: Member) -> dict[str, Any]:
        info = self._info(member)
        return {
            "url": info.url,
            "total_gpus": info.total_gpus,
            "available_gpus": info.available_gpus,
            "is_healthy": info.is_healthy,
            "avg_response_time_ms": info.response_time_ms,
            "response_time_ms": info.response_time_ms,
            "requests": self._tally.by_endpoint.get(member.id, 0),
            "calls": member.endpoint.calls,
            "error": member.endpoint.last_error,
        }

    def _gpu(self, member: Member, gpu: SeenGpu) -> dict[str, Any]:
        return {
            "gpu_id": f"{member.id}:{gpu.index}" if self._config.is_multi else gpu.index,
            "endpoint_id": member.id,
            "name": gpu.name,
            "memory_usage_percent": gpu.memory_percent,
            "utilization_percent": gpu.utilization_percent,
            "is_available": gpu.is_free,
            "assigned_workers": len(gpu.workers),
        }
