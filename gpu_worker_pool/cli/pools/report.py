"""What the servers report of their pools, as the commands show it. Unknown is None, and every text is plain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_worker_pool.cli.units import iso_time, show_duration
from gpu_worker_pool.core.model.request import Holder

from .servers import Answer

FREE = "free"
SHARED = "shared"
# The label under which `run` and `batch` say what they run.
COMMAND_LABEL = "command"


@dataclass(frozen=True, slots=True)
class GpuName:
    """A GPU as people call it: `2`, or `server1:2` where there are several servers. `id` is its UUID where it has no
    index yet.
    """

    id: str
    index: int | None
    uuid: str | None
    name: str | None

    def as_json(self) -> dict[str, Any]:
        """As docs/CLI.md has it."""
        return {"id": self.id, "gpu_id": self.index, "uuid": self.uuid, "name": self.name}


@dataclass(frozen=True, slots=True)
class GpuReport:
    """One GPU: what it is, how it is, and why it is not free."""

    gpu: GpuName
    state: str
    reason: str | None
    memory_total_mb: float | None
    memory_used_mb: float | None
    memory_committed_mb: float | None
    memory_percent: float | None
    utilization_percent: float | None
    lease_ids: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """As docs/CLI.md has it."""
        return {
            **self.gpu.as_json(),
            "state": self.state,
            "reason": self.reason,
            "memory_total_mb": self.memory_total_mb,
            "memory_used_mb": self.memory_used_mb,
            "memory_percent": None if self.memory_percent is None else round(self.memory_percent, 2),
            "utilization_percent": self.utilization_percent,
            "leases": list(self.lease_ids),
        }


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What stands between one GPU and somebody who waits."""

    gpu: GpuName
    code: str
    text: str
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """A lease at one endpoint. Fields ending in `_at` are wall-clock seconds of the server."""

    id: str
    endpoint: str
    state: str
    owner: str | None
    worker_id: str | None
    host: str | None
    pid: int | None
    priority: int
    wants: str
    gpus: tuple[GpuName, ...]
    labels: Mapping[str, str]
    position: int | None
    reason: str | None
    requested_at: float | None
    granted_at: float | None
    ended_at: float | None
    end_reason: str | None
    expires_in_s: float | None
    obstacles: tuple[Obstacle, ...]

    @property
    def holder(self) -> str:
        """Whose it is, in the words of the server's own reasons."""
        return str(Holder(worker_id=self.worker_id, owner=self.owner, pid=self.pid))

    @property
    def command(self) -> str | None:
        """What it runs, if its holder says so."""
        return self.labels.get(COMMAND_LABEL)

    @property
    def since_at(self) -> float | None:
        """Since when it holds its GPUs, or waits for some."""
        return self.granted_at if self.granted_at is not None else self.requested_at

    @property
    def why(self) -> str | None:
        """What it waits for, without its position and wishes, which stand beside it."""
        _, found, rest = (self.reason or "").partition(f"waiting for {self.wants}: ")
        return rest if found else self.reason

    def as_json(self) -> dict[str, Any]:
        """As docs/CLI.md has it."""
        return {
            "id": self.id,
            "endpoint": self.endpoint,
            "state": self.state,
            "owner": self.owner,
            "worker_id": self.worker_id,
            "host": self.host,
            "pid": self.pid,
            "priority": self.priority,
            "wants": self.wants,
            "gpus": [gpu.as_json() for gpu in self.gpus],
            "labels": dict(self.labels),
            "position": self.position,
            "reason": self.reason,
            "requested_at": iso_time(self.requested_at),
            "granted_at": iso_time(self.granted_at),
            "ended_at": iso_time(self.ended_at),
            "end_reason": self.end_reason,
            "expires_in_s": self.expires_in_s,
        }


@dataclass(frozen=True, slots=True)
class PoolReport:
    """One endpoint: its pool, or in `error` why there is none to show.

    `has_leases` is False for a server with statistics only. `same_as` names an earlier endpoint that is the same server.
    """

    endpoint: str
    url: str
    error: str | None = None
    has_leases: bool = True
    same_as: str | None = None
    node: str | None = None
    server_id: str | None = None
    source: str | None = None
    can_grant: bool = True
    trouble: str | None = None
    memory_threshold_percent: float | None = None
    gpus: tuple[GpuReport, ...] = ()
    leases: tuple[LeaseReport, ...] = ()
    queue: tuple[LeaseReport, ...] = ()
    queue_length: int = 0

    @property
    def is_up(self) -> bool:
        """Whether it answered."""
        return self.error is None

    @property
    def is_simulated(self) -> bool:
        """Whether its GPUs are made up."""
        return self.source == "simulated"

    @property
    def free(self) -> int:
        """How many GPUs an ordinary request could have at once."""
        return sum(gpu.state == FREE for gpu in self.gpus) if self.can_grant else 0

    def as_json(self) -> dict[str, Any]:
        """As docs/CLI.md has it."""
        return {
            "endpoint": self.endpoint,
            "url": self.url,
            "is_up": self.is_up,
            "error": self.error,
            "has_leases": self.has_leases if self.is_up else None,
            "same_as": self.same_as,
            "node": self.node,
            "source": self.source,
            "is_simulated": self.is_simulated,
            "can_grant": self.is_up and self.has_leases and self.can_grant,
            "trouble": self.trouble,
            "gpus": [gpu.as_json() for gpu in self.gpus],
            "leases": [lease.as_json() for lease in self.leases],
            "queue": [lease.as_json() for lease in self.queue],
            "queue_length": self.queue_length,
        }


def as_answers(reports: Iterable[PoolReport]) -> list[Answer]:
    """For saying that nobody answered."""
    return [Answer(report.endpoint, report.url, error=report.error) for report in reports]


def distinct_leases(reports: Iterable[PoolReport]) -> list[LeaseReport]:
    """All leases, granted and waiting, each server's once."""
    return [lease for report in reports if report.same_as is None for lease in (*report.leases, *report.queue)]


def show_since(at: float | None, now: float) -> str:
    """How long ago that was. The server's clock may go before ours: then it was just now."""
    return "unknown" if at is None else show_duration(now - at)


def show_gpus(gpus: Sequence[GpuName]) -> str:
    """`GPU 2`, `GPUs 2, 3`."""
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpu.id for gpu in gpus)}"
