"""A circuit breaker: stops calls to an endpoint that keeps failing, and probes it from time to time."""

import math
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NewType

# The phase of the breaker in which a call was allowed. If it has moved on, the outcome only counts in the statistics.
Permit = NewType("Permit", int)
# How many calls the failure rate is about.
WINDOW = 50


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One call at a time goes through, to see whether the endpoint is back."""


class CircuitBreaker:
    """Decides for one endpoint whether a call may be made now.

    Ask with `try_acquire`. A caller with a permit makes the call and reports exactly one of `succeeded`, `failed` or
    `cancelled`. The breaker opens after `failure_threshold` failures in a row; `open_for` gives the time it stays open
    from the number of failed probes and a random number, as `Backoff.delay_s` does. Then it lets one probe at a time through: success closes it, failure opens it
    again, and after `probe_timeout_s` without a report another probe may go. Times are seconds of one clock that does not
    go back. Not thread-safe.
    """

    def __init__(
        self, *, failure_threshold: int, open_for: Callable[[int, float], float], probe_timeout_s: float
    ) -> None:
        self._failure_threshold = failure_threshold
        self._open_for = open_for
        self._probe_timeout_s = probe_timeout_s
        self._phase = 0
        # Until when no call is allowed; None while it is closed.
        self._open_until: float | None = None
        self._probe_until = -math.inf
        self._consecutive_failures = self._times_opened = 0
        self._failures = self._successes = 0
        self._recent_is_failure: deque[bool] = deque(maxlen=WINDOW)

    def try_acquire(self, now: float) -> Permit | None:
        if self.retry_in_s(now) > 0.0:
            return None
        if self._open_until is not None:
            # A phase for each probe: the outcome of an abandoned probe must not count for its successor.
            self._phase += 1
            self._probe_until = now + self._probe_timeout_s
        return Permit(self._phase)

    def succeeded(self, permit: Permit) -> None:
        self._successes += 1
        self._recent_is_failure.append(False)
        if permit != self._phase:
            return
        self._consecutive_failures = 0
        if self._open_until is not None:
            self._enter(None)

    def failed(self, permit: Permit, now: float, *, jitter: float) -> None:
        """Report that the endpoint did not answer, or answered with a fault of its own.

        `jitter` is a random number in [0, 1). It spreads the probes of clients that failed together.
        """
        self._failures += 1
        self._recent_is_failure.append(True)
        if permit != self._phase:
            return
        self._consecutive_failures += 1
        failed_probes = self._consecutive_failures - self._failure_threshold
        if failed_probes >= 0:
            self._times_opened += 1
            self._enter(now + self._open_for(failed_probes, jitter))

    def cancelled(self, permit: Permit) -> None:
        """Report that the caller gave up, which says nothing about the endpoint."""
        if permit == self._phase:
            self._probe_until = -math.inf

    def allow_probe_now(self, now: float) -> None:
        """Let an open breaker probe at once, as for a manual recovery; otherwise do nothing."""
        if self._open_until is not None:
            self._open_until = min(self._open_until, now)

    def state_at(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def retry_in_s(self, now: float) -> float:
        """Return the seconds until a call is certain to be allowed; 0.0 if it is allowed now.

        While a probe is in flight, this is the time until the probe is abandoned.
        """
        return 0.0 if self._open_until is None else max(0.0, self._open_until - now, self._probe_until - now)

    def stats(self, now: float) -> dict[str, Any]:
        """Plain values, ready for JSON. `failure_rate` is a percentage of the last calls. Cancelled calls count nowhere."""
        recent = self._recent_is_failure
        return {
            "state": self.state_at(now).value,
            "failure_rate": round(100.0 * sum(recent) / len(recent), 1) if recent else 0.0,
            "failure_count": self._failures,
            "success_count": self._successes,
            "consecutive_failures": self._consecutive_failures,
            "times_opened": self._times_opened,
            "retry_in_s": self.retry_in_s(now),
        }

    def _enter(self, open_until: float | None) -> None:
        """Open or close it. All permits issued so far decide nothing from now on."""
        self._phase += 1
        self._open_until, self._probe_until = open_until, -math.inf
