"""A circuit breaker under any history, with late and lost reports and a clock that stands and jumps, and what it shows."""

import copy
import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpu_worker_pool.client.endpoints.breaker import BreakerState, CircuitBreaker, Permit
from gpu_worker_pool.host.pauses import Backoff

THRESHOLD = 3
# Without jitter it stays open for 2, 4, 8, 8, ... seconds.
OPEN_FOR = Backoff(first_s=4.0, max_s=16.0)
PROBE_TIMEOUT_S = 10.0


def new_breaker(threshold: int = THRESHOLD) -> CircuitBreaker:
    return CircuitBreaker(failure_threshold=threshold, open_for=OPEN_FOR.delay_s, probe_timeout_s=PROBE_TIMEOUT_S)


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


def test_it_stays_open_longer_with_each_failed_probe_up_to_the_maximum_and_a_success_ends_that() -> None:
    breaker = new_breaker()
    fail(breaker, 0.0, times=THRESHOLD)
    now, durations_s = 0.0, []
    for _ in range(5):
        durations_s.append(breaker.retry_in_s(now))
        now += breaker.retry_in_s(now)
        fail(breaker, now)
    assert durations_s == [2.0, 4.0, 8.0, 8.0, 8.0]
    now += breaker.retry_in_s(now)
    succeed(breaker, now)
    fail(breaker, now, times=THRESHOLD)
    assert breaker.retry_in_s(now) == 2.0


def test_the_stats_say_what_happened() -> None:
    breaker = new_breaker()
    breaker.cancelled(acquired(breaker, 0.0))
    assert set(breaker.stats(0.0).values()) == {"closed", 0}
    succeed(breaker, 0.0, times=4)
    late = [acquired(breaker, 0.0) for _ in range(2)]
    fail(breaker, 0.0, times=THRESHOLD)
    fail(breaker, 2.0)
    expected = {"state": "open", "consecutive_failures": 4, "times_opened": 2, "retry_in_s": 3.0}
    counted = {"failure_rate": 50.0, "failure_count": 4, "success_count": 4}
    assert json.loads(json.dumps(breaker.stats(3.0))) == {**expected, **counted}
    # Late results decide nothing, and are counted.
    breaker.succeeded(late[0])
    breaker.failed(late[1], 3.0, jitter=0.0)
    assert breaker.stats(3.0) == {**expected, **counted, "failure_count": 5, "success_count": 5}


class AnyHistory(RuleBasedStateMachine):
    """Calls that succeed, fail, are cancelled, vanish or come late, under a clock that stands and jumps.

    Times and jitters are multiples of 1/8, so that all sums are exact.
    """

    def __init__(self) -> None:
        super().__init__()
        self.breaker = new_breaker()
        self.now = 0.0
        self.in_flight: list[Permit] = []
        self.probe: Permit | None = None
        self.probe_until = 0.0
        self.open_until: float | None = None
        self.failed_probes = 0
        self.failures_in_a_row = 0
        self.current: Permit | None = None
        """Calls with this permit may still change the state."""

    @initialize(eighths=st.integers(0, 10**6))
    def start_at(self, eighths: int) -> None:
        self.now = eighths / 8

    @rule(eighths=st.integers(1, 200))
    def time_passes(self, eighths: int) -> None:
        self.now += eighths / 8

    @rule()
    def somebody_asks(self) -> None:
        if self.open_until is not None:
            expected = self.now >= self.open_until
        else:
            expected = self.probe is None or self.now >= self.probe_until
        is_closed = self.breaker.state_at(self.now) is BreakerState.CLOSED

        permit = self.breaker.try_acquire(self.now)

        assert (permit is not None) == expected
        if permit is None:
            return
        self.in_flight.append(permit)
        self.current = permit
        if not is_closed:
            self.open_until = None
            self.probe, self.probe_until = permit, self.now + PROBE_TIMEOUT_S

    @rule()
    def somebody_asks_after_every_wait_is_over(self) -> None:
        self.now += max(OPEN_FOR.max_s, PROBE_TIMEOUT_S)
        self.somebody_asks()

    def take(self, data: st.DataObject) -> Permit:
        return self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def a_call_succeeds(self, data: st.DataObject) -> None:
        permit = self.take(data)
        before = self.situation()

        self.breaker.succeeded(permit)

        if permit != self.current:
            assert self.situation() == before
            return
        assert self.breaker.state_at(self.now) is BreakerState.CLOSED
        self.failures_in_a_row = 0
        if permit == self.probe:
            self.probe = self.current = None
            self.failed_probes = 0

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), jitter_eighths=st.integers(0, 7))
    def a_call_fails(self, data: st.DataObject, jitter_eighths: int) -> None:
        permit, jitter = self.take(data), jitter_eighths / 8
        before = self.situation()

        self.breaker.failed(permit, self.now, jitter=jitter)

        if permit != self.current:
            assert self.situation() == before
            return
        self.failures_in_a_row += 1
        is_probe = permit == self.probe
        self.failed_probes += is_probe
        if is_probe or self.failures_in_a_row == THRESHOLD:
            longest_s = min(4.0 * 2.0 ** min(self.failed_probes, 10), 16.0)
            self.open_until = self.now + longest_s * (0.5 + jitter / 2)
            self.probe = self.current = None
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
        if permit == self.probe:
            self.probe = None
            assert self.breaker.retry_in_s(self.now) == 0.0
        else:
            assert self.situation() == before

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def a_caller_vanishes(self, data: st.DataObject) -> None:
        self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))

    @rule()
    def somebody_triggers_a_recovery(self) -> None:
        was_closed = self.breaker.state_at(self.now) is BreakerState.CLOSED

        self.breaker.allow_probe_now(self.now)

        self.open_until = None
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
        if self.open_until is not None and self.now < self.open_until:
            assert self.breaker.state_at(self.now) is BreakerState.OPEN
        elif self.open_until is not None or self.probe is not None:
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
