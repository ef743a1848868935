"""The only code that changes a pool: stamps the time, decides, journals, and only then answers.

Everything here runs in the event loop's thread. A command changes the state in memory at once. Its durable events go to
the writer together with all others since the last commit, and the caller is answered after that commit. So the state is
a little ahead of the journal, and no client is shown the part that is ahead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from math import inf

from gpu_worker_pool.core.decider.condense import Condensed
from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.fleet.clock import clock_base
from gpu_worker_pool.core.fleet.leadership import LeaderRow
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, Lease, QueuedLease
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState

from .journal import History, JournalDamaged, LedElsewhere, NotWritten
from .live_time import LiveTime
from .loop_budget import LoopBudget, WaitingCall, WaitingCalls
from .outbox import Outbox
from .waiters import Caller, Waiters
from .writer import WriteBatch, Writer

logger = logging.getLogger(__name__)

LEADERSHIP_UNSURE = "it is not sure that this server still leads the fleet; it is found out within a few seconds"
# A wall clock that is off by more than this was set.
WALL_CLOCK_SET_S = 1.0
# Time that was lost is worth a word from here on.
LONG_AWAY_S = 4.0

EventListener = Callable[[Sequence[ev.Event]], None]


def _always() -> bool:
    return True


def restore(state: PoolState, events: Iterable[ev.DurableEvent]) -> None:
    """Apply the events of a journal. JournalDamaged if they contradict each other."""
    try:
        replay(state, events)
    except (KeyError, AssertionError, ValueError) as error:
        raise JournalDamaged(f"the journal's events contradict each other ({error!r})") from error


def restored(history: History, settings: PoolSettings) -> PoolState:
    """The pool that this history adds up to."""
    state = PoolState(settings=settings, ended=OrderedDict((lease.id, lease) for lease in history.ended))
    restore(state, history.events)
    return state


def _wake(callers: Iterable[Caller]) -> None:
    for caller in callers:
        if not caller.done():
            caller.set_result(None)


class Driver:
    """`listeners` get events in order, once they are written, and before a caller is answered. `late_listeners` get them in
    the same turn of the event loop, after those callers: they only show what happened. `early_listeners` get them at once, for effects that are
    harmless if the events are never written (to sample GPUs again, for example). `trouble` says why the journal cannot
    be written at present. In trouble, heartbeats are still taken, because they need no write; all other commands are
    refused. `clock` is the machine's boot clock, which counts the time while the machine sleeps. `is_alive` is called at
    a grant to a holder whose process is on this machine.
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
        self._wall_clock: Callable[[], float] = time.time
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
        self._live = LiveTime(clock, self._lose, self._tick)
        self._budget = LoopBudget(self._go_on, work_clock)
        self._calls = WaitingCalls()
        # Callers whose requests were not considered yet: their turn had no time for that.
        self._undecided: list[Caller] = []
        # Readings that wait for a turn: one turn has no time for those of a whole fleet.
        self._readings: list[cmd.Observe] = []
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
        wall_clock: Callable[[], float],
        epoch: int = 0,
        node: str | None = None,
    ) -> None:
        """Take charge of a pool with this history. Every lease has its full TTL. `wall_clock` tells the time of day, and
        `node` is the present name of this machine, if it has GPUs of the pool.
        """
        state = restored(history, self.state.settings)
        self.lead(state, writer, boot_id=boot_id, wall_clock=wall_clock, epoch=epoch, node=node)

    def lead(
        self,
        state: PoolState,
        writer: Writer,
        *,
        boot_id: str,
        wall_clock: Callable[[], float],
        epoch: int,
        node: str | None,
        may_act: Callable[[], bool] = _always,
    ) -> None:
        """As `open`, for a pool whose history is known already. While `may_act` says no, callers are answered as in
        trouble, and no heartbeat counts: another driver may have taken over.
        """
        boot_now, wall_now = self._boot_clock(), wall_clock()
        self._clock_base = clock_base(state, boot_id=boot_id, boot_now=boot_now, wall_now=wall_now)
        self.state = state
        self._node, self._wall_clock = node, wall_clock
        self._may_act, self._is_history_known = may_act, True
        self._postponed.clear()
        self._outbox.open(writer)
        self._live.start()
        self._carry_out(cmd.TakeOver(epoch, boot_id, self._clock_base, wall_now - self.pool_time(boot_now)))
        if node is not None:
            self._carry_out(cmd.AnnounceNode(node, boot_id, fence_seen=self.fence_seen))

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
        self._live.stop()
        self._may_act, self._is_history_known, self._leader_url = _always, False, None
        self._postponed.clear()
        self._readings.clear()
        self._outbox.abandon(trouble)
        self._waiters.release_all()
        self._wake_undecided()

    async def do(self, command: cmd.Command, caller: Hashable = None) -> list[ev.Event]:
        """Carry out a command and return its events once they are written. Raises NotWritten if they cannot be written,
        TooManyCalls if too many of this caller wait.
        """
        call = WaitingCall(command, caller)
        if self._calls or self._budget.is_spent:
            self._calls.join(call)
            self._budget.count()
        else:
            self._begin(call)
        await call.done
        if isinstance(command, cmd.RequestLease):
            while not self._is_decided(command.lease_id):
                self._undecided.append(asyncio.get_running_loop().create_future())
                await self._undecided[-1]
        return call.events

    def note(self, command: cmd.Command) -> None:
        """Carry out a command without a caller. In trouble it is postponed, or dropped if it is a reading."""
        if self.trouble is None and isinstance(command, cmd.Observe) and self._budget.is_spent:
            self._readings.append(command)
        elif self.trouble is None:
            if isinstance(command, cmd.SilenceNode):  # what it told is unknown from here on
                nodes = [{reading.gpu.key.node for reading in each.readings} for each in self._readings]
                self._readings = [
                    each for each, of in zip(self._readings, nodes, strict=True) if command.node not in of
                ]
            self._carry_out(command)
        elif not isinstance(command, cmd.Observe):
            self._postponed.append(command)
        elif not self.is_open and not self.is_closed:
            # It cannot affect a lease before the history is known, and the GPUs can be shown.
            for node in sorted({reading.gpu.key.node for reading in command.readings}):
                replay(self.state, decide(self.state, cmd.AnnounceNode(node, ""), self.now()))
            replay(self.state, decide(self.state, command, self.now()))

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
        self._wake_undecided()

    def close(self) -> None:
        """Write what is left and stop. Leases stay as they are: the journal keeps them."""
        self.release_waiters()
        self._live.stop()
        self._outbox.close()
        self._outbox.trouble = "the server is stopping"

    async def _written(self, batch: WriteBatch) -> None:
        caller: Caller = asyncio.get_running_loop().create_future()
        batch.callers.append(caller)
        await caller

    def _is_decided(self, lease_id: str) -> bool:
        """Whether the queue was served with this request in it: a turn may have had no time for that."""
        is_over = self.trouble is not None or self.is_closed
        return is_over or self._is_settled or not isinstance(self.state.leases.get(lease_id), QueuedLease)

    @property
    def _is_settled(self) -> bool:
        return self.state.settled_until > -inf

    def _wake_undecided(self) -> None:
        callers, self._undecided = self._undecided, []
        _wake(callers)

    def _begin(self, call: WaitingCall) -> None:
        """Carry out the command of a call, which is answered once that is written."""
        self._budget.commands_left -= 1
        self._budget.count()
        try:
            if self.trouble is not None:
                call.events, batch = self._renew_unwritten(call.command), None
            else:
                call.events, batch = self._carry_out(call.command)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            call.done.set_exception(error)
            return
        if batch is None:
            call.done.set_result(None)
        else:
            batch.callers.append(call.done)

    def _renew_unwritten(self, command: cmd.Command) -> list[ev.Event]:
        """Take a heartbeat while the journal cannot be written, so that no holder loses a GPU because of a full disk. A lease
        that is not written is not known to its client, so it cannot be renewed. All other commands are NotWritten.
        """
        if not self.is_leading or not isinstance(command, cmd.Renew):
            raise self.not_written()
        self._live.look()
        now = self.now()
        written = tuple(filter(self.is_written, command.lease_ids))
        events = decide(self.state, cmd.Renew(written), now)
        replay(self.state, events)
        unknown = [id_ for id_ in command.lease_ids if not self.is_written(id_)]
        return events + [ev.Refused(now, ev.RefusalCode.UNKNOWN_LEASE, id_) for id_ in unknown]

    def _go_on(self) -> None:
        """Do what the turn before had no time for."""
        readings, self._readings = self._readings, []
        for command in readings:
            self.note(command)
        while self._calls and not self._budget.is_spent:
            call = self._calls.pop()
            if not call.done.done():  # else the caller has left
                self._begin(call)
        if self._calls or self._readings:
            self._budget.count()

    def _tick(self) -> None:
        """The ticker rings: something may be due though no command comes."""
        if self.trouble is not None:
            self._wake_undecided()
            return
        wall_offset_s = self._wall_clock() - self.now()
        if abs(wall_offset_s - self.state.wall_offset_s) > WALL_CLOCK_SET_S:
            logger.warning("the wall clock was set by %+.1f s", wall_offset_s - self.state.wall_offset_s)
            self._carry_out(cmd.SetWallTime(wall_offset_s))
        self._carry_out(cmd.Tick())

    def _lose(self, lost_s: float) -> None:
        """Let no lease run in the time in which no heartbeat could be read."""
        if lost_s >= LONG_AWAY_S and self.state.leases:
            logger.warning(
                "this process was stopped or busy, or its machine slept, and took no heartbeat for %.1f s, which do not "
                "count for any lease",
                lost_s,
            )
        step(self.state, cmd.LoseTime(lost_s), self.now(), most_passes=0)

    def _step(self, command: cmd.Command, now: float) -> tuple[list[ev.Event], list[str]]:
        """One step within this turn; return its events, and the leases that it granted to processes which are dead."""
        budget = self._budget
        with budget.work():
            events = step(self.state, command, now, budget.passes_left, budget.has_time)
        granted = [event.lease_id for event in events if isinstance(event, ev.LeaseGranted)]
        budget.passes_left -= len(granted)
        return events, list(filter(self._is_dead, granted))

    def _carry_out(self, command: cmd.Command) -> tuple[list[ev.Event], WriteBatch | None]:
        self._live.look()
        now = self.now()
        events, dead = self._step(command, now)
        while dead:
            # A waiter that died while queued must not keep the GPU from the next one until its death is noticed.
            steps = [self._step(cmd.ReportDeath(lease_id), now) for lease_id in dead]
            events += [event for latest, _ in steps for event in latest]
            dead = [lease_id for _, dead in steps for lease_id in dead]
        found = [self.state.find(event.lease_id) for event in events if isinstance(event, ev.LeaseEnded)]
        ended = [lease.record for lease in found if isinstance(lease, EndedLease)]
        batch = self._outbox.add(events, ended, len(self.state.leases)) if events else None
        for listener in self.early_listeners:
            listener(events)
        self._live.ring_at(self.state.next_due_at())
        if self._undecided and self._is_settled:
            self._wake_undecided()
        return events, batch

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
            # Waiters first: their GPUs stand still until they know of the grant.
            _wake([*waiters, *batch.callers])
        asyncio.get_running_loop().call_soon(self._tell_late, batch.news)  # behind the callers, which are woken

    def _tell_late(self, news: Sequence[ev.Event]) -> None:
        for listener in self.late_listeners:
            listener(news)

    def _carry_out_postponed(self) -> None:
        postponed, self._postponed = self._postponed, []
        for command in postponed:
            self._carry_out(command)
