"""What somebody wants of the pool. Frozen facts; the time comes beside them."""

from __future__ import annotations

from dataclasses import dataclass

from .gpu import GpuKey, Reading
from .request import Request


@dataclass(frozen=True, slots=True)
class Open:
    """The driver starts, or starts again: `boot_id` tells a restart of it from a reboot of the machine."""

    boot_id: str
    wall_offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestLease:
    """Ask for a lease. The asker makes the id, so that asking twice is harmless."""

    lease_id: str
    request: Request


@dataclass(frozen=True, slots=True)
class Renew:
    """A sign of life for these leases, active or queued."""

    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Give back, or leave the queue."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """An operator takes a lease away."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class ReportDeath:
    """The holder's process is known to be dead."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class Observe:
    """GPUs were looked at."""

    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but time has passed."""


@dataclass(frozen=True, slots=True)
class ServeQueue:
    """Grant to the first waiter who can be served, if there is one."""


@dataclass(frozen=True, slots=True)
class ExcludeGpu:
    """An operator takes a GPU out of service: no new leases on it, those there run on."""

    gpu: GpuKey
    reason: str


@dataclass(frozen=True, slots=True)
class IncludeGpu:
    """An operator puts a GPU back into service."""

    gpu: GpuKey


@dataclass(frozen=True, slots=True)
class IgnoreProcess:
    """Processes of this name do not count as use of a GPU from outside the pool (a desktop's, say)."""

    name: str


@dataclass(frozen=True, slots=True)
class CountProcess:
    """Processes of this name count again."""

    name: str


Command = (
    Open
    | RequestLease
    | Renew
    | Release
    | Revoke
    | ReportDeath
    | Observe
    | Tick
    | ServeQueue
    | ExcludeGpu
    | IncludeGpu
    | IgnoreProcess
    | CountProcess
)
