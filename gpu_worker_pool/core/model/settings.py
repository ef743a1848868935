"""Settings of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from .bounds import DEFAULT_THRESHOLDS, Thresholds, check_number, check_whole
from .request import MAX_TIME_LIMIT_S, Wishes

_MAY_BE_NONE: Final = {"default_time_limit_s", "max_time_limit_s", "take_up_s"}
# What each setting must be from and to; a whole number where the bounds are.
_BOUNDS: Final = (
    ("stale_after_s drain_limit_s context_mb reserve_after_s", 0, 1e9),
    ("computing_percent", 0, 100.0),
    ("remembered_ended_leases", 0, 10_000_000),
    ("max_queued max_queued_per_owner max_sharers max_leases_per_owner", 1, 1_000_000),
    ("default_time_limit_s max_time_limit_s", 1, MAX_TIME_LIMIT_S),
    ("preempt_grace_s", 0, 1e6),
    ("idle_after_s", 1, 1e9),
    ("take_up_s away_take_up_s", 0.1, 1e9),
)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings for the whole pool.

    `awaits_reading_after_release`: a released GPU is granted again only after a later reading shows none of the lease's
    processes. It is off where readings come too seldom to wait for.

    `context_mb`: a process that released its GPU and runs on keeps the driver's context there until it exits. A process
    that holds no more memory than this counts as gone.

    `outsiders`: whether GPUs that processes outside the pool use are kept from exclusive leases: "avoid" (always),
    "thresholds" (never: the thresholds alone decide) or "by_request" (unless the request has thresholds of its own).
    `computing_percent`: an idle process shows a utilization below this one, as does a desktop that nothing moves on.
    `max_sharers` leases may share a GPU. An owner may have `max_leases_per_owner` live leases, waiting ones included.

    `default_time_limit_s` is the time limit of requests that declare none. `reserve_after_s`: GPUs are reserved for the
    first waiter that cannot be served once it has waited that long. A preemptible lease ends `preempt_grace_s` after its
    warning. `fair_share`: of equal priority, the owner that used less is served first. A lease whose GPUs computed
    nothing for `idle_after_s` is idle; `idle_reclaim` ends it after a warning. The client of a lease that waited has
    `take_up_s` to take its grant up, or any time (None); a client that has left, `away_take_up_s`.
    """

    thresholds: Thresholds = DEFAULT_THRESHOLDS
    stale_after_s: float = 15.0
    drain_limit_s: float = 60.0
    awaits_reading_after_release: bool = True
    context_mb: float = 1024.0
    outsiders: Literal["avoid", "thresholds", "by_request"] = "by_request"
    computing_percent: float = 5.0
    remembered_ended_leases: int = 10_000
    max_queued: int = 10_000
    max_queued_per_owner: int = 1_000
    max_sharers: int = 64
    max_leases_per_owner: int = 1_000
    default_time_limit_s: float | None = None
    max_time_limit_s: float | None = None
    reserve_after_s: float = 600.0
    preempt_grace_s: float = 60.0
    fair_share: bool = False
    idle_after_s: float = 1800.0
    idle_reclaim: bool = False
    take_up_s: float | None = None
    away_take_up_s: float = 2.0

    def __post_init__(self) -> None:
        check_number("memory_threshold_percent", self.thresholds.memory_percent, 0, 100)
        check_number("utilization_threshold_percent", self.thresholds.utilization_percent, 0, 100)
        for names, low, high in _BOUNDS:
            for name in names.split():
                if (value := getattr(self, name)) is None and name in _MAY_BE_NONE:
                    continue
                if isinstance(low, int) and isinstance(high, int):
                    check_whole(name, value, low, high)
                else:
                    check_number(name, value, low, high)

    def avoids_outsiders(self, wishes: Wishes) -> bool:
        """Whether GPUs in use outside the pool are kept from this request."""
        if wishes.is_shared or self.outsiders == "thresholds":
            return False
        return self.outsiders == "avoid" or not wishes.has_thresholds

    def thresholds_for(self, wishes: Wishes) -> Thresholds:
        """The request's thresholds; the pool's where the request has none."""
        if not wishes.has_thresholds:
            return self.thresholds
        own = (wishes.memory_threshold_percent, wishes.utilization_threshold_percent)
        return Thresholds(*(ours if its is None else its for ours, its in zip(self.thresholds, own, strict=True)))
