"""Bodies of the page's calls, and events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .fleet import BoxView
from .leases import GpuRef
from .plans import ForecastView
from .pool import PoolView

RecentKind = Literal["queued", "granted", "warned", "ended", "drained", "out_of_service", "in_service"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentEvent:
    """An event that people are told of. `label` is the lease's label `command`."""

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
class ExpectedEnd:
    """Until when a lease is predicted to last."""

    lease_id: str
    at: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """The pool and the page's other data. `boxes` is null unless the whole fleet is shown. `advice` says why the GPUs could not be
    read, and what to do. `ends` are those of leases without a time limit.
    """

    pool: PoolView
    now: str | None
    started_at: str | None
    measured_at: float
    reading_age_s: float | None
    stale_after_s: float
    refresh_interval_s: float
    max_history: int
    advice: str | None
    ends: tuple[ExpectedEnd, ...]
    forecast: ForecastView
    happened: tuple[RecentEvent, ...]
    has_tokens: bool
    title: str
    docs: str | None
    boxes: tuple[BoxView, ...] | None = None
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeView:
    """Who calls: the name of its token, or its Unix user."""

    name: str | None
    is_admin: bool
    role: str = "user"
