"""What can be asked of whoever hands out GPUs at an endpoint: its server, or this process where that has no leases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpu_worker_pool.core.model.request import Request


@dataclass(frozen=True, slots=True)
class LeasedGpu:
    """A GPU that was granted."""

    index: int
    uuid: str
    name: str


@dataclass(frozen=True, slots=True)
class Granted:
    """It is ours. `safe_since` is a time from which on its TTL has surely not run yet; None where that is not known."""

    gpus: tuple[LeasedGpu, ...]
    fence: int | None
    env: dict[str, str]
    safe_since: float | None


@dataclass(frozen=True, slots=True)
class Queued:
    """It waits, and why."""

    position: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """It will never be granted there, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """It has ended: somebody took it out of the queue or away."""

    reason: str


Answer = Granted | Queued | Refused | Over


@dataclass(frozen=True, slots=True)
class Renewal:
    """What became of leases that were renewed; sent at this time."""

    sent_at: float
    renewed: frozenset[str]
    lost: dict[str, str]


class LeaseBook(Protocol):
    """Hands out the GPUs of one endpoint. Every call may raise EndpointError; each may be made again."""

    def needs_heartbeat(self) -> bool:
        """Whether a lease ends unless it is renewed."""
        ...

    async def ask(self, lease_id: str, request: Request) -> Answer:
        """Ask, or ask again; never waits for a GPU."""
        ...

    async def wait(self, lease_id: str, wait_s: float) -> Answer:
        """Wait until it is no longer queued, or the time is over."""
        ...

    async def renew(self, lease_ids: Sequence[str]) -> Renewal:
        """A sign of life."""
        ...

    async def release(self, lease_id: str) -> None:
        """Give back, or leave the queue; what is unknown there is given back."""
        ...
