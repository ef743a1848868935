"""One endpoint: how to call it, how it has been doing, and what it last showed of its GPUs."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from gpu_worker_pool.client.http.transport import CallFailed, Reply, Transport
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.pauses import Backoff
from gpu_worker_pool.urls import EndpointUrl

from .breaker import CircuitBreaker, Permit
from .seen_pool import SeenPool

RETRY = Backoff(first_s=0.1, max_s=2.0)
# Not the module's own numbers: a program that seeds those gets the same ones with a client in the background.
JITTER = random.Random()  # noqa: S311 - no secret
FAILURES_TO_OPEN = 3
EndpointKind = Literal["unknown", "leases", "statistics"]


class Endpoint:
    """Calls one server. Its breaker stops calls that would only fail, except heartbeats and releases: GPUs need them."""

    def __init__(self, endpoint_id: str, url: EndpointUrl, transport: Transport, config: ClientConfig) -> None:
        self.id = endpoint_id
        self.url = url
        self.kind: EndpointKind = "unknown"
        self.is_healthy = False
        self.last_error: str | None = "it has not answered yet"
        # The status of its last answer that was a refusal or could not be used; None where there was no answer.
        self.error_status: int | None = None
        self.last_seen: datetime | None = None
        self.calls = 0
        # What a poll last showed of its own box, and when the next poll is due.
        self.seen = SeenPool()
        self.next_poll_at = 0.0
        # The fleet that it is an entry point of, as far as it has said so.
        self.fleet_id: str | None = None
        # How often to make a call that may be repeated.
        self.attempts = 1 + config.endpoint_max_retries
        self._transport = transport
        self._timeout_s = min(config.endpoint_timeout, config.request_timeout)
        self._token = config.tokens.get(endpoint_id)
        self._times_s: deque[float] = deque(maxlen=50)
        self._last_failure: str | None = None
        longest_s = max(config.endpoint_health_check_interval, 0.5)
        self.breaker = CircuitBreaker(
            failure_threshold=FAILURES_TO_OPEN,
            open_for=Backoff(first_s=min(1.0, longest_s), max_s=longest_s).delay_s,
            probe_timeout_s=max(self._timeout_s, 1.0),
        )

    def __repr__(self) -> str:
        state = "healthy" if self.is_healthy else f"down: {self.last_error}"
        return f"<Endpoint {self.id} {self.url.url} ({self.kind}), {state}>"

    @property
    def response_time_ms(self) -> float:
        """The average over the last calls; 0.0 where there was none."""
        return round(1000.0 * sum(self._times_s) / len(self._times_s), 3) if self._times_s else 0.0

    def mark_healthy(self) -> None:
        """Note that a poll of its GPUs succeeded."""
        self.is_healthy = True
        self.last_error = self.error_status = None
        self.last_seen = datetime.now()  # noqa: DTZ005 - local time, as all times of the documents

    def mark_down(self, reason: str, status: int | None) -> None:
        """Note that it cannot be used at present. It may come back as another server, so its kind is asked again then."""
        self.is_healthy = False
        self.last_error, self.error_status = reason, status
        self.kind = "unknown"

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | bytes | None = None,
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
                await asyncio.sleep(RETRY.delay_s(attempt, JITTER.random()))
        raise AssertionError("unreachable")

    async def _call_once(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None, extra_s: float, *, is_vital: bool
    ) -> Reply:
        permit = self.breaker.try_acquire(boot_time())
        self.calls += permit is not None or is_vital
        if permit is None and not is_vital:
            raise self.error(self._last_failure or "it kept failing")
        url, timeout_s = self.url.url, self._timeout_s + extra_s
        try:
            reply = await self._transport.call(method, url, path, body=body, token=self._token, timeout_s=timeout_s)
        except CallFailed as failed:
            self._report(permit, has_failed=True)
            self._last_failure = str(failed)
            raise self.error(str(failed), status=failed.status, is_temporary=failed.is_temporary) from None
        except BaseException:
            if permit is not None:
                self.breaker.cancelled(permit)
            raise
        # 503 is a server's considered answer (its disk is full, say); other faults of a server are failures.
        self._report(permit, has_failed=reply.status >= 500 and reply.status != 503)
        if reply.status >= 500:
            self._last_failure = reply.detail
            raise self.error(reply.detail, status=reply.status, is_temporary=True)
        if extra_s == 0:
            self._times_s.append(reply.took_s)
        return reply

    def _report(self, permit: Permit | None, *, has_failed: bool) -> None:
        if permit is None:
            return  # a vital call that went out although the breaker is open
        if has_failed:
            self.breaker.failed(permit, boot_time(), jitter=JITTER.random())
        else:
            self.breaker.succeeded(permit)

    def error(self, reason: str, *, status: int | None = None, is_temporary: bool = False) -> EndpointError:
        return EndpointError(self.id, reason, status=status, is_temporary=is_temporary)
