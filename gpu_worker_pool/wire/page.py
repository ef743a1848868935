"""Bodies of the page's calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .fleet import BoxView
from .leases import GpuRef
from .pool import PoolView

RecentKind = Literal["queued", "granted", "warned", "ended", "drained", "out_of_service", "in_service"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentEvent:
    """A recent event. `label` is the lease's label `command`."""

    at: str | None
    kind: RecentKind
    lease_id: str | None
    owner: str | None
    worker_id: str | None
    label: str | None
    gpus: tuple[GpuRef, ...]
    reason: str | None
    by: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """The pool and the page's other data. `boxes` is null unless the whole fleet is shown."""

    pool: PoolView
    now: str | None
    started_at: str | None
    measured_at: float
    reading_age_s: float | None
    stale_after_s: float
    refresh_interval_s: float
    max_history: int
    happened: tuple[RecentEvent, ...]
    has_tokens: bool
    title: str
    docs: str | None
    boxes: tuple[BoxView, ...] | None = None
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The past readings of one GPU; null if it was not read."""

    memory_percent: tuple[float | None, ...]
    utilization_percent: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastView:
    """Past readings by GPU UUID; a number for each of the times in `measured_at`."""

    max_history: int
    measured_at: tuple[float, ...]
    gpus: Mapping[str, Lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeView:
    """Who calls: the name of its token, or its Unix user."""

    name: str | None
    is_admin: bool
    role: str = "user"
