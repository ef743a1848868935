import copy
import json
import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpu_worker_pool.core.endpoints.backoff import Backoff
from gpu_worker_pool.core.endpoints.breaker import BreakerState, CircuitBreaker, Permit

THRESHOLD = 3
OPEN_FOR = Backoff(first_s=4.0, max_s=16.0)
"""Without jitter it stays open for 2, 4, 8, 8, ... seconds."""
PROBE_TIMEOUT_S = 10.0


def new_breaker() -> CircuitBreaker:
    return CircuitBreaker(failure_threshold=THRESHOLD, open_for=OPEN_FOR, probe_timeout_s=PROBE_TIMEOUT_S)


def acquired(breaker: CircuitBreaker, now: float) -> Permit:
    permit = breaker.try_acquire(now)
    assert permit is not None
    return permit


def fail(breaker: CircuitBreaker, now: float, times: int = 1) -> None:
    for _ in range(times):
        breaker.failed(acquired(breaker, now), now, jitter=0.0)


def succeed(breaker: CircuitBreaker, now: float, times: int = 1) -> None:
    for _ in range(times):
        breaker.succeeded(acquired(breaker, now), now)


def opened_breaker(now: float) -> CircuitBreaker:
    """A breaker that opened at `now` for 2 seconds."""
    breaker = new_breaker()
    fail(breaker, now, times=THRESHOLD)
    return breaker


# --- closed --------------------------------------------------------------------------------------------------------


def test_a_new_breaker_is_closed_and_lets_everyone_through() -> None:
    breaker = new_breaker()

    assert breaker.state_at(0.0) is BreakerState.CLOSED
    assert all(acquired(breaker, 0.0).is_probe is False for _ in range(100))
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
    assert acquired(breaker, 0.5).is_probe
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

    assert acquired(breaker, 2.0).is_probe
    assert [breaker.try_acquire(2.0 + 0.1 * second) for second in range(90)] == [None] * 90
    assert breaker.state_at(11.0) is BreakerState.HALF_OPEN


def test_a_successful_probe_closes_it() -> None:
    breaker = opened_breaker(0.0)
    succeed(breaker, 2.0)

    assert breaker.state_at(2.0) is BreakerState.CLOSED
    assert not acquired(breaker, 2.0).is_probe


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
    assert acquired(breaker, 2.0).is_probe
    assert breaker.try_acquire(2.0) is None


def test_a_probe_whose_caller_vanished_is_given_up_after_its_timeout() -> None:
    breaker = opened_breaker(0.0)
    acquired(breaker, 2.0)

    assert breaker.retry_in_s(3.0) == PROBE_TIMEOUT_S - 1.0
    assert breaker.try_acquire(11.999) is None
    assert acquired(breaker, 12.0).is_probe
    assert breaker.try_acquire(12.0) is None


def test_a_slow_probe_still_counts_while_nobody_replaced_it() -> None:
    breaker = opened_breaker(0.0)
    slow = acquired(breaker, 2.0)

    breaker.succeeded(slow, 1000.0)

    assert breaker.state_at(1000.0) is BreakerState.CLOSED


@pytest.mark.parametrize("report", ["succeeded", "failed", "cancelled"])
def test_a_probe_that_was_replaced_decides_nothing(report: str) -> None:
    breaker = opened_breaker(0.0)
    replaced = acquired(breaker, 2.0)
    current = acquired(breaker, 12.0)

    hand_back(breaker, replaced, report, 13.0)

    assert breaker.state_at(13.0) is BreakerState.HALF_OPEN
    assert breaker.try_acquire(13.0) is None
    breaker.succeeded(current, 13.0)
    assert breaker.state_at(13.0) is BreakerState.CLOSED


# --- late, repeated and out of order -------------------------------------------------------------------------------


def hand_back(breaker: CircuitBreaker, permit: Permit, report: str, now: float) -> None:
    match report:
        case "succeeded":
            breaker.succeeded(permit, now)
        case "failed":
            breaker.failed(permit, now, jitter=0.0)
        case "cancelled":
            breaker.cancelled(permit)


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


@pytest.mark.parametrize("first", ["succeeded", "failed", "cancelled"])
@pytest.mark.parametrize("second", ["succeeded", "failed", "cancelled"])
def test_a_second_report_of_the_same_permit_changes_nothing(first: str, second: str) -> None:
    breaker = new_breaker()
    permit = acquired(breaker, 0.0)
    hand_back(breaker, permit, first, 0.0)
    before = breaker.stats(0.0)

    for _ in range(THRESHOLD):
        hand_back(breaker, permit, second, 0.0)

    assert breaker.stats(0.0) == before


def test_a_probe_cancelled_twice_gives_back_its_own_place_only() -> None:
    breaker = opened_breaker(0.0)
    first = acquired(breaker, 2.0)
    breaker.cancelled(first)
    acquired(breaker, 2.0)

    breaker.cancelled(first)

    assert breaker.try_acquire(2.0) is None


