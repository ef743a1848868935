"""GPU time by owner and week. Times are counted in whole microseconds, as in `usage`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from .usage import LeaseTimes, to_us


class WeeklyUsage:
    """Adds up the GPU time of leases by owner for weeks that begin at `starts`, the last one until `now`.

    Exclusive and sharing leases count alike. `unknown_leases` held GPUs for an unknown time.
    """

    def __init__(self, starts: Sequence[float], now: float) -> None:
        if not starts or list(starts) != sorted(set(starts)) or not starts[-1] <= now:
            raise ValueError(
                f"the weeks begin at {list(starts)}, now is {now}; each must begin before the next and now"
            )
        self.since = starts[0]
        self.until: float | None = None
        self.now = now
        self.by_owner: dict[str | None, list[int]] = {}
        self.unknown_leases = 0
        self._starts = [to_us(start) or 0 for start in starts]
        self._now_us = to_us(now) or 0

    def count(self, lease: LeaseTimes) -> None:
        """Add a lease to the weeks in which it held GPUs."""
        if lease.granted_at is None and lease.gpu_count == 0:
            return
        granted, ended = to_us(lease.granted_at), self._now_us if lease.is_live else to_us(lease.ended_at)
        if granted is None or ended is None or not granted <= ended <= self._now_us:
            self.unknown_leases += ended is None or ended >= self._starts[0]
            return
        week = max(bisect_right(self._starts, granted) - 1, 0)
        while week < len(self._starts) and self._starts[week] < ended:
            until = self._starts[week + 1] if week + 1 < len(self._starts) else inf
            held_us = int(min(ended, until)) - max(granted, self._starts[week])
            weeks = self.by_owner.setdefault(lease.owner, [0] * len(self._starts))
            weeks[week] += held_us * lease.gpu_count
            week += 1

    def totals(self) -> list[int]:
        """The GPU time of all owners, by week."""
        return [sum(column) for column in zip(*self.by_owner.values(), strict=True)] or [0] * len(self._starts)
