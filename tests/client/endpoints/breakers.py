"""A breaker that opens after three failures, and calls that succeed or fail."""

from gpu_worker_pool.client.endpoints.breaker import CircuitBreaker, Permit
from gpu_worker_pool.host.backoff import Backoff

THRESHOLD = 3
OPEN_FOR = Backoff(first_s=4.0, max_s=16.0)
"""Without jitter it stays open for 2, 4, 8, 8, ... seconds."""
PROBE_TIMEOUT_S = 10.0


def new_breaker() -> CircuitBreaker:
    return CircuitBreaker(failure_threshold=THRESHOLD, open_for=OPEN_FOR, probe_timeout_s=PROBE_TIMEOUT_S)


def hand_back(breaker: CircuitBreaker, permit: Permit, report: str, now: float) -> None:
    match report:
        case "succeeded":
            breaker.succeeded(permit)
        case "failed":
            breaker.failed(permit, now, jitter=0.0)
        case "cancelled":
            breaker.cancelled(permit)
