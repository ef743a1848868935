"""One endpoint: how to call it, how it has been doing, and what it last showed of its GPUs."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from gpu_worker_pool.core.endpoints.backoff import Backoff
from gpu_worker_pool.core.endpoints.breaker import BreakerStats, CircuitBreaker
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.urls import EndpointUrl
from gpu_worker_pool.wire.transport import CallFailed, Reply, Transport

RETRY = Backoff(first_s=0.1, max_s=2.0)
FAILURES_TO_OPEN = 3
EndpointKind = Literal["unknown", "leases", "statistics"]


@dataclass(frozen=True, slots=True)
class EndpointLimits:
    """How long and how often to try."""

    timeout_s: float
    max_retries: int
    health_check_interval_s: float


class Endpoint:
    """Calls one server. Its breaker stops calls that would only fail; heartbeats and releases always go out, because a
    GPU depends on them.
    """

    def __init__(
        self,
        endpoint_id: str,
        url: EndpointUrl,
        transport: Transport,
        *,
        limits: EndpointLimits,
        token: str | None = None,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        self.id = endpoint_id
        self.url = url
        self.kind: EndpointKind = "unknown"
        self.is_healthy = False
        self.last_error: str | None = "it has not answered yet"
        self.last_seen: datetime | None = None
        self.recovered_at: float | None = None
        self.calls = 0
        self._transport = transport
        self._limits = limits
        self._token = token
        self._clock = clock
        self._times_s: deque[float] = deque(maxlen=50)
        self._was_healthy = False
        self._last_failure: str | None = None
        longest_s = max(limits.health_check_interval_s, 0.5)
        self._breaker = CircuitBreaker(
            failure_threshold=FAILURES_TO_OPEN,
            open_for=Backoff(first_s=min(1.0, longest_s), max_s=longest_s),
            probe_timeout_s=max(limits.timeout_s, 1.0),
        )

    def __repr__(self) -> str:
        state = "healthy" if self.is_healthy else f"down: {self.last_error}"
        return f"<Endpoint {self.id} {self.url.url} ({self.kind}), {state}>"

    @property
    def response_time_ms(self) -> float:
        """The average over the last calls; 0.0 where there was none."""
        return round(1000.0 * sum(self._times_s) / len(self._times_s), 3) if self._times_s else 0.0

    def breaker_stats(self) -> BreakerStats:
        return self._breaker.stats(self._clock())

    def retry_in_s(self) -> float:
        """How long until the breaker lets a call through."""
        return self._breaker.retry_in_s(self._clock())

    def allow_probe_now(self) -> None:
        self._breaker.allow_probe_now(self._clock())

    def mark_healthy(self) -> None:
        """Note that a poll of its GPUs succeeded."""
        if not self.is_healthy:
            if self._was_healthy:
                self.recovered_at = self._clock()
            self.is_healthy = self._was_healthy = True
        self.last_error = None
        self.last_seen = datetime.now()  # noqa: DTZ005 - local time, as all times of the documents

    def mark_down(self, reason: str) -> None:
        """Note that it cannot be used at present. It may come back as another server, so its kind is asked again then."""
        self.is_healthy = False
        self.last_error = reason
        self.kind = "unknown"

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        extra_s: float = 0.0,
        attempts: int = 1,
        is_vital: bool = False,
    ) -> Reply:
        """Call it; EndpointError where there is no usable answer. `extra_s` is how long it may hold the answer back.

        A call with several `attempts` must be harmless when it is repeated. A vital call goes out even where the
        breaker is open.
        """
        for attempt in range(attempts):
            try:
                return await self._call_once(method, path, body, extra_s, is_vital=is_vital)
            except EndpointError as error:
                if attempt + 1 == attempts or not error.is_temporary:
                    raise
                await asyncio.sleep(RETRY.delay_s(attempt, random.random()))  # noqa: S311 - no secret
        raise AssertionError("unreachable")

    @property
    def attempts(self) -> int:
        """How often to make a call that may be repeated."""
        return 1 + self._limits.max_retries

    async def _call_once(
        self, method: str, path: str, body: Mapping[str, Any] | None, extra_s: float, *, is_vital: bool
    ) -> Reply:
        permit = self._breaker.try_acquire(self._clock())
        if permit is None and not is_vital:
            raise self._error(self._last_failure or "it kept failing", is_temporary=False)
        self.calls += 1
        try:
            reply = await self._transport.call(
                method,
                f"{self.url.url}{path}",
                body=body,
                token=self._token,
                timeout_s=self._limits.timeout_s + extra_s,
            )
        except CallFailed as failed:
            if permit is not None:
                self._breaker.failed(permit, self._clock(), jitter=random.random())  # noqa: S311 - no secret
            self._last_failure = str(failed)
            raise self._error(str(failed), is_temporary=failed.is_temporary) from None
        except BaseException:
            if permit is not None:
                self._breaker.cancelled(permit)
            raise
        # 503 is a server's considered answer (its disk is full, say); other faults of a server are failures.
        has_failed = reply.status >= 500 and reply.status != 503
        if permit is not None:
            if has_failed:
                self._breaker.failed(permit, self._clock(), jitter=random.random())  # noqa: S311 - no secret
            else:
                self._breaker.succeeded(permit, self._clock())
        if reply.status >= 500:
            self._last_failure = reply.detail
            raise self._error(reply.detail, status=reply.status)
        if extra_s == 0:
            self._times_s.append(reply.took_s)
        return reply

    def error(self, reason: str, *, status: int | None = None) -> EndpointError:
        """An error of this endpoint that a retry does not fix."""
        return self._error(reason, status=status, is_temporary=False)

    def _error(self, reason: str, *, status: int | None = None, is_temporary: bool = True) -> EndpointError:
        return EndpointError(self.id, reason, status=status, is_temporary=is_temporary)
