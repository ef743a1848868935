"""GPU time by owner within a span of time.

Times are counted in whole microseconds, so the parts of a span add up to the whole exactly, in any order of leases. A
time that is unknown, or runs backwards because a clock was set, is never taken for 0: such leases are counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from gpu_worker_pool.core.model.lease import EndReason

US_PER_S = 1_000_000
# Beyond any calendar: a larger value, an infinity or NaN is not a time.
MOST_S = 1e12


class LeaseTimes(NamedTuple):
    """What the accounting needs of a lease. Times are seconds since 1970; None means unknown or none.

    A lease that never left the queue has no `granted_at` and no GPUs. A live lease has no `ended_at`.
    """

    owner: str | None
    gpu_count: int
    is_shared: bool
    requested_at: float | None
    granted_at: float | None
    ended_at: float | None
    is_live: bool = False
    end_reason: str | None = None


@dataclass(slots=True)
class UsageTotals:
    """Totals of leases within a span. A lease of two GPUs for an hour is two GPU-hours.

    `gpu_us` is the time of exclusive leases, `shared_gpu_us` that of sharing leases, which overlap on a GPU. `leases`
    is how many held GPUs, `running` how many of these still do, `longest_us` the longest time of one. `wait_us` is time
    in the queue, including that of requests that left it without a GPU. `unknown_leases` held GPUs for an unknown time;
    `unknown_waits` waited for an unknown time. The last three count the leases that the pool ended within the span.
    """

    gpu_us: int = 0
    shared_gpu_us: int = 0
    leases: int = 0
    running: int = 0
    longest_us: int = 0
    wait_us: int = 0
    unknown_leases: int = 0
    unknown_waits: int = 0
    time_limit_ends: int = 0
    preempted_ends: int = 0
    idle_ends: int = 0

    def add(self, other: UsageTotals) -> None:
        self.gpu_us += other.gpu_us
        self.shared_gpu_us += other.shared_gpu_us
        self.leases += other.leases
        self.running += other.running
        self.longest_us = max(self.longest_us, other.longest_us)
        self.wait_us += other.wait_us
        self.unknown_leases += other.unknown_leases
        self.unknown_waits += other.unknown_waits
        self.time_limit_ends += other.time_limit_ends
        self.preempted_ends += other.preempted_ends
        self.idle_ends += other.idle_ends


class UsageAccount:
    """Adds up leases by owner for the span from `since` to before `until` (None: open), as known at `now`.

    A lease with unreliable times belongs to the span in which it ended; if that is unknown too, to every span.
    """

    def __init__(self, since: float, until: float | None, now: float) -> None:
        if not since < (inf if until is None else until):
            raise ValueError(f"since is {since}, until is {until}; since must come first")
        self.since = since
        self.until = until
        self.now = now
        self.by_owner: dict[str | None, UsageTotals] = {}
        self._since_us = to_us(max(since, -MOST_S)) or 0
        self._until_us: float = inf if until is None or until >= MOST_S else to_us(until) or 0
        self._now_us = to_us(now) or 0
        self._cut_us = min(self._until_us, self._now_us)

    def total(self) -> UsageTotals:
        total = UsageTotals()
        for usage in self.by_owner.values():
            total.add(usage)
        return total

    def count(self, lease: LeaseTimes) -> None:
        """Add the part of a lease that is within the span."""
        requested, granted = to_us(lease.requested_at), to_us(lease.granted_at)
        ended = self._now_us if lease.is_live else to_us(lease.ended_at)
        left_queue = ended
        if granted is not None or lease.gpu_count > 0:
            left_queue = granted
            self._count_hold(lease, granted, ended)
        if (
            requested is None
            or left_queue is None
            or ended is None
            or not requested <= left_queue <= ended <= self._now_us
        ):
            if self._is_in_span(ended):
                self._of(lease.owner).unknown_waits += 1
        elif waited_us := self._within(requested, left_queue):
            self._of(lease.owner).wait_us += waited_us

    def _count_hold(self, lease: LeaseTimes, granted: int | None, ended: int | None) -> None:
        if granted is None or ended is None or not granted <= ended <= self._now_us:
            if self._is_in_span(ended):
                self._of(lease.owner).unknown_leases += 1
        elif granted < self._until_us and (ended > self._since_us or granted >= self._since_us):
            held_us = self._within(granted, ended)
            usage = self._of(lease.owner)
            usage.leases += 1
            usage.running += lease.is_live
            usage.longest_us = max(usage.longest_us, held_us)
            if self._is_in_span(ended):
                usage.time_limit_ends += lease.end_reason == EndReason.TIME_LIMIT
                usage.preempted_ends += lease.end_reason == EndReason.PREEMPTED
                usage.idle_ends += lease.end_reason == EndReason.IDLE
            if lease.is_shared:
                usage.shared_gpu_us += held_us * lease.gpu_count
            else:
                usage.gpu_us += held_us * lease.gpu_count

    def _of(self, owner: str | None) -> UsageTotals:
        usage = self.by_owner.get(owner)
        if usage is None:
            usage = self.by_owner[owner] = UsageTotals()
        return usage

    def _within(self, start_us: int, end_us: int) -> int:
        return int(max(min(end_us, self._cut_us) - max(start_us, self._since_us), 0))

    def _is_in_span(self, time_us: int | None) -> bool:
        return time_us is None or self._since_us <= time_us < self._until_us


def to_us(time_s: float | None) -> int | None:
    return None if time_s is None or not abs(time_s) <= MOST_S else round(time_s * US_PER_S)
