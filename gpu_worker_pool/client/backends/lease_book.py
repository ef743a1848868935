"""What hands out the GPUs of an endpoint: its server, or this process where the server has no leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from gpu_worker_pool.core.model.gpu import Gpu
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.models import LeaseEnding


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease is ours. Its TTL has certainly not begun before `safe_since`; None where that is not known.

    `is_local`: no TTL runs against it, because the server watches the holder's process. `ends_at` is when its time limit
    ends it, by the clock of this machine. `pool_id` identifies the pool; None where it says nothing of itself.
    """

    gpus: tuple[Gpu, ...]
    fence: int | None
    env: dict[str, str]
    safe_since: float | None
    is_local: bool = False
    ends_at: datetime | None = None
    pool_id: str | None = None
    # The environment on each node, where there are several.
    node_envs: Mapping[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Queued:
    """It waits. `is_set_aside`: GPUs are kept for it for some seconds, until this client calls again."""

    reason: str
    is_set_aside: bool = False


@dataclass(frozen=True, slots=True)
class NeverGranted:
    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """The lease has ended: it left the queue, expired, or was revoked. `words` say so in a phrase.

    `is_final`: a person ended it, so it must not be asked for again.
    """

    reason: str
    words: str = ""
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class NotBelieved:
    """The server granted something other than what was asked for. It is released and not used."""

    reason: str


LeaseAnswer = Granted | Queued | NeverGranted | Over | NotBelieved


@dataclass(frozen=True, slots=True)
class Renewal:
    """What became of leases that were renewed, and when they were, at the earliest. `lost` says how each of those ended,
    `warnings` which of the others will be ended.
    """

    renewed_at: float
    renewed: frozenset[str]
    lost: dict[str, Over]
    warnings: Mapping[str, LeaseEnding] = field(default_factory=dict)


class LeaseBook(Protocol):
    """Hands out the GPUs of one endpoint. Every call may raise EndpointError; each may be made again."""

    # Whether a lease ends unless it is renewed.
    needs_heartbeat: bool

    @property
    def endpoint_id(self) -> str | None:
        """The endpoint whose server has the leases; None where they end with the client."""

    async def ask(self, lease_id: str, request: Request) -> LeaseAnswer:
        """Ask, or ask again; never waits for a GPU."""

    async def wait(self, lease_id: str, request: Request, wait_s: float) -> LeaseAnswer:
        """Wait until it is no longer queued, or the time is over."""

    async def renew(self, lease_ids: Sequence[str], wait_s: float = 0.0, warned: Sequence[str] = ()) -> Renewal:
        """Send a heartbeat for these leases. The answer may be held back for `wait_s` while none of them has ended or been
        warned. The warning of `warned` is known; it counts again when it is withdrawn.
        """

    async def release(self, lease_id: str) -> None:
        """Release the lease, or leave the queue; a lease that is unknown there counts as released."""

    async def pool_id(self) -> str | None:
        """The pool that answers there now; None where it says nothing of itself."""
