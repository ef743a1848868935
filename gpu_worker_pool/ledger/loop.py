"""The event loop of a pool: the callers that wait in it, and the time in which it ran."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf

Caller = asyncio.Future[None]

# The ticker rings this often, also when nothing is due. Timers do not count the time while a machine sleeps.
TICK_S = 0.25
# A loop that comes this late for the ticker was away: heartbeats wait in its sockets. The longest standstill that goes
# unnoticed lasts TICK_S + LATE_S, half a second. It costs no lease with a TTL of 1 s or more: heartbeats come every third of
# the TTL, so two thirds of it are left when one begins to wait. A lease with a shorter TTL, down to 0.1 s, may end in such a
# standstill; its holder gives it up after two thirds of the TTL, which is before the server does, so no GPU has two holders.
LATE_S = 0.25
# What waits in the sockets is read within this time, which is lost as well: a lease may have had less than that left.
READ_S = 0.5


class Waiters:
    """The callers that wait for something to happen to a lease."""

    def __init__(self) -> None:
        # Ordered sets: a caller leaves the lines of a thousand leases without a search in each.
        self._by_lease: dict[str, dict[Caller, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_lease.values()))

    async def wait(self, lease_ids: Sequence[str], timeout_s: float, gone: Caller | None = None) -> None:
        """Wait until one of these leases is told, or until the timeout, or until the client is gone."""
        loop = asyncio.get_running_loop()
        waiter: Caller = loop.create_future()

        def leave(_: Caller | None = None) -> None:
            if not waiter.done():
                waiter.set_result(None)

        for lease_id in lease_ids:
            self._by_lease.setdefault(lease_id, {})[waiter] = None
        timer = loop.call_later(timeout_s, leave)
        if gone is not None:
            gone.add_done_callback(leave)
        try:
            await waiter
        finally:
            timer.cancel()
            if gone is not None:
                gone.remove_done_callback(leave)
            for lease_id in lease_ids:
                waiters = self._by_lease.get(lease_id, {})
                waiters.pop(waiter, None)
                if not waiters:
                    self._by_lease.pop(lease_id, None)

    def tell(self, lease_id: str) -> None:
        """Something has happened to this lease."""
        for waiter in self._by_lease.get(lease_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    def release_all(self) -> None:
        for lease_id in self._by_lease:
            self.tell(lease_id)


class LiveTime:
    """The time in which the event loop ran. Leases run on it, because a loop that is away reads no heartbeats.

    A ticker always runs, and notices when the loop comes late for it. `clock` must count the time while the machine sleeps.
    `lose` is called with the time that is lost, before `tick` or what is done next.
    """

    def __init__(self, clock: Callable[[], float], lose: Callable[[float], object], tick: Callable[[], object]) -> None:
        self._clock = clock
        self._lose = lose
        self._tick = tick
        self._ran_at = self._rings_at = inf
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._ran_at = self._clock()
        self._set(self._ran_at + TICK_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._rings_at = None, inf

    def look(self) -> None:
        """Note that the loop runs. This comes before everything that depends on the time."""
        now = self._clock()
        ran_at, self._ran_at = self._ran_at, now
        if now > self._rings_at + LATE_S:
            self._rings_at = now + TICK_S  # the ticker itself rings before that
            self._lose(now - ran_at + READ_S)

    def ring_at(self, due_at: float) -> None:
        """Ring at this time, if that is before the next tick."""
        if due_at < self._rings_at < inf:
            self._set(max(due_at, self._clock()))

    def _set(self, rings_at: float) -> None:
        self.stop()
        self._rings_at = rings_at
        self._timer = asyncio.get_running_loop().call_later(max(rings_at - self._clock(), 0.0), self._ring)

    def _ring(self) -> None:
        self.look()
        self._set(self._ran_at + TICK_S)
        self._tick()
