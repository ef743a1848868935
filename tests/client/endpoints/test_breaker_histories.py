"""A circuit breaker under any history: late, repeated and lost reports, and a clock that stands, jumps and runs back."""

import copy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpu_worker_pool.client.endpoints.breaker import BreakerState, Permit
from tests.client.endpoints.breakers import OPEN_FOR, PROBE_TIMEOUT_S, THRESHOLD, hand_back, new_breaker


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
