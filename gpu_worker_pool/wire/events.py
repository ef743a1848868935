"""The data of Server-Sent Events by the event's name. Events about a lease carry the lease as it was."""

from __future__ import annotations

from dataclasses import dataclass

from .leases import AnyLease
from .statistics import GpuSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedGpu:
    """A GPU without processes of a lease that ended."""

    lease_id: str
    node: str
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOutOfService:
    """A GPU that an operator took out of service."""

    node: str
    uuid: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInService:
    """A GPU that an operator put back."""

    node: str
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredNames:
    """Processes of these names do not count as use from outside the pool."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueChange:
    """All waiters: their number and the ids of the first."""

    length: int
    first: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """An event without data."""


EVENTS: dict[str, object] = {
    "lease_queued": AnyLease,
    "lease_granted": AnyLease,
    "lease_warned": AnyLease,
    "lease_ended": AnyLease,
    "gpu_drained": DrainedGpu,
    "gpu_out_of_service": GpuOutOfService,
    "gpu_in_service": GpuInService,
    "ignored_processes": IgnoredNames,
    "plans": Nothing,
    "queue": QueueChange,
    "readings": GpuSummary,
    "changed": Nothing,
    "still_here": Nothing,
    "reset": Nothing,
}
