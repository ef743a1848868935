"""Leases with times in any order, and what they come to."""

from __future__ import annotations

from math import inf, nan

from hypothesis import strategies as st

from gpu_worker_pool.core.accounting.usage import LeaseTimes, UsageAccount

NOW = 1000.0

# Few different times, so that they often meet; in any order, as clocks are set; and such as are none.
ENDS = (0.0, 0.1, 0.3, 100.0, 200.7, 300.0, 500.0, 999.9, NOW, NOW + 1)
some_times = st.sampled_from(ENDS)
no_times = st.sampled_from([None, nan, inf, -inf, 1e300])
times = some_times | no_times
leases = st.builds(
    LeaseTimes,
    owner=st.sampled_from([None, "", "ada", "bob"]),
    gpu_count=st.integers(0, 3),
    is_shared=st.booleans(),
    requested_at=times,
    granted_at=times,
    ended_at=times,
    is_live=st.booleans(),
)
many = st.lists(leases, max_size=8)


def count(found: list[LeaseTimes], since: float = 0.0, until: float | None = None) -> UsageAccount:
    account = UsageAccount(since, until, NOW)
    for lease in found:
        account.count(lease)
    return account
