"""The only code that changes a pool: stamps the time, decides, journals, and only then answers.

Everything here runs in the event loop's thread. A command changes the state in memory at once. Its durable events go to
the writer together with all others since the last commit, and the caller is answered after that commit. So the state is
a little ahead of the journal, and no client is shown the part that is ahead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import inf

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.node_rename import ended_on_node, event_on_node
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import ProcessId, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, Lease, QueuedLease, as_ended
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState

from .alarm import Alarm
from .hearing import Hearing
from .journal import History, JournalDamaged, JournalError, NotWritten
from .standstill import StandstillWatch
from .turn import IDS_PER_COMMAND, Turn, Waiters, in_pieces
from .writer import WriteBatch, Writer

logger = logging.getLogger(__name__)

# The time between attempts to write a failed batch.
RETRY_S = 0.5

# How long events that are not urgent wait for others.
LATE_FLUSH_S = 0.1
# These back no promise to a client: if they are lost, the next reading brings them about again.
NOT_URGENT = (ev.GpuDrained, ev.ProcessesAttributed)

EventListener = Callable[[Sequence[ev.Event]], None]


class Driver:
    """`listeners` get events in order, once they are written. `early_listeners` get them at once, for effects that are
    harmless if the events are never written (to sample GPUs again, for example). `trouble` says why the journal cannot
    be written at present. In trouble, heartbeats are still taken, because they need no write; all other commands are
    refused. `is_alive` is called at a grant to a holder whose process is on this machine.
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
        self.early_listeners: list[EventListener] = []
        self.trouble: str | None = "the journal has not been opened yet"
        self.write_listeners: list[Callable[[float], None]] = []
        self._clock = clock
        self._is_alive = is_alive
        self._writer: Writer | None = None
        self._gathering: WriteBatch | None = None
        self._in_flight: WriteBatch | None = None
        self._unwritten: dict[str, WriteBatch] = {}
        self._postponed: list[cmd.Command] = []
        self._waiters = Waiters()
        self._standstill = StandstillWatch()
        self._is_flush_due = False
        self._late_flush: asyncio.TimerHandle | None = None
        self._hearing = Hearing(clock)
        self._alarm = Alarm(self._ring, self._hearing)
        self._turn = Turn(self._hearing, work_clock)
        self._readings: deque[tuple[Reading, ...]] = deque()
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<Driver: {self.state!r}, {len(self._waiters)} waited for, trouble: {self.trouble}>"

    def now(self) -> float:
        return self._clock()

    def open(
        self, history: History, writer: Writer, *, boot_id: str, wall_offset_s: float, node: str | None = None
    ) -> None:
        """Take charge of a pool with this history. Every lease has its full TTL. `node` is the node's present name."""
        ended = {lease.id: lease if node is None else ended_on_node(node, lease) for lease in history.ended}
        state = PoolState(settings=self.state.settings, ended=ended)
        try:
            replay(state, history.events if node is None else [event_on_node(node, event) for event in history.events])
        except (KeyError, AssertionError, ValueError) as error:
            raise JournalDamaged(f"the journal's events contradict each other ({error!r})") from error
        self.state = state
        self._writer = writer
        self.trouble = None
        self._carry_out(cmd.Open(boot_id, wall_offset_s))

    async def heartbeat_turn(self, ids: int, caller: Hashable) -> float:
        """Wait until a heartbeat for so many leases can be carried out, which must then be done at once; return when it
        arrived: when this was called, or while the event loop was away before that.
        """
        arrived_at = min(self._clock(), self._hearing.away_since)
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
            return self._do_in_trouble(command)
        events, batch = self._carry_out(command)
        if batch is not None:
            await self._written(batch)
        if isinstance(command, cmd.RequestLease):
            await self._decided(command.lease_id)
        return events

    def note(self, command: cmd.Command) -> None:
        """Carry out a command without a caller. In trouble it is postponed, or dropped if it is a reading."""
        if self.trouble is None and isinstance(command, cmd.Observe) and self.state.has_been_observed:
            self._observe(command.readings)
        elif self.trouble is None:
            self._carry_out(command)
        elif not isinstance(command, cmd.Observe):
            self._postponed.append(command)
        elif not self.is_open and not self.is_closed:
            # It cannot affect a lease before the history is known, and the GPUs can be shown.
            replay(self.state, decide(self.state, command, self._clock()))

    @property
    def is_open(self) -> bool:
        """Whether the history is known. Before that, no lease is known."""
        return self._writer is not None

    async def find(self, lease_id: str) -> Lease | None:
        """The lease as it is written; None if it is unknown. Raises NotWritten if neither can be told."""
        if not self.is_open:
            raise self.not_written()
        while (batch := self._unwritten.get(lease_id)) is not None:
            if self.trouble is not None:
                raise self.not_written()
            await asyncio.shield(batch.written)
        return self.state.find(lease_id)

    def not_written(self) -> NotWritten:
        return NotWritten(self.trouble, is_temporary=self.is_open)

    async def caught_up(self) -> None:
        """Wait until all events so far are written; in trouble, return at once."""
        batch = self._gathering if self._gathering is not None and self._gathering.is_urgent else self._in_flight
        if batch is not None and self.trouble is None:
            await asyncio.wait([batch.written])

    def is_written(self, lease_id: str) -> bool:
        return lease_id not in self._unwritten

    async def wait_while_queued(self, lease_id: str, timeout_s: float) -> None:
        """Wait until the lease has left the queue, and that is written, or until the timeout."""
        if isinstance(self.state.leases.get(lease_id), QueuedLease):
            await self.wait_for_change((lease_id,), timeout_s)

    async def wait_for_change(self, lease_ids: Sequence[str], timeout_s: float) -> None:
        """Wait until one of these leases was granted, warned or has ended, and that is written, or until the timeout."""
        if timeout_s <= 0 or self.is_closed:
            return
        await self._waiters.wait(lease_ids, timeout_s)

    def release_waiters(self) -> None:
        """End all waits with what is known so far: the driver is about to close."""
        self.is_closed = True
        self._waiters.release_all()

    def close(self) -> None:
        """Write what is left and stop. Leases stay as they are: the journal keeps them."""
        self.release_waiters()
        self._alarm.cancel()
        if self._late_flush is not None:
            self._late_flush.cancel()
        if self._writer is not None:
            batch, self._gathering = self._gathering, None
            if batch is not None and batch.events and self.trouble is None:
                self._writer.write(batch, lambda *_: None)
            self._writer.close()
            self._writer = None
        self.trouble = "the server is stopping"

    async def _written(self, batch: WriteBatch) -> None:
        caller = asyncio.get_running_loop().create_future()
        batch.callers.append(caller)
        await caller

    async def _decided(self, lease_id: str) -> None:
        """Wait until the queue was served with this request in it: a turn may have had no time for that."""
        while self.trouble is None and not self.is_closed and isinstance(self.state.leases.get(lease_id), QueuedLease):
            if self.state.settled_until > -inf and not self.state.newcomers:
                return
            await asyncio.sleep(0)

    def _observe(self, readings: tuple[Reading, ...]) -> None:
        """Take in readings piece by piece; newer ones replace those that still wait."""
        self._readings = deque(in_pieces(self.state, readings))
        self._observe_next()

    def _observe_next(self) -> None:
        if self._readings and self.trouble is None and not self.is_closed:
            self._carry_out(cmd.Observe(self._readings.popleft()))
            if self._readings:
                asyncio.get_running_loop().call_soon(self._observe_next)

    def _step(self, command: cmd.Command, now: float) -> list[ev.Event]:
        """One step, with the passes over the queue that this turn has left."""
        heard_until = self._hearing.until
        if isinstance(command, cmd.Renew) and command.arrived_at is not None:
            heard_until = min(heard_until, command.arrived_at)
        with self._turn.work():
            events = step(self.state, command, now, self._turn.passes_left, heard_until, self._turn.has_time)
        self._turn.passes_left -= sum(isinstance(event, ev.LeaseGranted) for event in events)
        return events

    def _carry_out(self, command: cmd.Command) -> tuple[list[ev.Event], WriteBatch | None]:
        now = self._clock()
        self._turn.look()
        self._alarm.look()
        events = self._wake_up(now)
        latest = self._step(command, now)
        events += latest
        while dead := self._dead_among(latest):
            # A waiter that died while queued must not keep the GPU from the next one until its death is noticed.
            latest = [event for id_ in dead for event in self._step(cmd.ReportDeath(id_), now)]
            events += latest
        batch = self._gather(events) if events else None
        for listener in self.early_listeners:
            listener(events)
        if not self.is_closed:
            self._alarm.set(self.state.next_due_at(), now)
        return events, batch

    def _wake_up(self, now: float) -> list[ev.Event]:
        """After a long time in which no heartbeat could be received, every lease gets its full TTL, as after a restart."""
        found, state = self._standstill.note_step(now), self.state
        if found is None or not state.leases or state.boot_id is None:
            return []
        logger.warning("this process %s and could take no heartbeat; every lease has its full TTL again", found)
        return step(state, cmd.Open(state.boot_id, state.wall_offset_s), now)

    def _dead_among(self, events: list[ev.Event]) -> list[str]:
        dead = []
        for event in events:
            if isinstance(event, ev.LeaseGranted):
                lease = self.state.leases.get(event.lease_id)
                process = lease.request.holder.process if isinstance(lease, ActiveLease) else None
                if process is not None and not self._is_alive(process):
                    dead.append(event.lease_id)
        return dead

    def _do_in_trouble(self, command: cmd.Command) -> list[ev.Event]:
        """Take heartbeats, so that no holder loses a GPU because of a full disk. Nothing is ended or granted."""
        if not self.is_open or not isinstance(command, cmd.Renew):
            raise self.not_written()
        now = self._clock()
        # A lease that is not written is not known to its client, so it cannot be renewed.
        known = replace(command, lease_ids=tuple(filter(self.is_written, command.lease_ids)))
        events = decide(self.state, known, now)
        replay(self.state, events)
        return events + [
            ev.LeaseUnknown(now, lease_id) for lease_id in command.lease_ids if not self.is_written(lease_id)
        ]

    def _gather(self, events: list[ev.Event]) -> WriteBatch | None:
        """Queue these for writing; return the batch to wait for before a client is told, if there is one."""
        if self._gathering is None:
            self._gathering = WriteBatch(asyncio.get_running_loop().create_future())
        batch = self._gathering
        batch.news += events
        must_wait = False
        for event in events:
            if isinstance(event, ev.DurableEvent):
                batch.events.append(event)
                if not isinstance(event, NOT_URGENT):
                    batch.is_urgent = must_wait = True
                    lease_id = getattr(event, "lease_id", None)
                    if lease_id is not None:
                        self._unwritten[lease_id] = batch
            if isinstance(event, ev.LeaseEnded) and (ended := as_ended(self.state.find(event.lease_id))):
                batch.ended.append(ended)
        if not self._is_flush_due:
            # At the end of this turn of the loop, so that all requests of one turn share a commit.
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)
        return batch if must_wait else None

    def _flush_late(self) -> None:
        self._late_flush = None
        if self._gathering is not None:
            self._gathering.is_urgent = True
            self._flush()

    def _ring(self) -> None:
        self.note(cmd.Tick(self._hearing.until))

    def _flush(self) -> None:
        self._is_flush_due = False
        batch = self._gathering
        if batch is None or self._in_flight is not None or self._writer is None or self.trouble is not None:
            return
        if batch.events and not batch.is_urgent:
            if self._late_flush is None:
                self._late_flush = asyncio.get_running_loop().call_later(LATE_FLUSH_S, self._flush_late)
            return
        self._gathering = None
        if not batch.events:
            self._finish(batch)
            return
        if self._writer.is_compaction_due(len(self.state.leases)):
            batch.snapshot = condense(self.state)
        self._in_flight = batch
        self._writer.write(batch, self._done)

    def _done(self, batch: WriteBatch, error: JournalError | None) -> None:
        self._in_flight = None
        if error is None:
            for listener in self.write_listeners:
                listener(batch.write_s)
            if self.trouble is not None:
                logger.warning("the journal can be written again")
                self.trouble = None
            self._finish(batch)
            self._catch_up()
        else:
            self._run_into_trouble(batch, error)

    def _finish(self, batch: WriteBatch) -> None:
        for lease_id in [id_ for id_, last in self._unwritten.items() if last is batch]:
            del self._unwritten[lease_id]
        if not batch.written.done():
            batch.written.set_result(None)
        for event in batch.news:
            if isinstance(event, ev.LeaseGranted | ev.LeaseWarned | ev.LeaseEnded):
                batch.callers += self._waiters.pop(event.lease_id)
        self._turn.answer(batch.callers)
        for listener in self.listeners:
            listener(batch.news)

    def _catch_up(self) -> None:
        postponed, self._postponed = self._postponed, []
        for command in postponed:
            self._carry_out(command)
        self._flush()

    def _run_into_trouble(self, batch: WriteBatch, error: JournalError) -> None:
        """Keep this batch and what came after it, and try again. No client is told of either."""
        if self.trouble is None:
            logger.error("nothing can be granted: %s", error)
        self.trouble = str(error)
        later, self._gathering = self._gathering, None
        for failed in filter(None, (batch, later)):
            for caller in (failed.written, *failed.callers):
                if not caller.done():
                    caller.set_exception(NotWritten(self.trouble))
                    caller.exception()  # retrieved: the caller may be gone
        again = batch.with_later(later)
        for lease_id in self._unwritten:
            self._unwritten[lease_id] = again
        if isinstance(error, JournalDamaged):
            # The state in memory still has all of it.
            again.snapshot = condense(self.state)
            again.replaces_damaged = True
        self._in_flight = again
        asyncio.get_running_loop().call_later(RETRY_S, self._try_again, again)

    def _try_again(self, batch: WriteBatch) -> None:
        if self._writer is not None:
            self._writer.write(batch, self._done)
