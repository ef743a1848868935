"""The only code that changes a pool: stamps the time, decides, journals, and only then answers.

Everything here runs in the event loop's thread. A command changes the state in memory at once. Its durable events go to
the writer together with all others since the last commit, and the caller is answered after that commit. So the state is
a little ahead of the journal, and no client is shown the part that is ahead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from gpu_worker_pool.core.decider.condense import Condensed
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.fleet.clock import clock_base
from gpu_worker_pool.core.fleet.leadership import LeaderRow
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import ProcessId, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, Lease, QueuedLease, as_ended
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState

from .alarm import Alarm
from .hearing import Hearing
from .journal import History, LedElsewhere, NotWritten
from .outbox import Outbox
from .pending_readings import PendingReadings
from .short_wait import ShortWait, goes_on_at_once
from .standstill import StandstillWatch
from .take_over import first_commands, restored
from .turn import IDS_PER_COMMAND, Caller, Turn, Waiters
from .unwritten import renew, show
from .writer import WriteBatch, Writer

logger = logging.getLogger(__name__)

LEADERSHIP_UNSURE = "it is not sure that this server still leads the fleet; it is found out within a few seconds"

EventListener = Callable[[Sequence[ev.Event]], None]


def _always() -> bool:
    return True


class Driver:
    """`listeners` get events in order, once they are written, and before a caller is answered. `late_listeners` get them in
    the same turn of the event loop, after those callers: they only show what happened. `early_listeners` get them at once, for effects that are
    harmless if the events are never written (to sample GPUs again, for example). `trouble` says why the journal cannot
    be written at present. In trouble, heartbeats are still taken, because they need no write; all other commands are
    refused. `clock` is the machine's boot clock. `is_alive` is called at a grant to a holder whose process is on this
    machine.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        clock: Callable[[], float],
        is_alive: Callable[[ProcessId], bool] = lambda _: True,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.state = PoolState(settings=settings)
        self.listeners: list[EventListener] = []
        self.late_listeners: list[EventListener] = []
        self.early_listeners: list[EventListener] = []
        self._outbox = Outbox(self._tell, self._carry_out_postponed, lambda: Condensed(self.state))
        self.write_listeners = self._outbox.write_listeners
        self.hold_writes, self.let_writes_go = self._outbox.hold, self._outbox.let_go
        self._boot_clock = clock
        self._clock_base = 0.0
        self._node: str | None = None
        self._is_alive = is_alive
        self._may_act: Callable[[], bool] = _always
        self._is_history_known = False
        self._leader_url: str | None = None
        # The highest fence that this box has had in a fleet.
        self.fence_seen = 0
        self._postponed: list[cmd.Command] = []
        self._waiters = Waiters()
        self._standstill = StandstillWatch()
        self._hearing = Hearing(self.now)
        self._alarm = Alarm(lambda: self.note(cmd.Tick(self._hearing.until)), self._hearing)
        self._turn = Turn(self._hearing, work_clock)
        self._readings = PendingReadings()
        self._observing: asyncio.Handle | None = None
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<Driver: {self.state!r}, {len(self._waiters)} waited for, trouble: {self.trouble}>"

    def now(self) -> float:
        """The pool's clock."""
        return self._clock_base + self._boot_clock()

    def pool_time(self, boot_s: float) -> float:
        """The time on the pool's clock at this time of the machine's boot clock."""
        return self._clock_base + boot_s

    def open(
        self,
        history: History,
        writer: Writer,
        *,
        boot_id: str,
        wall_now: float,
        epoch: int = 0,
        node: str | None = None,
    ) -> None:
        """Take charge of a pool with this history. Every lease has its full TTL. `wall_now` is the time of day, and `node`
        the present name of this machine, if it has GPUs of the pool.
        """
        state = restored(history, self.state.settings)
        self.lead(state, writer, boot_id=boot_id, wall_now=wall_now, epoch=epoch, node=node)

    def lead(
        self,
        state: PoolState,
        writer: Writer,
        *,
        boot_id: str,
        wall_now: float,
        epoch: int,
        node: str | None,
        may_act: Callable[[], bool] = _always,
    ) -> None:
        """As `open`, for a pool whose history is known already. While `may_act` says no, callers are answered as in
        trouble, and no heartbeat counts: another driver may have taken over.
        """
        boot_now = self._boot_clock()
        self._clock_base = clock_base(state, boot_id=boot_id, boot_now=boot_now, wall_now=wall_now)
        self.state = state
        self._standstill = StandstillWatch()  # a follower takes no steps
        self._node = node
        self._may_act, self._is_history_known = may_act, True
        self._postponed.clear()
        self._outbox.open(writer)
        taken = cmd.TakeOver(epoch, boot_id, self._clock_base, wall_now - self.pool_time(boot_now))
        for command in first_commands(state, taken, node, self.fence_seen):
            self._carry_out(command)

    def follow(self, state: PoolState, row: LeaderRow, events: Sequence[ev.Event], *, boot_id: str) -> None:
        """Show a pool that another driver leads, in which these events have happened. Every command is refused."""
        if state is not self.state:
            self.state = state
            base = clock_base(state, boot_id=boot_id, boot_now=self._boot_clock(), wall_now=row.wall_now)
            self._clock_base = base
        self._is_history_known = True
        if row.expires_in_s > 0:
            self._outbox.trouble, self._leader_url = f"{row.holder} leads the fleet; ask {row.url}", row.url
        else:
            self._outbox.trouble, self._leader_url = "nobody leads the fleet; ask again in a few seconds", None
        if events:
            for listener in (*self.listeners, *self.late_listeners):
                listener(events)

    def say_trouble(self, trouble: str) -> None:
        """Refuse every command with this reason, before the history is known, or while no driver is known to lead."""
        self._outbox.trouble, self._leader_url = trouble, None

    def step_down(self, trouble: str) -> None:
        """Stop leading. What is not known to be written may be written or not: the journal tells its next leader."""
        self._alarm.cancel()
        self._may_act, self._is_history_known, self._leader_url = _always, False, None
        self._postponed.clear()
        self._readings.clear()
        self._outbox.abandon(trouble)
        self._waiters.release_all()

    async def heartbeat_turn(self, ids: int, caller: Hashable) -> float:
        """Wait until a heartbeat for so many leases can be carried out, which must then be done at once; return when it
        arrived: when this was called, or while the event loop was away before that.
        """
        arrived_at = min(self.now(), self._hearing.away_since)
        await self._turn.admit(1 + ids // IDS_PER_COMMAND, caller, arrived_at)
        return arrived_at

    async def do(self, command: cmd.Command, caller: Hashable = None) -> list[ev.Event]:
        """Carry out a command and return its events once they are written. Raises NotWritten if they cannot be written,
        TooManyCalls if too many of this caller wait. A heartbeat that has its time of arrival had its `heartbeat_turn`.
        """
        if not isinstance(command, cmd.Renew):
            await self._turn.admit(1, caller)
        elif command.arrived_at is None:
            command = replace(command, arrived_at=await self.heartbeat_turn(len(command.lease_ids), caller))
        if self.trouble is not None:
            if not self.is_leading or not isinstance(command, cmd.Renew):
                raise self.not_written()
            return renew(self.state, command, self.now(), self.is_written)
        events, batch = self._carry_out(command)
        if batch is not None:
            await self._written(batch)
        if isinstance(command, cmd.RequestLease):
            await self._decided(command.lease_id)
        return events

    def note(self, command: cmd.Command) -> None:
        """Carry out a command without a caller. In trouble it is postponed, or dropped if it is a reading."""
        if self.trouble is None and isinstance(command, cmd.Observe):
            self._observe(command.readings)
        elif self.trouble is None:
            if isinstance(command, cmd.SilenceNode):
                self._readings.drop_node(command.node)  # unknown from here on
            self._carry_out(command)
        elif not isinstance(command, cmd.Observe):
            self._postponed.append(command)
        elif not self.is_open and not self.is_closed:
            # It cannot affect a lease before the history is known, and the GPUs can be shown.
            show(self.state, command, self.now())

    @property
    def trouble(self) -> str | None:
        """Why nothing can be granted or ended at present."""
        trouble = self._outbox.trouble
        return trouble if trouble is not None or self._may_act() else LEADERSHIP_UNSURE

    @property
    def is_open(self) -> bool:
        """Whether the history is known. Before that, no lease is known."""
        return self._is_history_known

    @property
    def is_in_charge(self) -> bool:
        """Whether this driver changes the pool, though it may be unsure whether it still leads."""
        return self._outbox.writer is not None

    @property
    def is_leading(self) -> bool:
        return self._outbox.writer is not None and self._may_act()

    async def find(self, lease_id: str) -> Lease | None:
        """The lease as it is written; None if it is unknown. Raises NotWritten if neither can be told."""
        if not self.is_leading:
            raise self.not_written()
        while (batch := self._outbox.batch_of(lease_id)) is not None:
            if self.trouble is not None:
                raise self.not_written()
            await self._written(batch)
        return self.state.find(lease_id)

    def not_written(self) -> NotWritten:
        if self._outbox.writer is None and self._leader_url is not None:
            return LedElsewhere(self.trouble, self._leader_url)
        return NotWritten(self.trouble, is_temporary=self.is_open)

    async def caught_up(self) -> None:
        """Wait until all events so far are written; in trouble, return at once."""
        batch = self._outbox.last_batch()
        if batch is not None and self.trouble is None:
            with suppress(NotWritten):
                await self._written(batch)

    def is_written(self, lease_id: str) -> bool:
        return self._outbox.batch_of(lease_id) is None

    async def wait_while_queued(self, lease_id: str, timeout_s: float, gone: Caller | None = None) -> None:
        """Wait until the lease has left the queue, and that is written, or as below."""
        if isinstance(self.state.leases.get(lease_id), QueuedLease):
            await self.wait_for_change((lease_id,), timeout_s, gone)

    async def wait_for_change(self, lease_ids: Sequence[str], timeout_s: float, gone: Caller | None = None) -> None:
        """Wait until one of these leases was granted, warned or has ended, and that is written, or until the timeout, or
        until the client is `gone`.
        """
        if timeout_s <= 0 or self.is_closed:
            return
        await self._waiters.wait(lease_ids, timeout_s, gone)

    def release_waiters(self) -> None:
        """End all waits with what is known so far: the driver is about to close."""
        self.is_closed = True
        self._waiters.release_all()

    def close(self) -> None:
        """Write what is left and stop. Leases stay as they are: the journal keeps them."""
        self.release_waiters()
        self._alarm.cancel()
        self._outbox.close()
        self._outbox.trouble = "the server is stopping"

    async def _written(self, batch: WriteBatch) -> None:
        caller = ShortWait()
        batch.callers.append(caller)
        await caller

    async def _decided(self, lease_id: str) -> None:
        """Wait until the queue was served with this request in it: a turn may have had no time for that."""
        while self.trouble is None and not self.is_closed and isinstance(self.state.leases.get(lease_id), QueuedLease):
            if self.state.settled_until > -inf and not self.state.newcomers:
                return
            await asyncio.sleep(0)

    def _observe(self, readings: Sequence[Reading]) -> None:
        """Take readings in, or those that this turn has no time for in the next ones. Newer readings replace those of the
        same GPUs that still wait.
        """
        if not all(reading.gpu.key in self.state.slots for reading in readings):
            # All at once: a request that only the last of them could serve must not be refused in between.
            self._readings.drop(reading.gpu.key for reading in readings)
            self._carry_out(cmd.Observe(tuple(readings)))
            return
        self._readings.add(readings)
        if self._observing is None and self._turn.is_over:
            self._observing = asyncio.get_running_loop().call_soon(self._observe_next)
        elif self._observing is None:
            self._observe_next()

    def _observe_next(self) -> None:
        self._observing = None
        if self._readings and self.trouble is None and not self.is_closed:
            self._carry_out(cmd.Observe(self._readings.take(self.state)))
            if self._readings:
                self._observing = asyncio.get_running_loop().call_soon(self._observe_next)

    def _step(self, command: cmd.Command, now: float) -> tuple[list[ev.Event], list[str]]:
        """One step within this turn; return its events, and the leases that it granted to processes which are dead."""
        heard_until = self._hearing.until
        if isinstance(command, cmd.Renew) and command.arrived_at is not None:
            heard_until = min(heard_until, command.arrived_at)
        turn = self._turn
        turn.begin_work()
        try:
            events = step(self.state, command, now, turn.passes_left, heard_until, turn.has_time)
        finally:
            turn.end_work()
        granted = [event.lease_id for event in events if isinstance(event, ev.LeaseGranted)]
        turn.passes_left -= len(granted)
        return events, list(filter(self._is_dead, granted))

    def _carry_out(self, command: cmd.Command) -> tuple[list[ev.Event], WriteBatch | None]:
        now = self.now()
        self._turn.look()
        self._alarm.look()
        events = self._wake_up(now)
        latest, dead = self._step(command, now)
        events += latest
        while dead:
            # A waiter that died while queued must not keep the GPU from the next one until its death is noticed.
            steps = [self._step(cmd.ReportDeath(lease_id), now) for lease_id in dead]
            events += [event for latest, _ in steps for event in latest]
            dead = [lease_id for _, dead in steps for lease_id in dead]
        ended = [as_ended(self.state.find(event.lease_id)) for event in events if isinstance(event, ev.LeaseEnded)]
        batch = self._outbox.add(events, list(filter(None, ended)), len(self.state.leases)) if events else None
        for listener in self.early_listeners:
            listener(events)
        if not self.is_closed:
            self._alarm.set(self.state.next_due_at(), now)
        return events, batch

    def _wake_up(self, now: float) -> list[ev.Event]:
        """After a long time in which no heartbeat could be received, every lease gets its full TTL, as after a restart."""
        found, state = self._standstill.note_step(now), self.state
        # The boxes of a fleet count the heartbeats of its leases. A leader that stood still so long leads no more.
        if found is None or not state.leases or state.boot_id is None or state.epoch > 0:
            return []
        logger.warning("this process %s and could take no heartbeat; every lease has its full TTL again", found)
        again = cmd.TakeOver(state.epoch, state.boot_id, state.clock_base, state.wall_offset_s)
        return [
            event
            for command in first_commands(state, again, self._node, self.fence_seen)
            for event in step(state, command, now)
        ]

    def _is_dead(self, lease_id: str) -> bool:
        """Whether this lease was granted to a process of this machine that runs no more."""
        lease = self.state.leases.get(lease_id)
        holder = lease.request.holder if isinstance(lease, ActiveLease) else None
        process = holder.process if holder is not None and holder.node in (None, self._node) else None
        return process is not None and not self._is_alive(process)

    def _tell(self, batch: WriteBatch) -> None:
        """Answer the callers of a batch that is written, and tell what happened."""
        waiters = self._waiters.pop_all(batch.news) if self._waiters else []
        try:
            for listener in self.listeners:
                listener(batch.news)
        finally:
            self._turn.answer(batch.callers, waiters)
        if not waiters and all(map(goes_on_at_once, batch.callers)):
            self._tell_late(batch.news)
        else:  # behind the callers, which are woken
            asyncio.get_running_loop().call_soon(self._tell_late, batch.news)

    def _tell_late(self, news: Sequence[ev.Event]) -> None:
        for listener in self.late_listeners:
            listener(news)

    def _carry_out_postponed(self) -> None:
        postponed, self._postponed = self._postponed, []
        for command in postponed:
            self._carry_out(command)
