"""What can be said of a GPU and a request: that it may be granted now, or why not.

A verdict is data (its fields) and a sentence (`str`). Answers, the command line and the page all show the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpu_worker_pool.core.model.memory import show_mb


@dataclass(frozen=True, slots=True)
class Eligible:
    """The GPU may be granted. The lower the score (memory + utilization, in percent), the better."""

    code: ClassVar[str] = "eligible"
    score: float

    def __str__(self) -> str:
        return "available"


@dataclass(frozen=True, slots=True)
class Excluded:
    code: ClassVar[str] = "excluded"
    reason: str

    def __str__(self) -> str:
        return f"taken out of service: {self.reason}"


@dataclass(frozen=True, slots=True)
class OtherNode:
    code: ClassVar[str] = "other_node"
    wanted: str

    def __str__(self) -> str:
        return f"not on {self.wanted}"


@dataclass(frozen=True, slots=True)
class NotAmong:
    code: ClassVar[str] = "not_among"
    wanted: str

    def __str__(self) -> str:
        return f"not among the GPUs asked for: {self.wanted}"


@dataclass(frozen=True, slots=True)
class WrongModel:
    code: ClassVar[str] = "wrong_model"
    name: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.name}, not {self.wanted}"


@dataclass(frozen=True, slots=True)
class TooSmall:
    code: ClassVar[str] = "too_small"
    limit_mb: float
    asked_mb: float

    def __str__(self) -> str:
        return (
            f"too small: {show_mb(self.asked_mb)} asked, {show_mb(self.limit_mb)} below the memory threshold when empty"
        )


@dataclass(frozen=True, slots=True)
class Leased:
    code: ClassVar[str] = "leased"
    lease_ids: tuple[str, ...]
    holders: tuple[str, ...]
    since_at: float

    def __str__(self) -> str:
        return f"leased by {', '.join(dict.fromkeys(self.holders))}"


@dataclass(frozen=True, slots=True)
class Draining:
    """Its lease has ended, but processes of that lease may still be on it."""

    code: ClassVar[str] = "draining"
    lease_id: str
    pid: int | None
    memory_mb: float | None

    def __str__(self) -> str:
        if self.pid is None:
            return "just released; the next reading will tell whether it is free"
        held = "memory" if self.memory_mb is None else f"{self.memory_mb / 1024:.1f} GiB"
        return f"draining: pid {self.pid} still holds {held}"


@dataclass(frozen=True, slots=True)
class Unhealthy:
    code: ClassVar[str] = "unhealthy"
    fault: str

    def __str__(self) -> str:
        return f"unhealthy: {self.fault}"


@dataclass(frozen=True, slots=True)
class ReadingUnknown:
    code: ClassVar[str] = "reading_unknown"
    what: str

    def __str__(self) -> str:
        return f"its {self.what} is unknown"


@dataclass(frozen=True, slots=True)
class ReadingStale:
    code: ClassVar[str] = "reading_stale"
    age_s: float

    def __str__(self) -> str:
        return f"its last reading is {self.age_s:.0f} s old"


@dataclass(frozen=True, slots=True)
class OtherServer:
    """Another server on this machine grants it; `server` says which one, and how to use that."""

    code: ClassVar[str] = "other_server"
    server: str

    def __str__(self) -> str:
        return self.server


@dataclass(frozen=True, slots=True)
class InUseOutside:
    """A process outside the pool computes there or holds much memory. It is the one with the most memory; `others` are
    there too. `memory_mb` is that of all of them. Both numbers are None if they are unknown, or not theirs.
    """

    code: ClassVar[str] = "in_use_outside"
    pid: int
    user: str | None
    program: str | None
    memory_mb: float | None
    utilization_percent: float | None = None
    others: int = 0

    def __str__(self) -> str:
        who = f"{self.program or 'a process'}{f' of {self.user}' if self.user else ''} (pid {self.pid})"
        who += f" and {self.others} more" if self.others else ""
        held = "memory unknown" if self.memory_mb is None else f"{self.memory_mb / 1024:.1f} GiB"
        busy = "" if self.utilization_percent is None else f", {self.utilization_percent:.0f} % busy"
        return f"in use outside the pool: {who}, {held}{busy}"


@dataclass(frozen=True, slots=True)
class OverMemory:
    code: ClassVar[str] = "over_memory"
    memory_percent: float
    threshold_percent: float

    def __str__(self) -> str:
        return f"memory at {self.memory_percent:.1f} %, threshold {self.threshold_percent:g} %"


@dataclass(frozen=True, slots=True)
class OverUtilization:
    code: ClassVar[str] = "over_utilization"
    utilization_percent: float
    threshold_percent: float

    def __str__(self) -> str:
        return f"utilization at {self.utilization_percent:.0f} %, threshold {self.threshold_percent:g} %"


@dataclass(frozen=True, slots=True)
class NoRoom:
    code: ClassVar[str] = "no_room"
    committed_mb: float
    asked_mb: float
    limit_mb: float
    holders: tuple[str, ...] = ()

    def __str__(self) -> str:
        free_mb = max(self.limit_mb - self.committed_mb, 0.0)
        sharers = f", shared by {', '.join(dict.fromkeys(self.holders))}" if self.holders else ""
        return f"no room: {self.asked_mb:.0f} MB asked, {free_mb:.0f} MB of {self.limit_mb:.0f} MB left{sharers}"


@dataclass(frozen=True, slots=True)
class SharersFull:
    """As many leases share it as may. More would cost every decision time."""

    code: ClassVar[str] = "sharers_full"
    sharers: int
    limit: int

    def __str__(self) -> str:
        return f"shared by {self.sharers} leases, which is the limit for a GPU"


@dataclass(frozen=True, slots=True)
class HeldForAnother:
    """Reserved for a waiter further ahead, or about to be its own. Its start is `from_at`, if that is known."""

    code: ClassVar[str] = "held"
    for_lease_id: str
    for_holder: str
    from_at: float | None = None

    def __str__(self) -> str:
        return f"kept for {self.for_holder}, ahead in the queue"


@dataclass(frozen=True, slots=True)
class Booked:
    """Kept for an owner in a span of time; without an owner, out of service in it."""

    code: ClassVar[str] = "booked"
    booking_id: str
    owner: str | None
    starts_at: float
    ends_at: float | None
    reason: str

    def __str__(self) -> str:
        whom = f"booked for {self.owner}" if self.owner else "to be taken out of service"
        return f"{whom}: {self.reason}; a request with a time limit that ends before may have it"


@dataclass(frozen=True, slots=True)
class OverQuota:
    """The owner has its quota of GPUs. More are lent only for a time."""

    code: ClassVar[str] = "over_quota"
    held: float
    quota: int

    def __str__(self) -> str:
        return (
            f"its owner has {self.held:g} of {self.quota} GPUs; above the quota only requests with a time limit, or "
            f"preemptible ones, are served"
        )


@dataclass(frozen=True, slots=True)
class OverCeiling:
    code: ClassVar[str] = "over_ceiling"
    held: float
    ceiling: int

    def __str__(self) -> str:
        return f"its owner has {self.held:g} of at most {self.ceiling} GPU{'' if self.ceiling == 1 else 's'}"


Ineligible = (
    Excluded
    | OtherNode
    | NotAmong
    | WrongModel
    | TooSmall
    | Leased
    | Draining
    | Unhealthy
    | ReadingUnknown
    | ReadingStale
    | OtherServer
    | InUseOutside
    | OverMemory
    | OverUtilization
    | NoRoom
    | SharersFull
    | HeldForAnother
    | Booked
    | OverQuota
    | OverCeiling
)
Verdict = Eligible | Ineligible
