"""The clients of leases: the connections on which they wait, and the callers that were told a 503."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import Ending, QueuedLease
from gpu_worker_pool.ledger.driver import Driver
from gpu_worker_pool.server.agent.renewals import RENEWALS_PER_TTL

logger = logging.getLogger(__name__)

# A caller that was answered with 503, although its request is written, has this long to ask again, or its TTL if that is
# shorter. Then the lease ends.
UNCLAIMED_S = 5.0
NOT_ASKED_AGAIN = "its request was answered with 503, and was not repeated"
# The most leases that the connections of one caller may wait for together. No honest caller has as many, and each costs memory.
MOST_WATCHED = 10_000


class TooManyWaiting(Exception):  # noqa: N818 - a state, not a mistake
    def __init__(self, most: int) -> None:
        super().__init__(
            f"{most} connections wait for a lease already, which is the limit; ask without wait_s, or later."
        )


class ClientGone(Exception):  # noqa: N818 - an event, not a mistake
    """The client disconnected before it had sent everything, or while it waited. There is no caller to answer."""


class Presence:
    """Counts the connections that wait; at most `max_waiting` may."""

    def __init__(self, driver: Driver, max_waiting: int) -> None:
        self._driver = driver
        self.waiting = 0
        self._max_waiting = max_waiting
        self._polls: Counter[str] = Counter()
        self._watched: Counter[str] = Counter()
        # With a note of its own for each time that the caller was not told.
        self._unclaimed: dict[str, object] = {}
        driver.listeners.append(self._follow)

    @property
    def has_room(self) -> bool:
        return self.waiting < self._max_waiting

    def has_room_for(self, leases: int, caller: str) -> bool:
        """Whether a connection of this caller may wait for this number of leases."""
        return self.has_room and self._watched[caller] + leases <= MOST_WATCHED

    @contextmanager
    def watching(self, leases: int, caller: str) -> Iterator[None]:
        self._watched[caller] += leases
        try:
            yield
        finally:
            self._watched[caller] -= leases
            if not self._watched[caller]:
                del self._watched[caller]

    @contextmanager
    def _connection(self, lease_id: str | None, gone: asyncio.Future[None]) -> Iterator[None]:
        """Count a connection that waits; TooManyWaiting if there is no room. `lease_id` is None unless the client may
        renew the lease: then the connection counts as its heartbeat. The lease keeps its queue position when the last
        connection breaks, because the client may come back.
        """
        is_broken = False
        self.waiting += 1
        if lease_id is not None:
            self._polls[lease_id] += 1
        try:
            if self.waiting > self._max_waiting:
                raise TooManyWaiting(self._max_waiting)
            yield
        except ClientGone:
            is_broken = True
            raise
        finally:
            gone.cancel()
            self.waiting -= 1
            if lease_id is not None:
                self._polls[lease_id] -= 1
                if not self._polls[lease_id]:
                    del self._polls[lease_id]
                    if is_broken:
                        self._driver.note(cmd.ReportAbsence(lease_id))

    def note_heartbeat(self, *lease_ids: str) -> None:
        """Note a heartbeat of these leases, or their end."""
        for lease_id in lease_ids:
            self._unclaimed.pop(lease_id, None)

    def note_unclaimed(self, lease_id: str) -> None:
        """Note that the caller was answered with 503, though its request may be written, now or later."""
        self._unclaimed[lease_id] = object()

    def take_over(self, lease_ids: Iterable[str]) -> None:
        """Note that no caller of these leases has called this leader yet, whatever callers were told before."""
        self._unclaimed = {lease_id: object() for lease_id in lease_ids}

    def unclaimed(self, lease_id: str) -> object | None:
        """The last such note on a lease whose caller did not call again; None if it did, or needs not."""
        return self._unclaimed.get(lease_id)

    def expect_claim(self, lease_id: str) -> None:
        """Give the caller of a lease that is written time to ask again, if it was not told of it."""
        note, lease = self.unclaimed(lease_id), self._driver.state.leases.get(lease_id)
        if note is not None and lease is not None:
            limit_s = min(UNCLAIMED_S, lease.request.ttl_s)
            asyncio.get_running_loop().call_later(limit_s, self._end_if_unclaimed, lease_id, note)

    def _end_if_unclaimed(self, lease_id: str, note: object) -> None:
        if self.unclaimed(lease_id) is note and self._driver.is_in_charge:
            self._driver.note(cmd.Release(lease_id, by="the server", why=NOT_ASKED_AGAIN))

    def _follow(self, events: Sequence[ev.Event]) -> None:
        if not self._driver.is_in_charge:
            return
        for lease_id in ev.new_leases(events):
            self.expect_claim(lease_id)
        for event in events:
            if isinstance(event, ev.GrantWithdrawn):
                why = "its box did not keep it" if event.by_box else "its client did not take its GPUs up"
                logger.info("lease %s waits again, in its place: %s", event.lease_id, why)
            elif isinstance(event, ev.LeaseEnded):
                self.note_heartbeat(event.lease_id)

    async def hear_client(self, lease_id: str, *, caller: str) -> None:
        """The client of a lease calls about it: a waiter is renewed, and a grant is taken up."""
        self.note_heartbeat(lease_id)
        if isinstance(self._driver.state.leases.get(lease_id), QueuedLease):
            await self._driver.do(cmd.Renew((lease_id,)), caller)
        await self.take_up(lease_id, caller)

    async def take_up(self, lease_id: str, caller: str) -> None:
        """Take up a grant whose client is calling. The grant may have come about by this very call."""
        if lease_id in self._driver.state.untaken:
            await self._driver.do(cmd.Renew((lease_id,)), caller)

    async def renew(self, *lease_ids: str, caller: str) -> list[ev.Event]:
        self.note_heartbeat(*lease_ids)
        return await self._driver.do(cmd.Renew(lease_ids), caller)

    async def renew_until_ended(
        self, lease_ids: Sequence[str], wait_s: float, gone: asyncio.Future[None], *, caller: str
    ) -> tuple[list[ev.Event], float]:
        """Renew these leases until one of them has ended or was warned, or the time is over; return the events of the last
        renewal, and after how many seconds it was made.

        ClientGone if the client disconnects first.
        """
        known = self._warnings(lease_ids)  # now: the caller has just been told of these
        driver, leases = self._driver, self._driver.state.leases
        began = driver.now()
        until = began + wait_s
        step_s = min((leases[id_].request.ttl_s for id_ in lease_ids if id_ in leases), default=inf) / RENEWALS_PER_TTL
        with self.watching(len(lease_ids), caller), self._connection(None, gone):
            while True:
                left_s = max(until - driver.now(), 0.0)
                await driver.wait_for_change(lease_ids, min(left_s, step_s), gone)
                _check_is_there(gone)
                held_s = driver.now() - began
                events = await self.renew(*lease_ids, caller=caller)
                is_over = driver.is_closed or until <= driver.now() or self._warnings(lease_ids) != known
                if is_over or any(isinstance(event, ev.Refused) for event in events):
                    return events, held_s

    def _warnings(self, lease_ids: Sequence[str]) -> list[Ending | None]:
        return [getattr(self._driver.state.leases.get(lease_id), "ending", None) for lease_id in lease_ids]

    async def wait(
        self, lease: QueuedLease, wait_s: float, gone: asyncio.Future[None], *, renewed_by: str | None
    ) -> None:
        """Wait until the lease has left the queue, which may not be written yet; ClientGone if the client disconnects first.

        Waiting renews the lease if its caller may renew it: that is `renewed_by`.
        """
        driver = self._driver
        until, step_s = driver.now() + wait_s, lease.request.ttl_s / RENEWALS_PER_TTL
        with self._connection(None if renewed_by is None else lease.id, gone):
            while (left_s := until - driver.now()) > 0:
                await driver.wait_while_queued(lease.id, min(left_s, step_s), gone)
                # First: it may be granted at the same moment, and no client would take it.
                _check_is_there(gone)
                if not isinstance(driver.state.leases.get(lease.id), QueuedLease) or driver.is_closed:
                    return
                if renewed_by is not None:
                    await driver.do(cmd.Renew((lease.id,)), renewed_by)


def _check_is_there(gone: asyncio.Future[None]) -> None:
    if gone.done():
        raise ClientGone("The client went away while it waited.")
