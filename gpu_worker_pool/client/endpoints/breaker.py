"""A circuit breaker: stops calls to an endpoint that keeps failing, and probes it from time to time."""

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict

from gpu_worker_pool.core.backoff import Backoff

DEFAULT_OPEN_FOR = Backoff(first_s=5.0, max_s=60.0)


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One call at a time goes through, to see whether the endpoint is back."""


class BreakerStats(TypedDict):
    """The result of `CircuitBreaker.stats`: plain values, ready for JSON."""

    state: str
    failure_rate: float
    """Percent of the last calls that failed; 0.0 if none has finished yet."""
    failure_count: int
    """Failed calls since the breaker was made; cancelled calls are counted nowhere."""
    success_count: int
    consecutive_failures: int
    """Failures without a success in between, failed probes included; late results are left out."""
    times_opened: int
    """How often it opened, each failed probe included."""
    retry_in_s: float


@dataclass(slots=True, eq=False)
class Permit:
    """Permission for one call. The caller returns it with the outcome of the call."""

    generation: int
    """The breaker's phase at the time. If it has moved on, the outcome only counts in the statistics."""
    is_probe: bool
    is_reported: bool = False
    """Set by the breaker: a second report changes nothing."""


@dataclass(slots=True)
class _Countdown:
    """A duration from the earliest time seen: a clock that is set back cannot lengthen it."""

    since: float
    duration_s: float

    def remaining_s(self, now: float) -> float:
        self.since = min(self.since, now)
        return max(0.0, self.since + self.duration_s - now)

    @property
    def ends_at(self) -> float:
        return self.since + self.duration_s


@dataclass(frozen=True, slots=True)
class _ClosedCircuit:
    label = BreakerState.CLOSED


@dataclass(frozen=True, slots=True)
class _OpenCircuit:
    label = BreakerState.OPEN
    wait: _Countdown


@dataclass(frozen=True, slots=True)
class _HalfOpenCircuit:
    label = BreakerState.HALF_OPEN
    probe: _Countdown | None = None
    """How long the probe in flight may still take before it is given up; `None` if there is none."""


