"""A circuit breaker in each of its states, and what it shows."""

import json

import pytest

from gpu_worker_pool.client.endpoints.breaker import BreakerState, CircuitBreaker, Permit
from tests.client.endpoints.breakers import OPEN_FOR, PROBE_TIMEOUT_S, THRESHOLD, hand_back, new_breaker


def acquired(breaker: CircuitBreaker, now: float) -> Permit:
    permit = breaker.try_acquire(now)
    assert permit is not None
    return permit


def fail(breaker: CircuitBreaker, now: float, times: int = 1) -> None:
    for _ in range(times):
        breaker.failed(acquired(breaker, now), now, jitter=0.0)


def succeed(breaker: CircuitBreaker, now: float, times: int = 1) -> None:
    for _ in range(times):
        breaker.succeeded(acquired(breaker, now))


def opened_breaker(now: float) -> CircuitBreaker:
    """A breaker that opened at `now` for 2 seconds."""
    breaker = new_breaker()
    fail(breaker, now, times=THRESHOLD)
    return breaker


# --- closed --------------------------------------------------------------------------------------------------------


def test_a_new_breaker_is_closed_and_lets_everyone_through() -> None:
    breaker = new_breaker()

    assert breaker.state_at(0.0) is BreakerState.CLOSED
    assert None not in [breaker.try_acquire(0.0) for _ in range(100)]
    assert breaker.retry_in_s(0.0) == 0.0


def test_it_opens_with_the_last_of_the_failures_in_a_row_that_it_takes() -> None:
    breaker = new_breaker()

    fail(breaker, 0.0, times=THRESHOLD - 1)
    assert breaker.state_at(0.0) is BreakerState.CLOSED

    fail(breaker, 0.0)
    assert breaker.state_at(0.0) is BreakerState.OPEN


def test_a_success_starts_the_counting_of_failures_anew() -> None:
    breaker = new_breaker()
    for _ in range(10):
        fail(breaker, 0.0, times=THRESHOLD - 1)
        succeed(breaker, 0.0)

    assert breaker.state_at(0.0) is BreakerState.CLOSED


def test_failures_of_calls_made_side_by_side_open_it_too() -> None:
    breaker = new_breaker()
    permits = [acquired(breaker, 0.0) for _ in range(THRESHOLD)]

    for permit in permits:
        breaker.failed(permit, 1.0, jitter=0.0)

    assert breaker.state_at(1.0) is BreakerState.OPEN


def test_a_cancelled_call_neither_counts_as_a_failure_nor_breaks_a_row_of_them() -> None:
    breaker = new_breaker()
    fail(breaker, 0.0, times=THRESHOLD - 1)

    for _ in range(10):
        breaker.cancelled(acquired(breaker, 0.0))
    assert breaker.state_at(0.0) is BreakerState.CLOSED

    fail(breaker, 0.0)
    assert breaker.state_at(0.0) is BreakerState.OPEN


# --- open ----------------------------------------------------------------------------------------------------------


def test_an_open_breaker_lets_nobody_through_before_its_time() -> None:
    breaker = opened_breaker(100.0)

    assert [breaker.try_acquire(now) for now in (100.0, 101.0, 101.999)] == [None, None, None]
    assert breaker.try_acquire(102.0) is not None


def test_retry_in_says_how_long_it_stays_open() -> None:
    breaker = opened_breaker(100.0)

    assert [breaker.retry_in_s(now) for now in (100.0, 101.5, 102.0, 200.0)] == [2.0, 0.5, 0.0, 0.0]


