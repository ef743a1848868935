"""What the calls may do with the pool, and nothing more."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from starlette.types import Receive

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import Lease, QueuedLease
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.host.identity import Machine
from gpu_worker_pool.ledger.driver import Driver, EventListener
from gpu_worker_pool.server.http.bodies import ClientGone
from gpu_worker_pool.server.http.call import until_gone

from .presence import Presence
from .sampler import Sampler
from .snapshot import Snapshot

# While a client waits on an open connection its lease is renewed for it, this often within its TTL.
RENEWALS_PER_TTL = 3


class Pool:
    """The pool of this box. A call that changes something returns when the change is written; NotWritten where it cannot
    be. `id` tells this server from all others, whatever names it goes by, until it restarts.
    """

    def __init__(self, driver: Driver, sampler: Sampler, machine: Machine, presence: Presence, *, node: str) -> None:
        self.id = secrets.token_hex(8)
        self.node = node
        self._driver = driver
        self._sampler = sampler
        self._machine = machine
        self._presence = presence

    # --- reading ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> PoolState:
        """What the pool has come to. It is for reading, and a little ahead of what is written."""
        return self._driver.state

    @property
    def snapshot(self) -> Snapshot:
        """What was measured last."""
        return self._sampler.snapshot

    @property
    def is_open(self) -> bool:
        """Whether the pool's history is known. Before that nothing can be said about any lease."""
        return self._driver.is_open

    @property
    def trouble(self) -> str | None:
        """Why nothing can be granted at present; None where all is well."""
        return self._driver.trouble

    @property
    def waiting(self) -> int:
        """How many connections wait for a lease."""
        return self._presence.waiting

    def now(self) -> float:
        """The time on the pool's clock."""
        return self._driver.now()

    def wall_now(self) -> float:
        """The time as it is written for leases: on the wall, but by a clock that is not set while the server runs."""
        return self._driver.now() + self._driver.state.wall_offset_s

    def is_written(self, lease_id: str) -> bool:
        """Whether all that happened to this lease is in the journal; what is not may not be shown."""
        return self._driver.is_written(lease_id)

    async def caught_up(self) -> None:
        """Wait until what has happened so far is written; returns at once in trouble."""
        await self._driver.caught_up()

    async def find(self, lease_id: str) -> Lease | None:
        """The lease as it is written; None where it is unknown."""
        return await self._driver.find(lease_id)

    def check_is_open(self) -> None:
        """Raise NotWritten before the pool's history is known."""
        if not self._driver.is_open:
            raise self._driver.not_written()

    def follow(self, listener: EventListener) -> None:
        """Tell the listener what happens, once it is written."""
        self._driver.listeners.append(listener)

    def follow_writes(self, listener: Callable[[float], None]) -> None:
        """Tell the listener how long each commit took."""
        self._driver.write_listeners.append(listener)

    # --- leases ----------------------------------------------------------------------------------------------------

    async def request(self, lease_id: str, request: Request, *, is_known: bool, is_loopback: bool) -> list[ev.Event]:
        """Ask for a lease, or ask again. NoSuchProcess where the asker says that it is a process here, and is none."""
        if not is_known:
            process = self._machine.local_process(request.holder, is_loopback=is_loopback)
            if process is not None:
                request = replace(request, holder=replace(request.holder, process=process))
        events = await self._driver.do(cmd.RequestLease(lease_id, request))
        self._presence.was_heard_of(lease_id)
        return events

    async def renew(self, *lease_ids: str) -> list[ev.Event]:
        """Take a heartbeat of these leases."""
        self._presence.was_heard_of(*lease_ids)
        return await self._driver.do(cmd.Renew(lease_ids))

    def was_heard_of(self, lease_id: str) -> None:
        """Note that the asker of a lease is there, without renewing it."""
        self._presence.was_heard_of(lease_id)

    async def release(self, lease_id: str) -> None:
        """End a lease for its holder, or take it out of the queue."""
        await self._driver.do(cmd.Release(lease_id))

    async def revoke(self, lease_id: str) -> bool:
        """End a lease against its holder; whether there is such a lease."""
        events = await self._driver.do(cmd.Revoke(lease_id))
        return not any(isinstance(event, ev.LeaseUnknown) for event in events)

    @property
    def has_room_to_wait(self) -> bool:
        """Whether one more connection may wait."""
        return self._presence.has_room

    async def wait(self, lease: QueuedLease, wait_s: float, receive: Receive, *, renews: bool) -> None:
        """Wait until the lease has left the queue, and that is written; ClientGone when the client goes away first."""
        with self._presence.connection(lease.id if renews else None) as connection:
            gone = asyncio.ensure_future(until_gone(receive))
            waited = asyncio.ensure_future(self._wait_and_renew(lease, wait_s, renews=renews))
            try:
                await asyncio.wait({gone, waited}, return_when=asyncio.FIRST_COMPLETED)
                if not waited.done():
                    connection.is_broken = True
                    raise ClientGone("The client went away while it waited.")
                waited.result()
            finally:
                gone.cancel()
                waited.cancel()

    async def _wait_and_renew(self, lease: QueuedLease, wait_s: float, *, renews: bool) -> None:
        driver = self._driver
        until, step_s = driver.now() + wait_s, lease.request.ttl_s / RENEWALS_PER_TTL
        while (left_s := until - driver.now()) > 0:
            await driver.wait_while_queued(lease.id, min(left_s, step_s))
            if not isinstance(driver.state.leases.get(lease.id), QueuedLease) or driver.is_closed:
                return
            if renews:
                await driver.do(cmd.Renew((lease.id,)))

    def release_waiters(self) -> None:
        """Answer all connections that wait, with what is known so far: the server is about to stop."""
        self._driver.release_waiters()

    # --- operating -------------------------------------------------------------------------------------------------

    async def exclude(self, gpu: GpuKey, reason: str) -> None:
        """Take a GPU out of service; its leases run on."""
        await self._driver.do(cmd.ExcludeGpu(gpu, reason))

    async def include(self, gpu: GpuKey) -> None:
        """Put a GPU back into service."""
        await self._driver.do(cmd.IncludeGpu(gpu))

    async def ignore_process(self, name: str) -> Sequence[str]:
        """Leave processes of this name out of the reckoning; all such names."""
        await self._driver.do(cmd.IgnoreProcess(name))
        return sorted(self.state.ignored_processes)

    async def count_process(self, name: str) -> Sequence[str]:
        """Count processes of this name again; the names that are still left out."""
        await self._driver.do(cmd.CountProcess(name))
        return sorted(self.state.ignored_processes)
