"""The authority over the GPUs of a pool: connects the driver to everything around it.

On a server with a pool of its own, readings and deaths of holders come from its own box (own_box.py); in a fleet they come
from the agents of all boxes (leader/fleet_leader.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from gpu_worker_pool.core.fleet.leadership import LeaderRow
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import ActiveLease
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.gpus.simulated import SimulatedProbe
from gpu_worker_pool.host.clock import boot_id, boot_time
from gpu_worker_pool.host.identity import Machine
from gpu_worker_pool.ledger.driver import Driver
from gpu_worker_pool.ledger.outbox import Writer
from gpu_worker_pool.server.leader.fleet_leader import FleetLeader

from .own_box import OwnBox
from .pool import Pool
from .presence import Presence
from .sampler import Sampler
from .snapshot import Snapshot

logger = logging.getLogger(__name__)

# A caller that was answered with 503, although its request is written, has this long to ask again, or its TTL if that is
# shorter. Then the lease ends.
UNCLAIMED_S = 5.0
NOT_ASKED_AGAIN = "its request was answered with 503, and was not repeated"


class JournalSource(Protocol):
    """Where the history of the pool is. It lets the authority lead once that is known, if this server is to lead."""

    async def start(self, authority: Authority) -> None:
        """Begin. JournalInUse or StateDirError if the server must not run at all."""

    async def stop(self) -> None:
        """Stop. The driver is closed already."""


class Authority:
    """`leader` is None on a server with a pool of its own, which has a `box` instead."""

    def __init__(
        self,
        settings: PoolSettings,
        machine: Machine,
        sampler: Sampler,
        *,
        node: str,
        max_waiting: int,
        simulated: SimulatedProbe | None = None,
        is_in_fleet: bool = False,
    ) -> None:
        self._node = node
        self._sampler = sampler
        self._driver = Driver(settings, clock=boot_time, is_alive=self._is_alive)
        self._presence = Presence(max_waiting, lambda id_: self._driver.note(cmd.ReportAbsence(id_)))
        self._box = None if is_in_fleet else OwnBox(self._driver, sampler, node=node, simulated=simulated)
        self.leader = FleetLeader(self._driver, self._expect_claim) if is_in_fleet else None
        self.pool = Pool(self._driver, sampler, machine, self._presence, node=node)
        if self.leader is not None:
            self.pool.confirmed, self.pool.is_untold = self.leader.confirmed, self.leader.is_untold
        if self._box is not None:
            self.pool.is_watched = self._box.is_watched
        self.pool.expect_claim = self._expect_claim
        self._loop: asyncio.AbstractEventLoop | None = None
        self._source: JournalSource | None = None
        self._driver.listeners.append(self._follow)

    async def start(self, source: JournalSource) -> None:
        """Take charge, by the journal of this source. JournalInUse if another server has it, StateDirError if another
        user could change it; any other trouble is reported by the calls.
        """
        self._loop = asyncio.get_running_loop()
        if self._box is not None:
            self._box.start()
        self._source = source
        await source.start(self)

    async def stop(self) -> None:
        """Answer all waiters, write what is left, and close everything."""
        if self._box is not None:
            self._box.stop()
        self._driver.close()
        if self._source is not None:
            await self._source.stop()
        if self._box is not None:
            self._box.close()
        if self.leader is not None:
            self.leader.end("the leader stops")
        self._loop = None

    def lead(
        self,
        state: PoolState,
        writer: Writer,
        *,
        pool_id: str,
        wall_clock: Callable[[], float],
        epoch: int = 0,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take charge of a pool with this history."""
        if self.leader is not None:
            self.leader.begin(epoch, pool_id)
            self._presence.take_over(lease.id for lease in state.leases.values() if isinstance(lease, ActiveLease))
        # The nodes of a fleet are announced by their agents.
        node = None if self._box is None else self._node
        self._driver.lead(
            state, writer, boot_id=boot_id(), wall_clock=wall_clock, epoch=epoch, node=node, may_act=may_act
        )
        self.pool.pool_id = pool_id
        logger.info("%d leases in the journal, %d of them in the queue", len(state.leases), len(state.queue))
        if self._box is not None:
            self._box.lead(state, pool_id)

    def note_fence(self, fence: int) -> None:
        """Note, before the start, the highest fence that this box has had in a fleet."""
        self._driver.fence_seen = fence

    def follow(self, state: PoolState, row: LeaderRow, events: Sequence[ev.Event], *, pool_id: str) -> None:
        """Show a pool that another server leads, in which these events have happened."""
        self.pool.pool_id = pool_id
        if row.expires_in_s > 0:
            self._driver.say_trouble(f"{row.holder} leads the fleet; ask {row.url}", row.url)
        else:
            self._driver.say_trouble("nobody leads the fleet; ask again in a few seconds")
        self._driver.follow(state, events, boot_id=boot_id(), wall_now=row.wall_now)

    def step_down(self, why: str) -> None:
        """Stop leading, and refuse all callers."""
        self._driver.step_down(why)
        if self.leader is not None:
            self.leader.end(why)

    def say_trouble(self, why: str) -> None:
        """Refuse all callers that want a change, with this reason."""
        self._driver.say_trouble(why)
        if not self._driver.is_open:
            self._observe(self._sampler.snapshot, is_regular=True)

    def observe(self, snapshot: Snapshot, *, is_regular: bool) -> None:
        """Take in new readings, from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._observe, snapshot, is_regular)

    def _observe(self, snapshot: Snapshot, is_regular: bool) -> None:  # noqa: FBT001 - a callback
        if self._box is not None:
            self._box.observe(snapshot, is_regular=is_regular)
        elif snapshot.readings and is_regular and not self._driver.is_open:
            # The leader has the readings of this box from its agent. Where none is known, they are only shown.
            self._driver.note(cmd.Observe(snapshot.readings))

    def _is_alive(self, process: ProcessId) -> bool:
        """Whether a holder's process runs. In a fleet its box says so, before the grant is told."""
        return self._box is None or self._box.is_alive(process)

    def _follow(self, events: Sequence[ev.Event]) -> None:
        if not self._driver.is_in_charge:
            return
        for event in events:
            if isinstance(event, ev.LeaseQueued):
                self._expect_claim(event.lease_id)
            elif isinstance(event, ev.GrantWithdrawn):
                logger.info(
                    "the client of lease %s did not take its GPUs up; it waits again, in its place", event.lease_id
                )
            elif isinstance(event, ev.LeaseEnded):
                if event.by is not None:
                    why = f": {event.why}" if event.why else ""
                    logger.info("lease %s was ended by %s (%s)%s", event.lease_id, event.by, event.reason, why)
                self._presence.note_heartbeat(event.lease_id)

    def _expect_claim(self, lease_id: str) -> None:
        """Give the caller of a lease that is written time to ask again, if it was not told of it."""
        note, lease = self._presence.unclaimed(lease_id), self._driver.state.leases.get(lease_id)
        if note is not None and lease is not None:
            limit_s = min(UNCLAIMED_S, lease.request.ttl_s)
            asyncio.get_running_loop().call_later(limit_s, self._end_if_unclaimed, lease_id, note)

    def _end_if_unclaimed(self, lease_id: str, note: object) -> None:
        if self._presence.unclaimed(lease_id) is note and self._driver.is_in_charge:
            self._driver.note(cmd.Release(lease_id, by="the server", why=NOT_ASKED_AGAIN))