def test_a_time_before_the_opening_lets_nobody_through() -> None:
    breaker = opened_breaker(100.0)

    assert breaker.try_acquire(50.0) is None
    assert breaker.retry_in_s(50.0) == 2.0


def test_a_clock_set_back_does_not_keep_it_open_longer_than_its_duration() -> None:
    breaker = opened_breaker(1_000_000.0)

    assert breaker.try_acquire(10.0) is None
    assert breaker.try_acquire(12.0) is not None


def test_a_clock_set_back_does_not_keep_a_vanished_probe_alive_longer_than_its_timeout() -> None:
    breaker = opened_breaker(1_000_000.0)
    acquired(breaker, 1_000_002.0)

    assert breaker.try_acquire(10.0) is None
    assert breaker.try_acquire(10.0 + PROBE_TIMEOUT_S) is not None


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
    breaker = CircuitBreaker(failure_threshold=100, window_size=10)
    fail(breaker, 0.0, times=50)
    succeed(breaker, 0.0, times=7)

    stats = breaker.stats(0.0)
    assert (stats["failure_rate"], stats["failure_count"], stats["success_count"]) == (30.0, 50, 7)


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
    breaker.succeeded(late[0], 1.0)
    breaker.failed(late[1], 1.0, jitter=0.0)

    stats = breaker.stats(1.0)
    assert (stats["success_count"], stats["failure_count"], stats["failure_rate"]) == (1, 4, 80.0)
    assert stats["consecutive_failures"] == 3


def test_the_repr_shows_the_state_and_why() -> None:
    breaker = new_breaker()
    succeed(breaker, 0.0)
    assert repr(breaker) == "<CircuitBreaker closed, 0 failures in a row, 0.0% of the last 1 calls failed>"

    fail(breaker, 100.0, times=THRESHOLD)
    assert repr(breaker) == (
        "<CircuitBreaker open until 102.000, 3 failures in a row, 75.0% of the last 4 calls failed>"
    )

    breaker.try_acquire(102.0)
    assert repr(breaker) == (
        "<CircuitBreaker half_open, probe in flight until 112.000, 3 failures in a row, "
        "75.0% of the last 4 calls failed>"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"failure_threshold": 0}, "failure_threshold must be at least 1, not 0"),
        ({"window_size": 0}, "window_size must be at least 1, not 0"),
        ({"probe_timeout_s": 0.0}, "probe_timeout_s must be a finite number above 0, not 0.0"),
        ({"probe_timeout_s": math.inf}, "probe_timeout_s .* not inf"),
        ({"probe_timeout_s": math.nan}, "probe_timeout_s .* not nan"),
    ],
)
def test_a_bad_setting_is_refused_by_name_value_and_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CircuitBreaker(**settings)


# --- any history ---------------------------------------------------------------------------------------------------


class Waiting:
    """The test's own idea of a time to wait: from the earliest time the breaker was shown since it began."""

    def __init__(self, now: float, duration_s: float) -> None:
        self.earliest = now
        self.duration_s = duration_s

    def show(self, now: float) -> None:
        self.earliest = min(self.earliest, now)

    def is_over(self, now: float) -> bool:
        return now >= self.earliest + self.duration_s


