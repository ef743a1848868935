"""What hands out the GPUs of a place, its server or this process where the server has no leases, and a lease that it has granted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from gpu_worker_pool.core.model.gpu import Gpu
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.models import Assignment, LeaseEnding, make_assignment
from gpu_worker_pool.notices import EndNotice, Loss


@dataclass(eq=False, slots=True)
class HeldLease:
    """A lease from its grant to its end, at the backend that keeps it alive and releases it.

    Its TTL has certainly not begun before `safe_since`: minus infinity where that is not known, infinity where it has none.
    `is_local`: the server watches the holder's process, so no TTL runs.
    `ends_at` is when its time limit ends it, by the clock of this machine. `node_envs` has the environment on each node,
    where there are several. `names` are the endpoints of its GPUs, as the user knows them. `end_note` is told to the server
    with its release.
    """

    id: str
    request: Request
    backend: LeaseBackend
    gpus: tuple[Gpu, ...]
    env: Mapping[str, str]
    safe_since: float
    fence: int | None = None
    is_local: bool = False
    ends_at: datetime | None = None
    node_envs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    end_note: str | None = None
    lost: Loss = field(init=False)
    warned: EndNotice = field(default_factory=EndNotice)
    assignment: Assignment = field(init=False)

    def __post_init__(self) -> None:
        self.lost = Loss(self.request.ttl_s, is_local=self.is_local)

    @property
    def worker_id(self) -> str:
        return self.request.holder.worker_id or ""

    def assign(self, *, is_multi: bool) -> Assignment:
        """Make what the user gets for it."""
        self.assignment = make_assignment(
            [(name, gpu.index) for name, gpu in zip(self.names, self.gpus, strict=True)],
            self.worker_id,
            datetime.now(),  # noqa: DTZ005 - local time, as all times of the documents
            is_multi=is_multi,
            lease_id=self.id,
            fence=self.fence,
            server_url=self.backend.url,
            uuids=tuple(gpu.key.uuid for gpu in self.gpus),
            nodes=tuple(gpu.key.node for gpu in self.gpus),
            memory_mb=self.request.wishes.memory_mb,
            env=dict(self.env),
            node_envs=dict(self.node_envs),
            ends_at=self.ends_at,
            lost=self.lost,
            warned=self.warned,
        )
        return self.assignment


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
