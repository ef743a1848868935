"""Bodies about what operators configure and what is to come: quotas, bookings, forecasts, and tokens, of which a server knows
only digests.
"""

from __future__ import annotations

from dataclasses import dataclass

from .leases import DateBasis, GpuRef


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaView:
    """The quota of an owner, the most `gpus`, and what that owner has; null: no limit. `*` stands for all without a quota of their own.

    `used_gpu_hours` fades by half in a week. `share_factor` is 1 for an owner that used nothing, and 0.5 for one that
    used exactly its share. What `*` has is null.
    """

    owner: str
    gpus: int | None = None
    weight: float = 1.0
    max_priority: int | None = None
    max_time_limit_s: float | None = None
    max_queued: int | None = None
    held_gpus: float | None = None
    queued: int | None = None
    used_gpu_hours: float | None = None
    share_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """Owners who may hold `quota` GPUs at most together (null: no limit), and whose requests go first on `first_right`. `named` is as
    an administrator said it, with Unix groups as `@name`; `members` are the owners. `warning` says what may be wrong with that.
    """

    name: str
    named: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    quota: int | None = None
    first_right: tuple[GpuRef, ...] = ()
    held_gpus: float | None = None
    queued: int | None = None
    warning: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaList:
    """All quotas, the use of owners without one, and the groups."""

    node: str | None
    server_id: str
    fair_share: bool
    quotas: tuple[QuotaView, ...]
    others: tuple[QuotaView, ...] = ()
    groups: tuple[GroupView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupList:
    """All groups."""

    node: str | None
    server_id: str
    groups: tuple[GroupView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BookingView:
    """GPUs that are kept for an owner in a span of time. Without an owner they are taken out of service at its start.
    `late_holders` have leases there that nothing ends before.
    """

    id: str
    gpus: tuple[GpuRef, ...]
    starts_at: str
    ends_at: str | None = None
    owner: str | None = None
    reason: str = ""
    booked_by: str | None = None
    late_holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationView:
    """GPUs that are kept for the first waiter that cannot be served, and when it will probably start with them: when the
    lease of `after` has ended, as its time limit says or as is predicted (`basis`).
    """

    lease_id: str
    holder: str
    gpus: tuple[GpuRef, ...]
    starts_at: str
    basis: DateBasis
    after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BookingList:
    """All bookings, the earliest first."""

    node: str | None
    bookings: tuple[BookingView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """A token that is accepted. `digest` is its SHA-256 in hexadecimal; null for one of GPU_POOL_TOKENS."""

    digest: str | None
    name: str
    role: str
    added_at: str | None = None
    added_by: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenList:
    """All tokens that are accepted."""

    server_id: str
    tokens: tuple[TokenView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastStart:
    """When a request for this many GPUs of one box would probably start. `at` is null if nothing tells when, or if the request
    would be refused: `why` says so. A time that is not after `now` means at once.
    """

    gpus: int
    at: str | None
    basis: DateBasis
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForecast:
    """The GPUs of one model, how many of them are free, and the starts of requests for them."""

    model: str | None
    gpus: int
    free: int
    starts: tuple[ForecastStart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastView:
    """What a request that is made now may expect: exclusive, of priority 0, without a time limit. `starts` are for GPUs of any
    model, or of the one that was asked for; `models` are all models, unless one was asked for. There are starts for 1, 2, 4 and 8
    GPUs, as far as one box could ever give as many, or for the number that was asked for.
    """

    node: str | None
    now: str | None
    can_grant: bool
    starts: tuple[ForecastStart, ...]
    models: tuple[ModelForecast, ...] = ()
