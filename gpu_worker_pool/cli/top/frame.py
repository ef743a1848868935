"""What `gpu-pool top` knows at one moment: each server's last report, how old it is, and the last readings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from gpu_worker_pool.cli.pools.report import GpuReport, PoolReport
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.wire.same_server import pool_key, same_as


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU: its report, and its utilization at the last readings, the newest last."""

    report: GpuReport
    temperature_c: float | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    utilization_percents: Sequence[float | None] = ()
    is_stale: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            **self.report.as_json(),
            "temperature_c": self.temperature_c,
            "power_draw_w": self.power_draw_w,
            "power_limit_w": self.power_limit_w,
        }


@dataclass(frozen=True, slots=True)
class ServerState:
    """One server. `report` is the last one it gave, `age_s` old; None where it never gave one.

    `error` is why the last call failed. `is_stale`: what is known may no longer be true, because a call failed or the
    answer takes too long.
    """

    endpoint: str
    url: str
    report: PoolReport | None = None
    gpus: tuple[GpuRow, ...] = ()
    age_s: float | None = None
    error: str | None = None
    is_stale: bool = True
    same_as: str | None = None

    @property
    def is_up(self) -> bool:
        return self.report is not None and not self.is_stale

    def as_json(self) -> dict[str, Any]:
        """The last report of a server that does not answer is shown, with its age."""
        report = self.report or PoolReport(self.endpoint, self.url, self.error or "it has not answered yet")
        return {
            **report.as_json(),
            "is_up": self.is_up,
            "error": self.error or report.error,
            "age_s": None if self.age_s is None else round(self.age_s, 3),
            "same_as": self.same_as,
            "gpus": [row.as_json() for row in self.gpus],
        }


@dataclass(frozen=True, slots=True)
class Frame:
    """All servers at one moment; `at` is this machine's wall clock."""

    servers: tuple[ServerState, ...]
    at: datetime
    interval_s: float = 1.0
    is_paused: bool = False

    @property
    def distinct(self) -> tuple[ServerState, ...]:
        """Each server once, however many endpoints lead to it."""
        return tuple(server for server in self.servers if server.same_as is None)

    def as_json(self) -> dict[str, Any]:
        return {
            "at": iso_time(self.at.timestamp()),
            "interval_s": self.interval_s,
            "endpoints": [server.as_json() for server in self.servers],
        }


def without_twins(servers: Sequence[ServerState]) -> tuple[ServerState, ...]:
    """The same, with those marked that are an earlier server under another address."""
    views = [(server.endpoint, server.report.view if server.report else None) for server in servers]
    twins = same_as((id_, pool_key(view.server_id, view.node) if view else None) for id_, view in views)
    return tuple(
        replace(server, gpus=(), same_as=twins[server.endpoint]) if server.endpoint in twins else server
        for server in servers
    )