def test_it_stays_open_longer_with_each_failed_probe_up_to_the_maximum() -> None:
    breaker = opened_breaker(0.0)
    now, durations_s = 0.0, []
    for _ in range(5):
        durations_s.append(breaker.retry_in_s(now))
        now += breaker.retry_in_s(now)
        fail(breaker, now)

    assert durations_s == [2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_success_makes_the_next_opening_short_again() -> None:
    breaker = opened_breaker(0.0)
    fail(breaker, 2.0)
    succeed(breaker, 6.0)

    fail(breaker, 7.0, times=THRESHOLD)

    assert breaker.retry_in_s(7.0) == 2.0


def test_jitter_spreads_out_the_time_it_stays_open() -> None:
    breaker = new_breaker()
    fail(breaker, 0.0, times=THRESHOLD - 1)
    breaker.failed(acquired(breaker, 0.0), 0.0, jitter=0.5)

    assert breaker.retry_in_s(0.0) == 3.0


def test_a_manual_trigger_lets_a_probe_through_at_once() -> None:
    breaker = opened_breaker(0.0)

    breaker.allow_probe_now(0.5)

    assert breaker.state_at(0.5) is BreakerState.HALF_OPEN
    acquired(breaker, 0.5)
    assert breaker.try_acquire(0.5) is None


def test_a_manual_trigger_changes_nothing_on_a_closed_breaker() -> None:
    breaker = new_breaker()
    fail(breaker, 0.0, times=THRESHOLD - 1)

    breaker.allow_probe_now(0.0)
    assert breaker.state_at(0.0) is BreakerState.CLOSED

    fail(breaker, 0.0)
    assert breaker.state_at(0.0) is BreakerState.OPEN


def test_a_manual_trigger_does_not_send_a_second_probe() -> None:
    breaker = opened_breaker(0.0)
    acquired(breaker, 2.0)

    breaker.allow_probe_now(2.0)

    assert breaker.try_acquire(2.0) is None


# --- half open -----------------------------------------------------------------------------------------------------


def test_it_is_half_open_when_its_time_is_over() -> None:
    breaker = opened_breaker(0.0)

    assert breaker.state_at(1.999) is BreakerState.OPEN
    assert breaker.state_at(2.0) is BreakerState.HALF_OPEN


def test_one_probe_is_let_through_and_everyone_else_waits_for_it() -> None:
    breaker = opened_breaker(0.0)

    acquired(breaker, 2.0)
    assert [breaker.try_acquire(2.0 + 0.1 * second) for second in range(90)] == [None] * 90
    assert breaker.state_at(11.0) is BreakerState.HALF_OPEN


def test_a_successful_probe_closes_it() -> None:
    breaker = opened_breaker(0.0)
    succeed(breaker, 2.0)

    assert breaker.state_at(2.0) is BreakerState.CLOSED
    assert None not in [breaker.try_acquire(2.0) for _ in range(100)]


def test_a_closed_again_breaker_takes_the_full_number_of_failures_to_open() -> None:
    breaker = opened_breaker(0.0)
    succeed(breaker, 2.0)

    fail(breaker, 2.0, times=THRESHOLD - 1)
    assert breaker.state_at(2.0) is BreakerState.CLOSED

    fail(breaker, 2.0)
    assert breaker.state_at(2.0) is BreakerState.OPEN


def test_a_failed_probe_opens_it_again_at_once() -> None:
    breaker = opened_breaker(0.0)
    fail(breaker, 2.0)

    assert breaker.state_at(2.0) is BreakerState.OPEN
    assert breaker.try_acquire(5.9) is None


def test_a_cancelled_probe_gives_its_place_to_the_next_who_asks() -> None:
    breaker = opened_breaker(0.0)
    breaker.cancelled(acquired(breaker, 2.0))

    assert breaker.state_at(2.0) is BreakerState.HALF_OPEN
    assert breaker.retry_in_s(2.0) == 0.0
    acquired(breaker, 2.0)
    assert breaker.try_acquire(2.0) is None


def test_a_probe_whose_caller_vanished_is_given_up_after_its_timeout() -> None:
    breaker = opened_breaker(0.0)
    acquired(breaker, 2.0)

    assert breaker.retry_in_s(3.0) == PROBE_TIMEOUT_S - 1.0
    assert breaker.try_acquire(11.999) is None
    acquired(breaker, 12.0)
    assert breaker.try_acquire(12.0) is None


def test_a_slow_probe_still_counts_while_nobody_replaced_it() -> None:
    breaker = opened_breaker(0.0)
    slow = acquired(breaker, 2.0)

    breaker.succeeded(slow)

    assert breaker.state_at(1000.0) is BreakerState.CLOSED


@pytest.mark.parametrize("report", ["succeeded", "failed", "cancelled"])
def test_a_probe_that_was_replaced_decides_nothing(report: str) -> None:
    breaker = opened_breaker(0.0)
    replaced = acquired(breaker, 2.0)
    current = acquired(breaker, 12.0)

    hand_back(breaker, replaced, report, 13.0)

    assert breaker.state_at(13.0) is BreakerState.HALF_OPEN
    assert breaker.try_acquire(13.0) is None
    breaker.succeeded(current)
    assert breaker.state_at(13.0) is BreakerState.CLOSED


# --- late --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("report", ["succeeded", "failed", "cancelled"])
@pytest.mark.parametrize("now", [0.5, 2.0])
def test_a_late_result_neither_closes_an_open_breaker_nor_extends_its_waiting(report: str, now: float) -> None:
    breaker = new_breaker()
    late = acquired(breaker, 0.0)
    fail(breaker, 0.0, times=THRESHOLD)
    before = breaker.state_at(now), breaker.retry_in_s(now), breaker.stats(now)["times_opened"]

    hand_back(breaker, late, report, now)

    assert (breaker.state_at(now), breaker.retry_in_s(now), breaker.stats(now)["times_opened"]) == before


@pytest.mark.parametrize("report", ["succeeded", "failed", "cancelled"])
def test_a_late_result_leaves_the_probe_in_flight_alone(report: str) -> None:
    breaker = new_breaker()
    late = acquired(breaker, 0.0)
    fail(breaker, 0.0, times=THRESHOLD)
    acquired(breaker, 2.0)

    hand_back(breaker, late, report, 3.0)

    assert breaker.state_at(3.0) is BreakerState.HALF_OPEN
    assert breaker.try_acquire(3.0) is None


def test_late_failures_do_not_open_a_breaker_that_has_closed_again() -> None:
    breaker = new_breaker()
    late = [acquired(breaker, 0.0) for _ in range(THRESHOLD)]
    fail(breaker, 0.0, times=THRESHOLD)
    succeed(breaker, 2.0)

    for permit in late:
        breaker.failed(permit, 3.0, jitter=0.0)

    assert breaker.state_at(3.0) is BreakerState.CLOSED
    assert breaker.stats(3.0)["consecutive_failures"] == 0


# --- what it shows -------------------------------------------------------------------------------------------------


def test_the_stats_of_a_new_breaker_are_zero() -> None:
    assert new_breaker().stats(0.0) == {
        "state": "closed",
        "failure_rate": 0.0,
        "failure_count": 0,
        "success_count": 0,
        "consecutive_failures": 0,
        "times_opened": 0,
        "retry_in_s": 0.0,
    }


def test_the_stats_tell_what_happened() -> None:
    breaker = new_breaker()
    succeed(breaker, 0.0, times=4)
    fail(breaker, 0.0, times=THRESHOLD)
    fail(breaker, 2.0)

    assert breaker.stats(3.0) == {
        "state": "open",
        "failure_rate": 50.0,
        "failure_count": 4,
        "success_count": 4,
        "consecutive_failures": 4,
        "times_opened": 2,
        "retry_in_s": 3.0,
    }


def test_the_state_in_the_stats_is_a_plain_string() -> None:
    stats = opened_breaker(0.0).stats(0.0)

    assert type(stats["state"]) is str
    assert json.loads(json.dumps(stats))["state"] == "open"


def test_the_failure_rate_is_a_percentage_of_the_last_calls_only() -> None:
    breaker = CircuitBreaker(failure_threshold=100, open_for=OPEN_FOR, probe_timeout_s=PROBE_TIMEOUT_S)
    fail(breaker, 0.0, times=80)
    succeed(breaker, 0.0, times=35)

    stats = breaker.stats(0.0)
    assert (stats["failure_rate"], stats["failure_count"], stats["success_count"]) == (30.0, 80, 35)


def test_the_failure_rate_is_rounded_for_people() -> None:
    breaker = new_breaker()
    fail(breaker, 0.0)
    succeed(breaker, 0.0, times=2)

    assert breaker.stats(0.0)["failure_rate"] == 33.3


def test_cancelled_calls_do_not_show_in_the_stats() -> None:
    breaker = new_breaker()
    breaker.cancelled(acquired(breaker, 0.0))

    assert breaker.stats(0.0) == new_breaker().stats(0.0)


def test_late_results_are_counted_though_they_decide_nothing() -> None:
    breaker = new_breaker()
    late = [acquired(breaker, 0.0) for _ in range(2)]
    fail(breaker, 0.0, times=THRESHOLD)
    breaker.succeeded(late[0])
    breaker.failed(late[1], 1.0, jitter=0.0)

    stats = breaker.stats(1.0)
    assert (stats["success_count"], stats["failure_count"], stats["failure_rate"]) == (1, 4, 80.0)
    assert stats["consecutive_failures"] == 3
