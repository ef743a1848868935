"""Leases of a fleet, by any of its boxes: what one entry point does not answer is asked of the next, under the same id."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.host.clock import boot_time

from .lease_book import LeaseAnswer, Renewal
from .server_leases import ServerLeases

T = TypeVar("T")

# How long an entry point may be silent before the next one is asked. The last one has the time of any call.
PATIENCE_S: Final = 2.0
# A renewal is not held back at the second entry point, and must get through in time.
LEAST_PATIENCE_S: Final = 0.5
# An entry point that failed is asked after the others for so long.
AVOIDED_S: Final = 10.0


class FleetLeases:
    """The leases of one fleet. `entries` are its entry points at present; that of `home` is asked first while it works.

    Every call is the same at each of them: one pool answers, so an id is one request and one lease.
    """

    needs_heartbeat = True

    def __init__(
        self,
        fleet_id: str,
        home: Endpoint,
        entries: Callable[[], Sequence[ServerLeases]],
        on_failure: Callable[[EndpointError], None] = lambda _: None,
    ) -> None:
        self.fleet_id = fleet_id
        self._home = home
        self._entries = entries
        self._on_failure = on_failure
        self._failed_at: dict[str, float] = {}

    @property
    def endpoint_id(self) -> str:
        return self._home.id

    @property
    def endpoint_ids(self) -> tuple[str, ...]:
        return tuple(entry.endpoint.id for entry in self._in_order())

    async def ask(self, lease_id: str, request: Request) -> LeaseAnswer:
        return await self._at_first(lambda entry, _: entry.ask(lease_id, request), PATIENCE_S)

    async def wait(self, lease_id: str, request: Request, wait_s: float) -> LeaseAnswer:
        return await self._at_first(lambda entry, _: entry.wait(lease_id, request, wait_s), wait_s + PATIENCE_S)

    async def renew(self, lease_ids: Sequence[str], wait_s: float = 0.0, warned: Sequence[str] = ()) -> Renewal:
        # As long again as the answer is held: then another entry point can renew it before it is given up.
        patience_s = wait_s + min(max(wait_s, LEAST_PATIENCE_S), PATIENCE_S)
        return await self._at_first(
            lambda entry, number: entry.renew(lease_ids, 0.0 if number else wait_s, warned), patience_s
        )

    async def release(self, lease_id: str) -> None:
        await self._at_first(lambda entry, _: entry.release(lease_id), PATIENCE_S)

    async def pool_id(self) -> str | None:
        return await self._at_first(lambda entry, _: entry.pool_id(), PATIENCE_S)

    def _in_order(self) -> list[ServerLeases]:
        """Those that work first: the home, then the others as they were given."""
        now = boot_time()

        def rank(entry: ServerLeases) -> tuple[bool, bool]:
            endpoint = entry.endpoint
            has_failed = now - self._failed_at.get(endpoint.id, now - AVOIDED_S) < AVOIDED_S
            return has_failed or not endpoint.is_healthy, endpoint is not self._home

        return sorted(self._entries(), key=rank)

    async def _at_first(self, call: Callable[[ServerLeases, int], Awaitable[T]], patience_s: float) -> T:
        """What the first entry point that works answers; EndpointError with all reasons where none does."""
        entries, errors = self._in_order(), []
        for number, entry in enumerate(entries):
            is_last = number + 1 == len(entries)
            try:
                async with asyncio.timeout(None if is_last else patience_s):
                    answer = await call(entry, number)
            except TimeoutError:
                error = entry.endpoint.error(f"it has not answered within {patience_s:.1f} s", is_temporary=True)
            except EndpointError as failed:
                error = failed
            else:
                self._failed_at.pop(entry.endpoint.id, None)
                return answer
            self._failed_at[entry.endpoint.id] = boot_time()
            self._on_failure(error)
            errors.append(error)
        if not errors:
            raise self._home.error("no endpoint is known to belong to this fleet any more", is_temporary=True)
        if len(errors) == 1:
            raise errors[0]
        reasons = "; ".join(f"{error.endpoint_id}: {error.reason.rstrip('. ')}" for error in errors)
        statuses = {error.status for error in errors}
        status = errors[0].status if len(statuses) == 1 else None
        raise self._home.error(f"none of its entry points took it ({reasons})", status=status, is_temporary=True)
