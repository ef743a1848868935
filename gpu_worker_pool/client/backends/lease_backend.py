"""What hands out the GPUs of a place, its server or this process where the server has no leases, and a lease that it has granted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from gpu_worker_pool.core.model.gpu import Gpu
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.models import Assignment, LeaseEnding, make_assignment
from gpu_worker_pool.notices import EndNotice, Loss


@dataclass(eq=False, slots=True)
class HeldLease:
    """A lease from its grant to its end: what the user has of it, and the backend that keeps it alive and releases it.

    Its TTL has certainly not begun before `safe_since`: minus infinity where that is not known, infinity where it has none.
    `end_note` is told to the server with its release.
    """

    id: str
    assignment: Assignment
    request: Request
    backend: LeaseBackend
    safe_since: float
    lost: Loss
    warned: EndNotice
    end_note: str | None = None


def granted(
    backend: LeaseBackend,
    lease_id: str,
    request: Request,
    gpus: Sequence[tuple[str, Gpu]],
    safe_since: float,
    *,
    is_local: bool = False,
    **facts: Any,
) -> HeldLease:
    """A lease that was granted: its GPUs, each with the id of its endpoint as the user knows it, and other facts of its
    assignment. `is_local`: the server watches the holder's process, so no TTL runs.
    """
    lost, warned = Loss(request.ttl_s, is_local=is_local), EndNotice()
    assignment = make_assignment(
        [(name, gpu.index) for name, gpu in gpus],
        request.holder.worker_id or "",
        datetime.now(),  # noqa: DTZ005 - local time, as all times of the documents
        is_multi=backend.is_multi,
        lease_id=lease_id,
        server_url=backend.url,
        uuids=tuple(gpu.key.uuid for _, gpu in gpus),
        nodes=tuple(gpu.key.node for _, gpu in gpus),
        memory_mb=request.wishes.memory_mb,
        lost=lost,
        warned=warned,
        **facts,
    )
    return HeldLease(lease_id, assignment, request, backend, safe_since, lost, warned)


def local_time(at: float) -> datetime:
    """As all times of the documents."""
    return datetime.fromtimestamp(at)  # noqa: DTZ006 - see above


@dataclass(frozen=True, slots=True)
class Queued:
    """It waits. `is_set_aside`: GPUs are kept for it for some seconds, until this client calls again."""

    reason: str
    is_set_aside: bool = False


@dataclass(frozen=True, slots=True)
class NeverGranted:
    """It is never granted there. `is_grant`: the server granted something other than what was asked for, which is not
    used, and is released.
    """

    reason: str
    is_grant: bool = False


@dataclass(frozen=True, slots=True)
class Over:
    """The lease has ended: it left the queue, expired, or was revoked. `words` say so in a phrase.

    `is_final`: a person ended it, so it must not be asked for again.
    """

    reason: str
    words: str = ""
    is_final: bool = False


LeaseAnswer = HeldLease | Queued | NeverGranted | Over


@dataclass(frozen=True, slots=True)
class Renewal:
    """What became of leases that were renewed, and when they were, at the earliest. `lost` says how each of those ended,
    `warnings` which of the others will be ended.
    """

    renewed_at: float
    renewed: frozenset[str]
    lost: Mapping[str, Over]
    warnings: Mapping[str, LeaseEnding] = field(default_factory=dict)


class LeaseBackend(Protocol):
    """Hands out the GPUs of one place. Every call may raise EndpointError; each may be made again."""

    # Whether GPUs have global ids.
    is_multi: bool

    @property
    def url(self) -> str | None:
        """The server that has the leases; None where they end with the client."""

    @property
    def endpoint_id(self) -> str:
        """The endpoint that is asked first."""

    async def ask(self, lease_id: str, request: Request) -> LeaseAnswer:
        """Ask, or ask again; never waits for a GPU."""

    async def wait(self, lease_id: str, request: Request, wait_s: float) -> LeaseAnswer:
        """Wait until it is no longer queued, or the time is over."""

    async def renew(self, lease_ids: Sequence[str], wait_s: float = 0.0, warned: Sequence[str] = ()) -> Renewal:
        """Send a heartbeat for these leases. The answer may be held back for `wait_s` while none of them has ended or been
        warned. The warning of `warned` is known; it counts again when it is withdrawn.
        """

    async def release(self, lease_id: str, note: str | None = None) -> None:
        """Release the lease, or leave the queue; a lease that is unknown there counts as released. `note` is kept with its
        end.
        """
