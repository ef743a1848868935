"""Asking the servers for their pools, and reading what they answer.

Read tolerantly: what is missing or of another kind is None, never 0. Every text is made plain here, once and for all: it
comes from other people's programs and goes to a terminal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.core.model.request import Wishes

from .report import FREE, GpuName, GpuReport, LeaseReport, Obstacle, PoolReport
from .servers import Answer, Servers

# --- asking --------------------------------------------------------------------------------------------------------


async def ask_pools(servers: Servers, query: str = "") -> list[PoolReport]:
    """The pools of all endpoints, in the order they were given. Those that are down are among them."""
    reports = await asyncio.gather(*(ask_pool(servers, endpoint, query) for endpoint in servers.ids))
    first: dict[str, str] = {}
    for report in reports:
        if report.server_id is not None:
            first.setdefault(report.server_id, report.endpoint)
    others = (first.get(report.server_id or "", report.endpoint) for report in reports)
    return [
        report if other == report.endpoint else replace(report, same_as=other)
        for report, other in zip(reports, others, strict=True)
    ]


async def ask_pool(servers: Servers, endpoint: str, query: str = "") -> PoolReport:
    """The pool of one endpoint; of a server without leases, what its statistics show."""
    answer = await servers.ask(endpoint, f"/pool{query}")
    has_leases = answer.status != HTTPStatus.NOT_FOUND
    if not has_leases:
        answer = await servers.ask(endpoint, "/gpu/summary")
    if not answer.is_ok:
        return PoolReport(endpoint, answer.url, plain(answer.error))
    if has_leases:
        return read_pool(answer, is_multi=servers.config.is_multi)
    reader = _Reader(answer, is_multi=servers.config.is_multi)
    return reader.statistics(servers.config.memory_threshold, servers.config.utilization_threshold)


def read_pool(answer: Answer, *, is_multi: bool) -> PoolReport:
    """The pool in an answer of /pool."""
    return _Reader(answer, is_multi=is_multi).pool()


def read_lease(servers: Servers, answer: Answer) -> LeaseReport:
    """The lease in an answer to a call about one lease."""
    return _Reader(answer, is_multi=servers.config.is_multi).lease(_object(answer.data))


def read_gpu(servers: Servers, answer: Answer) -> GpuReport:
    """The GPU in an answer to a call about one GPU."""
    return _Reader(answer, is_multi=servers.config.is_multi).gpu(_object(answer.data))


class _Reader:
    """Reads what one endpoint answered."""

    def __init__(self, answer: Answer, *, is_multi: bool) -> None:
        self._answer = answer
        self._endpoint = answer.endpoint
        self._is_multi = is_multi

    def pool(self) -> PoolReport:
        data = _object(self._answer.data)
        if not isinstance(data.get("gpus"), list):
            return self._not_one_of_ours()
        queue = tuple(self.lease(item) for item in _objects(data, "queue"))
        thresholds = _object(data.get("thresholds"))
        return PoolReport(
            self._endpoint,
            self._answer.url,
            node=_text(data, "node"),
            server_id=_text(data, "server_id"),
            source=_text(data, "source"),
            can_grant=data.get("can_grant") is not False,
            trouble=_text(data, "trouble"),
            memory_threshold_percent=_number(thresholds, "memory_percent"),
            gpus=tuple(self.gpu(item) for item in _objects(data, "gpus")),
            leases=tuple(self.lease(item) for item in _objects(data, "leases")),
            queue=queue,
            queue_length=max(_whole(data, "queue_length") or 0, len(queue)),
        )

    def statistics(self, memory_threshold_percent: float, utilization_threshold_percent: float) -> PoolReport:
        data = _object(self._answer.data)
        if not isinstance(data.get("gpus_summary"), list):
            return self._not_one_of_ours()
        gpus = []
        for item in _objects(data, "gpus_summary"):
            gpu = replace(self.gpu(item), memory_percent=_number(item, "memory_usage_percent"))
            state, reason = _judge(gpu, memory_threshold_percent, utilization_threshold_percent)
            if item.get("healthy") is False:
                state, reason = "unhealthy", "the server calls it unhealthy"
            gpus.append(replace(gpu, state=state, reason=reason))
        return PoolReport(
            self._endpoint,
            self._answer.url,
            has_leases=False,
            source=_text(data, "source"),
            memory_threshold_percent=memory_threshold_percent,
            gpus=tuple(gpus),
        )

    def lease(self, data: Mapping[str, Any]) -> LeaseReport:
        return LeaseReport(
            id=_text(data, "id") or "?",
            endpoint=self._endpoint,
            state=_text(data, "state") or "unknown",
            owner=_text(data, "owner"),
            worker_id=_text(data, "worker_id"),
            host=_text(data, "host"),
            pid=_whole(data, "pid"),
            priority=_whole(data, "priority") or 0,
            wants=_wants(_object(data.get("wishes"))),
            # Of one whose processes still leave, those that they have not left.
            gpus=tuple(self._name(item) for item in _objects(data, "draining_gpus") or _objects(data, "gpus")),
            labels={plain(key): plain(value) for key, value in _object(data.get("labels")).items()},
            position=_whole(data, "position"),
            reason=_text(data, "reason"),
            requested_at=_time(data, "requested_at"),
            granted_at=_time(data, "granted_at"),
            ended_at=_time(data, "ended_at"),
            end_reason=_text(data, "end_reason"),
            expires_in_s=_number(data, "expires_in_s"),
            obstacles=tuple(self._obstacle(item) for item in _objects(data, "obstacles")),
        )

    def _not_one_of_ours(self) -> PoolReport:
        return PoolReport(
            self._endpoint, self._answer.url, "its answer shows no GPUs; is this a GPU statistics server?"
        )

    def _name(self, data: Mapping[str, Any]) -> GpuName:
        index, uuid = _whole(data, "gpu_id"), _text(data, "uuid")
        local = uuid or "?" if index is None else str(index)
        return GpuName(f"{self._endpoint}:{local}" if self._is_multi else local, index, uuid, _text(data, "name"))

    def gpu(self, data: Mapping[str, Any]) -> GpuReport:
        total_mb, used_mb = _number(data, "memory_total_mb"), _number(data, "memory_used_mb")
        return GpuReport(
            gpu=self._name(data),
            state=_text(data, "state") or "unknown",
            reason=_text(data, "reason"),
            memory_total_mb=total_mb,
            memory_used_mb=used_mb,
            memory_committed_mb=_number(data, "memory_committed_mb"),
            memory_percent=100 * used_mb / total_mb if total_mb and used_mb is not None else None,
            utilization_percent=_number(data, "utilization_percent"),
            lease_ids=_texts(data, "leases"),
        )

    def _obstacle(self, data: Mapping[str, Any]) -> Obstacle:
        # An obstacle's `name` is that of its verdict, and not there for most.
        code = _text(data, "code") or "unknown"
        return Obstacle(self._name(data), code, _text(data, "text") or code, _texts(data, "lease_ids"))


def _judge(
    gpu: GpuReport, memory_threshold_percent: float, utilization_threshold_percent: float
) -> tuple[str, str | None]:
    """What a client that must decide by itself would make of a GPU."""
    measured = (
        ("memory", gpu.memory_percent, memory_threshold_percent),
        ("utilization", gpu.utilization_percent, utilization_threshold_percent),
    )
    for what, percent, threshold in measured:
        if percent is None:
            return "unknown", f"its {what} is unknown"
        if percent >= threshold:
            return "busy", f"{what} at {percent:.0f} %, threshold {threshold:g} %"
    return FREE, None


# --- fields --------------------------------------------------------------------------------------------------------


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = data.get(key)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _text(data: Mapping[str, Any], key: str) -> str | None:
    value = data.get(key)
    return plain(value) if isinstance(value, str) and value else None


def _texts(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = data.get(key)
    return tuple(plain(item) for item in found if isinstance(item, str)) if isinstance(found, list) else ()


def _number(data: Mapping[str, Any], key: str) -> float | None:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # No measurement is so large, and no whole number of a thousand digits becomes a float.
    return float(value) if abs(value) < 1e15 else None


def _whole(data: Mapping[str, Any], key: str) -> int | None:
    value = _number(data, key)
    return int(value) if value is not None and value.is_integer() else None


def _time(data: Mapping[str, Any], key: str) -> float | None:
    try:
        at = datetime.fromisoformat(data[key])
        wall_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    # Near the ends of the calendar a time cannot be shown in every time zone.
    return wall_s if 0 <= wall_s < 2**36 else None


def _wants(wishes: Mapping[str, Any]) -> str:
    try:
        gpus, memory_mb = _whole(wishes, "gpus") or 1, _number(wishes, "memory_mb")
        among = _texts(wishes, "among") or None
        return str(Wishes(gpus=gpus, memory_mb=memory_mb, model=_text(wishes, "model"), among=among))
    except ValueError:  # of a server with other bounds
        return "GPUs"
