"""What leases come to within a span of time: the account itself."""

from __future__ import annotations

from dataclasses import astuple
from itertools import pairwise
from math import nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.accounting.usage import US_PER_S, LeaseTimes, UsageAccount, UsageTotals
from tests.core.accounting.lease_times import NOW, count, many, some_times


def amounts(account: UsageAccount) -> dict[str | None, tuple[int, ...]]:
    """What adds up, by owner."""
    return {
        owner: (usage.gpu_us, usage.shared_gpu_us, usage.wait_us)
        for owner, usage in account.by_owner.items()
        if usage.gpu_us or usage.shared_gpu_us or usage.wait_us
    }


# The account


def test_an_hour_on_two_gpus_is_two_gpu_hours_and_what_lies_outside_the_span_is_left_out() -> None:
    ended = LeaseTimes("ada", 2, False, 100.0, 200.0, 500.0)
    running = LeaseTimes("ada", 1, True, 800.0, 900.0, None, is_live=True)
    gone = LeaseTimes("bob", 0, False, 250.0, None, 350.0)

    assert count([ended, running, gone]).by_owner == {
        "ada": UsageTotals(
            gpu_us=600 * US_PER_S,
            shared_gpu_us=100 * US_PER_S,
            leases=2,
            running=1,
            longest_us=300 * US_PER_S,
            wait_us=200 * US_PER_S,
        ),
        "bob": UsageTotals(wait_us=100 * US_PER_S),
    }
    assert count([ended, running, gone], 300, 400).by_owner == {
        "ada": UsageTotals(gpu_us=200 * US_PER_S, leases=1, longest_us=100 * US_PER_S),
        "bob": UsageTotals(wait_us=50 * US_PER_S),
    }
    assert count([ended, running, gone], 600, 700).by_owner == {}


def test_leases_that_the_pool_ended_within_the_span_are_counted_by_why() -> None:
    held = LeaseTimes("ada", 1, False, 100.0, 200.0, 500.0)
    reasons = ("time_limit", "time_limit", "preempted", "idle", "released")
    usage = count([held._replace(end_reason=reason) for reason in reasons]).by_owner["ada"]
    assert (usage.time_limit_ends, usage.preempted_ends, usage.idle_ends) == (2, 1, 1)


@pytest.mark.parametrize(
    "lease",
    [
        LeaseTimes("ada", 1, False, 300.0, 300.0, 200.0),  # the clock was set back while it was held
        LeaseTimes("ada", 1, False, None, None, 200.0),
        LeaseTimes("ada", 1, False, 100.0, nan, 200.0),
    ],
)
def test_a_time_that_is_unknown_or_runs_backwards_is_counted_apart_where_it_ended(lease: LeaseTimes) -> None:
    usage = count([lease], 150, 250).by_owner["ada"]
    assert (usage.unknown_leases, usage.leases, usage.gpu_us, usage.shared_gpu_us) == (1, 0, 0, 0)
    elsewhere = count([lease], 250, 350)
    assert elsewhere.total().unknown_leases == elsewhere.total().leases == 0


def test_a_running_lease_from_the_future_is_unknown_now_and_no_part_of_the_past() -> None:
    lease = LeaseTimes("ada", 1, False, NOW + 5, NOW + 5, None, is_live=True)
    assert count([lease]).total() == UsageTotals(unknown_leases=1, unknown_waits=1)
    assert count([lease], 0, 900).total() == UsageTotals()


@settings(max_examples=60, deadline=None)
@given(many, st.lists(st.floats(0, NOW), min_size=1, max_size=4, unique=True))
def test_the_parts_of_a_span_add_up_to_the_whole(found: list[LeaseTimes], cuts: list[float]) -> None:
    edges: list[float | None] = [0.0, *sorted(cut for cut in cuts if cut > 0), None]
    total: dict[str | None, list[int]] = {}
    unknown = 0
    always_unknown = sum(count([lease], 1e6, 2e6).total().unknown_leases for lease in found)
    for since, until in pairwise(edges):
        assert since is not None
        part = count(found, since, until)
        unknown += part.total().unknown_leases - always_unknown
        for owner, parts in amounts(part).items():
            total[owner] = [a + b for a, b in zip(total.get(owner, [0, 0, 0]), parts, strict=True)]
    whole = count(found, 0.0)
    assert {owner: tuple(parts) for owner, parts in total.items()} == amounts(whole)
    assert unknown == whole.total().unknown_leases - always_unknown


@settings(max_examples=60, deadline=None)
@given(many, st.randoms(use_true_random=False), some_times)
def test_the_order_of_the_leases_does_not_matter(found: list[LeaseTimes], random: Random, since: float) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    assert count(found, since).by_owner == count(shuffled, since).by_owner


@settings(max_examples=60, deadline=None)
@given(many, st.floats(0, NOW), st.floats(0.001, NOW) | st.none())
def test_nothing_is_negative_and_nobody_has_more_than_the_span(
    found: list[LeaseTimes], since: float, length: float | None
) -> None:
    account = count(found, since, None if length is None else since + length)
    span_us = round((NOW if length is None else length) * US_PER_S) + 1
    for usage in account.by_owner.values():
        assert min(astuple(usage)) >= 0
        assert any(astuple(usage))
        assert usage.running <= usage.leases <= len(found)
        assert usage.longest_us <= span_us
        assert usage.gpu_us + usage.shared_gpu_us <= usage.leases * 3 * usage.longest_us


def test_a_span_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ValueError, match="since must come first"):
        UsageAccount(5.0, 5.0, NOW)