class CircuitBreaker:
    """Decides for one endpoint whether a call may be made now.

    Ask with `try_acquire`. A caller with a permit makes the call and reports exactly one of `succeeded`, `failed` or
    `cancelled`. The breaker opens after `failure_threshold` failures in a row; `open_for` gives the time it stays open,
    which grows with each failed probe. Then it lets one probe at a time through: success closes it, failure opens it
    again.

    `now` is in seconds, from any clock, and should not go back; if it does, open durations count from the earlier time.
    Not thread-safe.
    """

    def __init__(
        self,
        *,
        failure_threshold: int = 5,
        open_for: Backoff = DEFAULT_OPEN_FOR,
        probe_timeout_s: float = 30.0,
        window_size: int = 50,
    ) -> None:
        if failure_threshold < 1:
            raise ValueError(f"failure_threshold must be at least 1, not {failure_threshold!r}")
        if not 0.0 < probe_timeout_s < math.inf:
            raise ValueError(f"probe_timeout_s must be a finite number above 0, not {probe_timeout_s!r}")
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1, not {window_size!r}")
        self._failure_threshold = failure_threshold
        self._open_for = open_for
        self._probe_timeout_s = probe_timeout_s
        self._state: _ClosedCircuit | _OpenCircuit | _HalfOpenCircuit = _ClosedCircuit()
        self._generation = 0
        self._consecutive_failures = 0
        self._times_opened = 0
        self._failure_count = 0
        self._success_count = 0
        self._recent_is_failure: deque[bool] = deque(maxlen=window_size)

    def try_acquire(self, now: float) -> Permit | None:
        if self.retry_in_s(now) > 0.0:
            return None
        if isinstance(self._state, _HalfOpenCircuit):
            # A new generation for each probe: the outcome of an abandoned probe must not count for its successor.
            self._generation += 1
            self._state = _HalfOpenCircuit(probe=_Countdown(now, self._probe_timeout_s))
        return Permit(self._generation, is_probe=isinstance(self._state, _HalfOpenCircuit))

    def succeeded(self, permit: Permit, now: float) -> None:
        if not self._mark_reported(permit):
            return
        self._count(is_failure=False)
        if not self._is_current(permit):
            return
        self._consecutive_failures = 0
        if self.state_at(now) is BreakerState.HALF_OPEN:
            self._enter(_ClosedCircuit())

    def failed(self, permit: Permit, now: float, *, jitter: float) -> None:
        """Report that the endpoint did not answer, or answered with a fault of its own.

        `jitter` is a random number in [0, 1). It spreads the probes of clients that failed together.
        """
        if not self._mark_reported(permit):
            return
        self._count(is_failure=True)
        if not self._is_current(permit):
            return
        self._consecutive_failures += 1
        failed_probes = self._consecutive_failures - self._failure_threshold
        if failed_probes >= 0:
            self._times_opened += 1
            self._enter(_OpenCircuit(wait=_Countdown(now, self._open_for.delay_s(failed_probes, jitter))))

    def cancelled(self, permit: Permit) -> None:
        """Report that the caller gave up, which says nothing about the endpoint."""
        if self._mark_reported(permit) and self._is_current(permit) and permit.is_probe:
            self._state = _HalfOpenCircuit()

    def allow_probe_now(self, now: float) -> None:
        """Let an open breaker probe at once, as for a manual recovery; otherwise do nothing."""
        if self.state_at(now) is BreakerState.OPEN:
            self._state = _HalfOpenCircuit()

    def state_at(self, now: float) -> BreakerState:
        return self._advance_to(now).label

    def retry_in_s(self, now: float) -> float:
        """Return the seconds until a call is certain to be allowed; 0.0 if it is allowed now.

        While a probe is in flight, this is the time until the probe is abandoned.
        """
        match self._advance_to(now):
            case _OpenCircuit(wait=countdown) | _HalfOpenCircuit(probe=_Countdown() as countdown):
                return countdown.remaining_s(now)
            case _:
                return 0.0

    def stats(self, now: float) -> BreakerStats:
        return {
            "state": self.state_at(now).value,
            "failure_rate": self._failure_rate_percent(),
            "failure_count": self._failure_count,
            "success_count": self._success_count,
            "consecutive_failures": self._consecutive_failures,
            "times_opened": self._times_opened,
            "retry_in_s": self.retry_in_s(now),
        }

    def __repr__(self) -> str:
        match self._state:
            case _OpenCircuit(wait=wait):
                detail = f" until {wait.ends_at:.3f}"
            case _HalfOpenCircuit(probe=_Countdown() as probe):
                detail = f", probe in flight until {probe.ends_at:.3f}"
            case _:
                detail = ""
        return (
            f"<CircuitBreaker {self._state.label}{detail}, {self._consecutive_failures} failures in a row, "
            f"{self._failure_rate_percent()}% of the last {len(self._recent_is_failure)} calls failed>"
        )

    def _advance_to(self, now: float) -> _ClosedCircuit | _OpenCircuit | _HalfOpenCircuit:
        """Return the state after the one change that time makes: an open breaker becomes half-open."""
        if isinstance(self._state, _OpenCircuit) and self._state.wait.remaining_s(now) == 0.0:
            self._state = _HalfOpenCircuit()
        return self._state

    def _enter(self, state: _ClosedCircuit | _OpenCircuit) -> None:
        """Change the state and invalidate all permits issued so far."""
        self._generation += 1
        self._state = state

    def _is_current(self, permit: Permit) -> bool:
        return permit.generation == self._generation

    def _mark_reported(self, permit: Permit) -> bool:
        """Return False if the permit was reported before."""
        if permit.is_reported:
            return False
        permit.is_reported = True
        return True

    def _count(self, *, is_failure: bool) -> None:
        self._failure_count += is_failure
        self._success_count += not is_failure
        self._recent_is_failure.append(is_failure)

    def _failure_rate_percent(self) -> float:
        finished = len(self._recent_is_failure)
        return round(100.0 * sum(self._recent_is_failure) / finished, 1) if finished else 0.0
