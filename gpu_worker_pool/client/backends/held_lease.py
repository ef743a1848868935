"""A lease that this client holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from gpu_worker_pool.core.model.gpu import Gpu
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.models import Assignment, make_assignment
from gpu_worker_pool.notices import EndNotice, Loss

if TYPE_CHECKING:
    from .lease_backend import LeaseBackend


@dataclass(eq=False, slots=True)
class HeldLease:
    """A lease from its grant to its end, at the backend that keeps it alive and releases it.

    Its TTL has certainly not begun before `safe_since`: minus infinity where that is not known, infinity where it has none.
    `is_local`: the server watches the holder's process, so no TTL runs.
    `ends_at` is when its time limit ends it, by the clock of this machine. `node_envs` has the environment on each node,
    where there are several. `names` are the endpoints of its GPUs, as the user knows them.
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
