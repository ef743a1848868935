"""The interface of the pool for the HTTP calls."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import ActiveLease, Ending, QueuedLease
from gpu_worker_pool.core.model.request import Holder, Request
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.planner import FreeAt
from gpu_worker_pool.core.queue.start_times import StartTimes
from gpu_worker_pool.host.identity import Machine
from gpu_worker_pool.ledger.driver import Driver
from gpu_worker_pool.ledger.journal import NotWritten
from gpu_worker_pool.server.agent.membership import Membership
from gpu_worker_pool.server.http.bodies import ClientGone
from gpu_worker_pool.server.http.forwarded import Forwarded
from gpu_worker_pool.server.http.loop_share import LoopShare
from gpu_worker_pool.wire.service import FleetView

from .presence import Presence, WaitingConnection
from .sampler import Sampler
from .snapshot import Snapshot

# While a client waits on an open connection, the server renews its lease, this often within the TTL.
RENEWALS_PER_TTL = 3
# Expected starts are worked out again after so many times as long as that took.
FORECAST_SHARE = 20.0


class Pool:
    """The pool of this box. A change returns once it is written; NotWritten if it cannot be.

    `id` identifies this server, whatever names it has, until it restarts; `pool_id` identifies its journal, and is None
    until that is open.
    """

    def __init__(self, driver: Driver, sampler: Sampler, machine: Machine, presence: Presence, *, node: str) -> None:
        self.id = secrets.token_hex(8)
        self.pool_id: str | None = None
        # What is known of the fleet that this server belongs to.
        self.fleet: Callable[[], FleetView | None] = lambda: None
        # Whether the boxes of a grant have it on their disks, or do within so many seconds; None on a server without a fleet.
        self.confirmed: Callable[[str, float], Coroutine[Any, Any, bool]] | None = None
        # Whether no client can have been told of a lease that this leader granted.
        self.is_untold: Callable[[str], bool] = lambda _: False
        # Whether a process of this box is known by a descriptor. Any other is looked up.
        self.is_watched: Callable[[ProcessId], bool] = lambda _: False
        # Ends a lease whose caller was noted as not told of it, unless that asks again in time.
        self.expect_claim: Callable[[str], None] = lambda _: None
        # The fleet as this box sees it; None on a server without one.
        self.membership: Membership | None = None
        self.node = node
        self._driver = driver
        self._sampler = sampler
        self._machine = machine
        self._presence = presence
        # The driver's own calls, which need nothing more here.
        self.now = driver.now
        self.find = driver.find
        self.is_written = driver.outbox.is_written
        self.caught_up = driver.caught_up
        self.release_waiters = driver.release_waiters
        # `follow` calls a listener with events once they are written and their callers answered, `follow_writes` with the
        # duration of each commit.
        self.follow = driver.late_listeners.append
        self.follow_writes = driver.outbox.write_listeners.append
        self._starts: Mapping[str, FreeAt] = {}
        self._starts_good_until = -inf
        # Notes that the clients of leases are there, without renewing the leases.
        self.note_heartbeat = presence.note_heartbeat
        self.has_room_to_wait_for = presence.has_room_for

    @property
    def state(self) -> PoolState:
        """The state of the pool: read only, and a little ahead of what is written."""
        return self._driver.state

    @property
    def snapshot(self) -> Snapshot:
        return self._sampler.snapshot

    @property
    def is_open(self) -> bool:
        """Whether the pool's history is loaded. Before that, nothing is known about any lease."""
        return self._driver.is_open

    @property
    def leads(self) -> bool:
        """Whether this server decides."""
        return self._driver.is_in_charge

    @property
    def trouble(self) -> str | None:
        """Why nothing can be granted at present; None if GPUs can be."""
        return self._driver.trouble

    @property
    def is_led_elsewhere(self) -> bool:
        """Whether another server of the fleet is known to lead: then it is in order that this one grants nothing."""
        fleet = self.fleet()
        return fleet is not None and fleet.role != "leader" and fleet.leader is not None

    @property
    def why_no_grants(self) -> str | None:
        """Why nothing can be granted to callers of this server, also by its leader; None if GPUs can be."""
        if self.is_led_elsewhere:
            return None if self.membership is None else self.membership.trouble
        return self.trouble

    @property
    def past_trouble(self) -> str | None:
        """Why past leases cannot be read at present; None if they can be, also where another server leads."""
        return None if self._driver.is_open and not self._driver.is_in_charge else self._driver.trouble

    @property
    def waiting(self) -> int:
        return self._presence.waiting

    @property
    def has_room_to_wait(self) -> bool:
        return self._presence.has_room

    def goes_on_without(self) -> str | None:
        """What happens to the leases while this server is away, in a sentence; None if there are none, and in a fleet."""
        if self.fleet() is not None:
            return None  # another candidate goes on with them
        state, now = self._driver.state, self._driver.now()
        active = [lease for lease in state.leases.values() if isinstance(lease, ActiveLease)]
        left_s = [due_at - now for lease in active if (due_at := state.expires_at(lease.id)) is not None]
        local = len(active) - len(left_s)
        said = []
        if local:
            said.append(
                f"{local} {'lease goes' if local == 1 else 'leases go'} on while the process of the holder runs"
            )
        if left_s:
            said.append(
                f"{len(left_s)} of holders that are not watched {'ends' if len(left_s) == 1 else 'end'} unless the "
                f"server is back within about {max(min(left_s), 0.0) * 2 / 3:.0f} s"
            )
        return f"this server stops; without it, {', and '.join(said)}" if said else None

    def wall_now(self) -> float:
        """The wall-clock time for leases, which follows the machine's wall clock."""
        return self._driver.now() + self._driver.state.wall_offset_s

    def check_is_open(self) -> None:
        """Raise NotWritten if the pool's history is not loaded yet."""
        if not self._driver.is_open:
            raise self._driver.not_written()

    def check_leads(self) -> None:
        """Raise NotWritten if another server decides: what this one knows may be old."""
        if not self._driver.is_leading:
            raise self._driver.not_written()

    async def request(
        self,
        lease_id: str,
        request: Request,
        *,
        caller: str,
        is_known: bool,
        is_loopback: bool,
        uid: int | None = None,
        forwarded: Forwarded | None = None,
        is_admin: bool = False,
    ) -> list[ev.Event]:
        """Request a lease, or repeat a request. NoSuchProcess if it names a process of this machine that does not exist,
        ForeignProcess if that runs as another user than `uid`. If another box passed the request on, that box has looked.
        """
        if not is_known:
            if forwarded is None:
                process = self.local_process(request.holder, is_loopback=is_loopback, uid=uid)
            else:
                process = forwarded.holder_process(is_admin=is_admin)
            if process is not None:
                node = self.node if forwarded is None else forwarded.node
                request = _with_process(request, process, node)
        try:
            events = await self._driver.do(cmd.RequestLease(lease_id, request), caller)
        except NotWritten:
            if not self.is_written(lease_id):
                self._presence.note_unclaimed(lease_id)
            raise
        self._presence.note_heartbeat(lease_id)
        await self._take_up(lease_id, caller)
        return events

    def note_not_told(self, lease_id: str) -> None:
        """Note that the caller of a lease that is written is answered with 503."""
        self._presence.note_unclaimed(lease_id)
        self.expect_claim(lease_id)

    def local_process(self, holder: Holder, *, is_loopback: bool, uid: int | None) -> ProcessId | None:
        """The process of a holder, if it is on this machine; NoSuchProcess and ForeignProcess as in `request`."""
        process = self._machine.local_process(holder, is_loopback=is_loopback, is_watched=self.is_watched)
        if process is not None and uid is not None:
            self._machine.check_owner(process, uid)
        return process

    async def renew(self, *lease_ids: str, caller: str) -> list[ev.Event]:
        self._presence.note_heartbeat(*lease_ids)
        return await self._driver.do(cmd.Renew(lease_ids), caller)

    async def hear_client(self, lease_id: str, *, caller: str) -> None:
        """The client of a lease calls about it: a waiter is renewed, and a grant is taken up."""
        self._presence.note_heartbeat(lease_id)
        if isinstance(self.state.leases.get(lease_id), QueuedLease):
            await self._driver.do(cmd.Renew((lease_id,)), caller)
        await self._take_up(lease_id, caller)

    async def _take_up(self, lease_id: str, caller: str) -> None:
        """Take up a grant whose client is calling. The grant may have come about by this very call."""
        if lease_id in self.state.untaken:
            await self._driver.do(cmd.Renew((lease_id,)), caller)

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
        with self._presence.watching(len(lease_ids), caller), self._connection(None, gone) as connection:
            while True:
                left_s = max(until - driver.now(), 0.0)
                await driver.wait_for_change(lease_ids, min(left_s, step_s), gone)
                _check_is_there(gone, connection)
                held_s = driver.now() - began
                events = await self.renew(*lease_ids, caller=caller)
                is_over = driver.is_closed or until <= driver.now() or self._warnings(lease_ids) != known
                if is_over or any(isinstance(event, ev.Refused) for event in events):
                    return events, held_s

    def _warnings(self, lease_ids: Sequence[str]) -> list[Ending | None]:
        return [getattr(self.state.leases.get(lease_id), "ending", None) for lease_id in lease_ids]

    def expected_starts(self) -> Mapping[str, FreeAt]:
        """When waiters will probably start. They are worked out so seldom that it takes little of the loop's time."""
        if self.now() >= self._starts_good_until:
            for _ in self._work_starts_out():
                pass
        return self._starts

    async def expected_starts_in_turns(self, loop_share: LoopShare) -> Mapping[str, FreeAt]:
        """The same, which yields to other work in between."""
        if self.now() >= self._starts_good_until:
            for _ in self._work_starts_out():
                await loop_share.yield_if_due()
        return self._starts

    def _work_starts_out(self) -> Iterator[None]:
        times, began = StartTimes(self.state, self.now()), time.thread_time()
        took_s = 0.0
        for _ in times.steps():
            took_s += time.thread_time() - began
            yield
            began = time.thread_time()
        self._starts, self._starts_good_until = times.starts, self.now() + FORECAST_SHARE * took_s

    async def command(self, command: cmd.Configure | cmd.BookGpus | cmd.ForgetNode) -> list[ev.Event]:
        return await self._driver.do(command)

    async def release(
        self, lease_id: str, *, caller: str, is_holder: bool = False, by: str | None = None, why: str | None = None
    ) -> None:
        await self._driver.do(cmd.Release(lease_id, is_holder, by, why), caller)

    async def revoke(self, lease_id: str, *, by: str | None = None, why: str | None = None) -> bool:
        """End a lease as the operator; return whether the lease is known."""
        events = await self._driver.do(cmd.Revoke(lease_id, by, why))
        return not any(isinstance(event, ev.Refused) for event in events)

    async def wait(
        self, lease: QueuedLease, wait_s: float, gone: asyncio.Future[None], *, renewed_by: str | None
    ) -> None:
        """Wait until the lease has left the queue, which may not be written yet; ClientGone if the client disconnects first.

        Waiting renews the lease if its caller may renew it: that is `renewed_by`.
        """
        driver = self._driver
        until, step_s = driver.now() + wait_s, lease.request.ttl_s / RENEWALS_PER_TTL
        with self._connection(None if renewed_by is None else lease.id, gone) as connection:
            while (left_s := until - driver.now()) > 0:
                await driver.wait_while_queued(lease.id, min(left_s, step_s), gone)
                # First: it may be granted at the same moment, and no client would take it.
                _check_is_there(gone, connection)
                if not isinstance(driver.state.leases.get(lease.id), QueuedLease) or driver.is_closed:
                    return
                if renewed_by is not None:
                    await driver.do(cmd.Renew((lease.id,)), renewed_by)

    @contextmanager
    def _connection(self, lease_id: str | None, gone: asyncio.Future[None]) -> Iterator[WaitingConnection]:
        try:
            with self._presence.connection(lease_id) as connection:
                yield connection
        finally:
            gone.cancel()


# A worker asks again and again for the same.
@lru_cache(maxsize=256)
def _with_process(request: Request, process: ProcessId, node: str) -> Request:
    return replace(request, holder=replace(request.holder, process=process, node=node))


def _check_is_there(gone: asyncio.Future[None], connection: WaitingConnection) -> None:
    if gone.done():
        connection.is_broken = True
        raise ClientGone("The client went away while it waited.")