class AnyHistory(RuleBasedStateMachine):
    """Calls that succeed, fail, are cancelled, vanish or come late, under a clock that stands, jumps and runs back.

    Times and jitters are multiples of 1/8, so that all sums are exact.
    """

    def __init__(self) -> None:
        super().__init__()
        self.breaker = new_breaker()
        self.now = 0.0
        self.in_flight: list[Permit] = []
        self.reported: list[Permit] = []
        self.probe: Permit | None = None
        self.probe_waiting = Waiting(0.0, 0.0)
        self.open_waiting: Waiting | None = None
        self.failed_probes = 0
        self.failures_in_a_row = 0
        self.current: set[Permit] = set()
        """Those whose outcome may still change the state."""

    @initialize(eighths=st.integers(0, 10**6))
    def start_at(self, eighths: int) -> None:
        self.now = eighths / 8

    @rule(eighths=st.integers(1, 200))
    def time_passes(self, eighths: int) -> None:
        self.now += eighths / 8

    @rule(eighths=st.integers(1, 200))
    def the_clock_is_set_back(self, eighths: int) -> None:
        self.now -= eighths / 8

    @rule()
    def somebody_asks(self) -> None:
        if self.open_waiting is not None:
            expected = self.open_waiting.is_over(self.now)
        elif self.probe is not None:
            expected = self.probe_waiting.is_over(self.now)
        else:
            expected = True
        is_closed = self.breaker.state_at(self.now) is BreakerState.CLOSED

        permit = self.breaker.try_acquire(self.now)

        assert (permit is not None) == expected
        if permit is None:
            return
        assert permit.is_probe != is_closed
        self.in_flight.append(permit)
        if permit.is_probe:
            self.open_waiting = None
            self.probe, self.probe_waiting = permit, Waiting(self.now, PROBE_TIMEOUT_S)
            self.current = {permit}
        else:
            self.current.add(permit)

    @rule()
    def somebody_asks_after_every_wait_is_over(self) -> None:
        self.now += max(OPEN_FOR.max_s, PROBE_TIMEOUT_S)
        self.somebody_asks()

    def take(self, data: st.DataObject) -> Permit:
        permit = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        self.reported.append(permit)
        return permit

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def a_call_succeeds(self, data: st.DataObject) -> None:
        permit = self.take(data)
        before = self.situation()

        self.breaker.succeeded(permit, self.now)

        if permit not in self.current:
            assert self.situation() == before
            return
        assert self.breaker.state_at(self.now) is BreakerState.CLOSED
        self.failures_in_a_row = 0
        if permit.is_probe:
            self.probe = None
            self.failed_probes = 0
            self.current = set()

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), jitter_eighths=st.integers(0, 7))
    def a_call_fails(self, data: st.DataObject, jitter_eighths: int) -> None:
        permit, jitter = self.take(data), jitter_eighths / 8
        before = self.situation()

        self.breaker.failed(permit, self.now, jitter=jitter)

        if permit not in self.current:
            assert self.situation() == before
            return
        self.failures_in_a_row += 1
        if permit.is_probe:
            self.failed_probes += 1
        if permit.is_probe or self.failures_in_a_row == THRESHOLD:
            longest_s = min(4.0 * 2.0 ** min(self.failed_probes, 10), 16.0)
            self.open_waiting = Waiting(self.now, longest_s * (0.5 + jitter / 2))
            self.probe = None
            self.current = set()
            assert self.breaker.state_at(self.now) is BreakerState.OPEN

    @rule(data=st.data())
    def every_call_fails_until_nobody_gets_through(self, data: st.DataObject) -> None:
        for _ in range(THRESHOLD):
            self.somebody_asks()
            if self.in_flight:
                self.a_call_fails(data, jitter_eighths=0)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def a_call_is_cancelled(self, data: st.DataObject) -> None:
        permit = self.take(data)
        before = self.situation()

        self.breaker.cancelled(permit)

        assert self.breaker.state_at(self.now) == before[0]
        if permit is self.probe:
            self.probe = None
            assert self.breaker.retry_in_s(self.now) == 0.0
        else:
            assert self.situation() == before

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def a_caller_vanishes(self, data: st.DataObject) -> None:
        self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))

    @precondition(lambda self: self.reported)
    @rule(data=st.data(), report=st.sampled_from(["succeeded", "failed", "cancelled"]))
    def a_report_is_repeated(self, data: st.DataObject, report: str) -> None:
        permit = data.draw(st.sampled_from(self.reported))
        before = self.breaker.stats(self.now)

        hand_back(self.breaker, permit, report, self.now)

        assert self.breaker.stats(self.now) == before

    @rule()
    def somebody_triggers_a_recovery(self) -> None:
        was_closed = self.breaker.state_at(self.now) is BreakerState.CLOSED

        self.breaker.allow_probe_now(self.now)

        self.open_waiting = None
        assert self.breaker.state_at(self.now) is (BreakerState.CLOSED if was_closed else BreakerState.HALF_OPEN)

    def situation(self) -> tuple[BreakerState, float, int, int]:
        stats = self.breaker.stats(self.now)
        return (
            self.breaker.state_at(self.now),
            self.breaker.retry_in_s(self.now),
            stats["times_opened"],
            stats["consecutive_failures"],
        )

    @invariant()
    def the_state_is_the_expected_one(self) -> None:
        if self.open_waiting is not None:
            self.open_waiting.show(self.now)
            if self.open_waiting.is_over(self.now):
                # Half-open is for good: a clock set back afterwards does not close the door again.
                self.open_waiting = None
                expected = BreakerState.HALF_OPEN
            else:
                expected = BreakerState.OPEN
            assert self.breaker.state_at(self.now) is expected
        elif self.probe is not None:
            self.probe_waiting.show(self.now)
            assert self.breaker.state_at(self.now) is BreakerState.HALF_OPEN
        else:
            assert self.breaker.state_at(self.now) is not BreakerState.OPEN

    @invariant()
    def it_is_never_stuck(self) -> None:
        longest_s = max(OPEN_FOR.max_s, PROBE_TIMEOUT_S)

        assert 0.0 <= self.breaker.retry_in_s(self.now) <= longest_s
        assert copy.deepcopy(self.breaker).try_acquire(self.now + longest_s) is not None

    @invariant()
    def retry_in_is_exact(self) -> None:
        retry_in_s = self.breaker.retry_in_s(self.now)

        assert copy.deepcopy(self.breaker).try_acquire(self.now + retry_in_s) is not None
        if retry_in_s > 0.0:
            assert copy.deepcopy(self.breaker).try_acquire(self.now + retry_in_s - 1 / 64) is None


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
