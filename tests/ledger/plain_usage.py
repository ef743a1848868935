"""What leases come to within a span of time, one lease after the other: the rule that the SQL must follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from math import inf
from typing import NamedTuple

from hypothesis import strategies as st

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndedLease, EndReason
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.ledger.accounts import LiveUse, Span, Usage, UsageTotals

NOW = 1000.0
NODE, OTHER_NODE = "box", "other"

# Few different times, so that they often meet, and in any order, as clocks are set.
TIMES = (0.0, 0.125, 0.25, 100.0, 200.5, 300.0, 500.0, 999.75, NOW, NOW + 1)
some_times = st.sampled_from(TIMES)


class Past(NamedTuple):
    """A lease with times that may not fit together."""

    owner: str | None
    gpus: tuple[GpuKey, ...]
    is_shared: bool
    requested_at: float
    granted_at: float | None
    ended_at: float
    reason: EndReason
    is_live: bool = False
    mean_utilization_percent: float | None = None

    def ended(self, lease_id: str) -> EndedLease:
        request = Request(Wishes(memory_mb=1000.0 if self.is_shared else None), Holder(owner=self.owner))
        times = (self.requested_at, self.granted_at, self.ended_at)
        mean = self.mean_utilization_percent
        return EndedLease(lease_id, request, self.gpus, 1, *times, self.reason, mean_utilization_percent=mean)

    def live(self, lease_id: str, node: str | None) -> LiveUse:
        count = self.count_on(node)
        return LiveUse(lease_id, self.owner, count, self.is_shared, self.requested_at, self.granted_at)

    def count_on(self, node: str | None) -> int:
        return sum(node in {None, key.node} for key in self.gpus)


pasts = st.builds(
    Past,
    owner=st.sampled_from([None, "", "ada", "bob"]),
    gpus=st.lists(st.sampled_from([GpuKey(NODE, "0"), GpuKey(NODE, "1"), GpuKey(OTHER_NODE, "0")]), max_size=3).map(
        tuple
    ),
    is_shared=st.booleans(),
    requested_at=some_times,
    granted_at=some_times | st.none(),
    ended_at=some_times,
    reason=st.sampled_from([EndReason.RELEASED, EndReason.TIME_LIMIT, EndReason.PREEMPTED, EndReason.IDLE]),
    is_live=st.booleans(),
    mean_utilization_percent=st.sampled_from([None, 0.0, 12.5, 100.0]),
)
many = st.lists(pasts, max_size=8)
spans = st.lists(
    st.tuples(some_times, some_times | st.none()).filter(lambda span: span[1] is None or span[0] < span[1]),
    min_size=1,
    max_size=3,
)


def usage(leases: Sequence[Past], span: Span, node: str | None = None) -> Usage:
    since, until = span[0], inf if span[1] is None else span[1]
    found: dict[str | None, UsageTotals] = {}
    for lease in leases:
        count = lease.count_on(node)
        if node is not None and not count:
            continue
        totals = found.setdefault(lease.owner, UsageTotals())
        granted, ended = lease.granted_at, NOW if lease.is_live else lease.ended_at
        left_queue = ended
        is_within = since <= ended < until
        if granted is not None or count:
            left_queue = -inf if granted is None else granted
            _hold(totals, lease, count, ended, (since, until))
        if lease.requested_at <= left_queue <= ended <= NOW:
            totals.wait_s += max(min(left_queue, until, NOW) - max(lease.requested_at, since), 0.0)
        else:
            totals.unknown_waits += is_within
    return {owner: totals for owner, totals in found.items() if any(astuple(totals))}


def _hold(totals: UsageTotals, lease: Past, count: int, ended: float, span: tuple[float, float]) -> None:
    since, until = span
    granted, is_within = lease.granted_at, since <= ended < until
    if granted is None or not granted <= ended <= NOW:
        totals.unknown_leases += is_within
    elif granted < until and (ended > since or granted >= since):
        held_s = max(min(ended, until, NOW) - max(granted, since), 0.0)
        totals.leases += 1
        totals.running += lease.is_live
        totals.longest_s = max(totals.longest_s, held_s)
        if lease.is_shared:
            totals.shared_gpu_s += held_s * count
        else:
            totals.gpu_s += held_s * count
        if lease.mean_utilization_percent is not None and not lease.is_live:
            totals.measured_gpu_s += held_s * count
            totals.busy_gpu_s += held_s * count * lease.mean_utilization_percent / 100
        if is_within and not lease.is_live:
            totals.time_limit_ends += lease.reason is EndReason.TIME_LIMIT
            totals.preempted_ends += lease.reason is EndReason.PREEMPTED
            totals.idle_ends += lease.reason is EndReason.IDLE
