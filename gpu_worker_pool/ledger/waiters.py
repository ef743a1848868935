"""The callers that wait for something to happen to a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from gpu_worker_pool.core.model import events as ev

Caller = asyncio.Future[None]


class Waiters:
    """The callers that wait for something to happen to a lease."""

    def __init__(self) -> None:
        # Ordered sets: a caller leaves the lines of a thousand leases without a search in each.
        self._by_lease: dict[str, dict[Caller, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_lease)

    def __len__(self) -> int:
        return sum(map(len, self._by_lease.values()))

    async def wait(self, lease_ids: Sequence[str], timeout_s: float, gone: Caller | None = None) -> None:
        """Wait until something happens to one of these leases, or until the timeout, or until the client is gone."""
        loop = asyncio.get_running_loop()
        waiter: Caller = loop.create_future()

        def wake(_: Caller | None = None) -> None:
            if not waiter.done():
                waiter.set_result(None)

        for lease_id in lease_ids:
            self._by_lease.setdefault(lease_id, {})[waiter] = None
        timer = loop.call_later(timeout_s, wake)
        if gone is not None:
            gone.add_done_callback(wake)
        try:
            await waiter
        finally:
            timer.cancel()
            if gone is not None:
                gone.remove_done_callback(wake)
            for lease_id in lease_ids:
                waiters = self._by_lease.get(lease_id)
                if waiters is not None:
                    waiters.pop(waiter, None)
                    if not waiters:
                        del self._by_lease[lease_id]

    def pop(self, lease_id: str) -> list[Caller]:
        return list(self._by_lease.pop(lease_id, ()))

    def pop_all(self, news: Iterable[ev.Event]) -> list[Caller]:
        """The callers to whose leases these events have happened."""
        told: list[Caller] = []
        for event in news:
            if isinstance(event, ev.LeaseGranted | ev.LeaseWarned | ev.LeaseEnded):
                told += self.pop(event.lease_id)
        return told

    def release_all(self) -> None:
        for waiters in self._by_lease.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
