"""The pool of this server: one facade over the driver of the leases, for the HTTP calls and for what feeds it.

On a server with a pool of its own, readings and deaths of holders come from its own box (own_box.py); in a fleet they come
from the agents of all boxes (leader/fleet_leader.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.decider.forecast import StartTimes
from gpu_worker_pool.core.fleet.leadership import LeaderRow
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import ActiveLease
from gpu_worker_pool.core.model.request import Holder, Request
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.planner import FreeAt
from gpu_worker_pool.gpus.simulated import SimulatedProbe
from gpu_worker_pool.host.clock import boot_id, boot_time
from gpu_worker_pool.host.pauses import LoopShare
from gpu_worker_pool.host.processes import Machine
from gpu_worker_pool.ledger.driver import Driver
from gpu_worker_pool.ledger.journal import NotWritten
from gpu_worker_pool.ledger.outbox import Writer
from gpu_worker_pool.server.box.sampler import Sampler
from gpu_worker_pool.server.box.snapshot import Snapshot
from gpu_worker_pool.server.leader.fleet_leader import FleetLeader
from gpu_worker_pool.wire.service import FleetView

from .own_box import OwnBox
from .presence import Presence

if TYPE_CHECKING:
    from gpu_worker_pool.server.agent.agent import Agent

    from .journal_sources import JournalSource

logger = logging.getLogger(__name__)

# Expected starts are worked out again after this number of times as long as that took.
FORECAST_SHARE = 20.0


class Pool:
    """The pool of this server. A change returns once it is written; NotWritten if it cannot be.

    `id` identifies this server, whatever names it has, until it restarts; `pool_id` identifies its journal, and is None
    until that is open. `leader` is None on a server with a pool of its own, and `membership`, the fleet as this box sees it,
    is None there and before the start.
    """

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
        self.id = secrets.token_hex(8)
        self.pool_id: str | None = None
        self.node = node
        self.membership: Agent | None = None
        self._machine = machine
        self._sampler = sampler
        self._driver = driver = Driver(settings, clock=boot_time, is_alive=self._is_alive)
        self._presence = presence = Presence(driver, max_waiting)
        self._box = None if is_in_fleet else OwnBox(driver, sampler, node=node, simulated=simulated)
        self.leader = FleetLeader(driver, presence.expect_claim, self._lead_later_epoch) if is_in_fleet else None
        # Whether the boxes of a grant have it on their disks, or do within this number of seconds; None on a server without a fleet.
        self.confirmed: Callable[[str, float], Coroutine[Any, Any, bool]] | None = (
            None if self.leader is None else self.leader.confirmed
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._source: JournalSource | None = None
        self._starts: Mapping[str, FreeAt] = {}
        self._starts_good_until = -inf
        driver.listeners.append(self._log_ends)
        # The driver's own calls, and those of its clients' presence, which need nothing more here.
        self.now = driver.now
        self.command = driver.do
        self.find = driver.find
        self.is_written = driver.outbox.is_written
        self.caught_up = driver.caught_up
        # `follow` calls a listener with events once they are written and their callers answered, `follow_writes` with the
        # duration of each commit.
        self.follow = driver.late_listeners.append
        self.follow_writes = driver.outbox.write_listeners.append
        # Notes that the clients of leases are there, without renewing the leases.
        self.note_heartbeat = presence.note_heartbeat
        self.has_room_to_wait_for = presence.has_room_for
        self.renew = presence.renew
        self.hear_client = presence.hear_client
        self.renew_until_ended = presence.renew_until_ended
        self.wait = presence.wait

    # --- taking charge -----------------------------------------------------------------------------------------------

    async def start(self, source: JournalSource, membership: Agent | None = None) -> None:
        """Take charge, by the journal of this source. JournalInUse if another server has it, StateDirError if another
        user could change it; any other trouble is reported by the calls.
        """
        self._loop = asyncio.get_running_loop()
        self._source, self.membership = source, membership
        if self._box is not None:
            self._box.start()
        await source.start()

    async def stop(self) -> None:
        """Answer all waiters, write what is left, and close everything."""
        if self._box is not None:
            self._box.stop()
        self._driver.close()
        if self._source is not None:
            await self._source.stop()
        if self.leader is not None:
            self.leader.end("the leader stops")
        self._loop = None

    def release_waiters(self) -> None:
        """Answer all calls that wait, with what is known so far."""
        self._driver.release_waiters()
        if self.leader is not None:
            self.leader.release_waiters()

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
        node = None if self._box is None else self.node
        self._driver.lead(
            state, writer, boot_id=boot_id(), wall_clock=wall_clock, epoch=epoch, node=node, may_act=may_act
        )
        self.pool_id = pool_id
        logger.info("%d leases in the journal, %d of them in the queue", len(state.leases), len(state.queue))
        if self._box is not None:
            self._box.lead(state)

    def note_fence(self, fence: int) -> None:
        """Note, before the start, the highest fence that this box has had in a fleet."""
        self._driver.fence_seen = fence

    def show(self, state: PoolState, row: LeaderRow, events: Sequence[ev.Event], *, pool_id: str) -> None:
        """Show a pool that another server leads, in which these events have happened."""
        self.pool_id = pool_id
        if row.expires_in_s > 0:
            self._driver.say_trouble(f"{row.holder} leads the fleet; ask {row.url}", row.url)
        else:
            self._driver.say_trouble("no leader at the moment; waiting")
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

    def _lead_later_epoch(self, epoch_seen: int) -> None:
        if self._source is not None:
            self._source.lead_later_epoch(epoch_seen)

    def _log_ends(self, events: Sequence[ev.Event]) -> None:
        for event in events if self._driver.is_in_charge else ():
            if isinstance(event, ev.LeaseEnded) and event.by is not None:
                why = f": {event.why}" if event.why else ""
                logger.info("lease %s was ended by %s (%s)%s", event.lease_id, event.by, event.reason, why)

    # --- what is known -----------------------------------------------------------------------------------------------

    def fleet(self) -> FleetView | None:
        """What is known of the fleet that this server belongs to."""
        return None if self._source is None else self._source.view()

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
    def why_no_grants(self) -> str | None:
        """Why nothing can be granted to callers of this server, also by its leader; None if GPUs can be."""
        member = self.membership
        if member is None or self.leads:
            return self.trouble
        return member.trouble or (self.trouble if member.leader_url is None else None)

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
        """What happens to the leases while this server is away, in a sentence; None if there are none, and in a fleet in which
        another server goes on with them.
        """
        if self._source is not None and self.fleet() is not None:
            return self._source.goes_on_without()
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

    # --- changes -----------------------------------------------------------------------------------------------------

    async def request(self, lease_id: str, request: Request, *, caller: str) -> list[ev.Event]:
        """Request a lease, or repeat a request."""
        try:
            events = await self._driver.do(cmd.RequestLease(lease_id, request), caller)
        except NotWritten:
            if not self.is_written(lease_id):
                self._presence.note_unclaimed(lease_id)
            raise
        self._presence.note_heartbeat(lease_id)
        await self._presence.take_up(lease_id, caller)
        return events

    def note_not_told(self, lease_id: str) -> None:
        """Note that the caller of a lease that is written is answered with 503."""
        self._presence.note_unclaimed(lease_id)
        self._presence.expect_claim(lease_id)

    def local_process(self, holder: Holder, *, uid: int | None, may_name_any: bool) -> ProcessId | None:
        """The process of a holder, if it is on this machine and its caller may name it (host/processes.py)."""
        # One that is known by a descriptor is not looked up.
        is_watched = self._box.is_watched if self._box is not None else lambda _: False
        return self._machine.local_process(holder, uid=uid, may_name_any=may_name_any, is_watched=is_watched)

    async def expected_starts(self, loop_share: LoopShare) -> Mapping[str, FreeAt]:
        """When waiters will probably start. They are worked out so seldom that it takes little of the loop's time, and yields to
        other work in between.
        """
        if self.now() >= self._starts_good_until:
            times, took_s, began = StartTimes(self.state, self.now()), 0.0, time.thread_time()
            for _ in times.steps():
                took_s += time.thread_time() - began
                await loop_share.yield_if_due()
                began = time.thread_time()
            self._starts, self._starts_good_until = times.starts, self.now() + FORECAST_SHARE * took_s
        return self._starts
