"""The only code that changes a pool: stamps the time, decides, journals, and only then answers.

Everything here runs in the event loop's thread. A command changes the state in memory at once. Its durable events go to
the writer together with all others since the last commit, and the caller is answered after that commit. So the state is
a little ahead of the journal, and no client is shown the part that is ahead.

The work of one turn of the loop is bounded: while it lasts, no socket is read and no caller is answered. What does not fit
waits for the next turns, first come, first served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from math import inf

from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.fleet.leadership import clock_base
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason, Lease, QueuedLease
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState

from .journal import History, JournalDamaged, NotWritten
from .loop import Caller, LiveTime, Waiters
from .outbox import Answer, Outbox, WriteBatch, Writer

logger = logging.getLogger(__name__)

LEADERSHIP_UNSURE = "it is not sure that this server still leads the fleet; it is found out within a few seconds"
# A wall clock that is off by more than this was set.
WALL_CLOCK_SET_S = 1.0
# Time that was lost is worth a word from here on.
LONG_AWAY_S = 4.0
# The processor time of one turn. The last command of it, or pass over the queue, may take longer.
TURN_S = 0.005
# No honest caller has as many calls waiting; more would cost memory, and only wait for each other.
MOST_OF_ONE_CALLER = 1000

EventListener = Callable[[Sequence[ev.Event]], None]


class TooManyCalls(Exception):  # noqa: N818 - a state, not a mistake
    """A caller has as many calls waiting as it may."""


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


class Driver:
    """`listeners` get events in order, once they are written, and before a caller is answered. `late_listeners` get them after
    those callers: they only show what happened. `early_listeners` get them at once, for effects that are harmless if the
    events are never written (to sample GPUs again, for example).

    `is_open` says whether the history is known, and so are leases. `clock` is the machine's boot clock, which counts the time
    while the machine sleeps; the pool's is ahead of it by `clock_base`. `work_clock` is the processor time of this thread.
    `is_alive` is called at a grant to a holder whose process is on this machine.
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
        self.outbox = Outbox(self._tell)
        self.is_open = self.is_closed = False
        self.clock_base = 0.0
        # The highest fence that this box has had in a fleet.
        self.fence_seen = 0
        self._boot_clock = clock
        self._wall_clock: Callable[[], float] = time.time
        self._node = ""
        self._is_alive = is_alive
        self._may_act: Callable[[], bool] = lambda: True
        self._leader_url: str | None = None
        self._live = LiveTime(clock, self._lose, self._tick)
        self._waiters = Waiters()
        # Commands that wait for a turn, or for the end of a trouble: those without a caller, and the calls.
        self._noted: deque[cmd.Command] = deque()
        self._calls: deque[tuple[cmd.Command, Hashable, Answer]] = deque()
        self._calls_of: Counter[Hashable] = Counter()
        # Set if every request so far was considered: a turn may have had no time for that.
        self._is_settled = asyncio.Event()
        self._work_clock = work_clock
        self._turn_ends = inf

    def __repr__(self) -> str:
        return f"<Driver: {self.state!r}, {len(self._waiters)} waited for, trouble: {self.trouble}>"

    def now(self) -> float:
        """The pool's clock."""
        return self.clock_base + self._boot_clock()

    def lead(
        self,
        state: PoolState,
        writer: Writer,
        *,
        boot_id: str,
        wall_clock: Callable[[], float],
        epoch: int = 0,
        node: str | None = None,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take charge of a pool. Every lease has its full TTL. `wall_clock` tells the time of day, and `node` is the present
        name of this machine, if it has GPUs of the pool. While `may_act` says no, callers are answered as in trouble, and no
        heartbeat counts: another driver may have taken over.
        """
        wall_now = wall_clock()
        self.clock_base = clock_base(state, boot_id=boot_id, boot_now=self._boot_clock(), wall_now=wall_now)
        self.state, self._node, self._wall_clock = state, node or "", wall_clock
        self._may_act, self.is_open, self._leader_url = may_act, True, None
        self._noted.clear()
        self.outbox.open(writer, state)
        self._live.start()
        self._carry_out(cmd.TakeOver(epoch, boot_id, self.clock_base, wall_now - self.now()))
        if node is not None:
            self._carry_out(cmd.AnnounceNode(node, boot_id, fence_seen=self.fence_seen))

    def follow(self, state: PoolState, events: Sequence[ev.Event], *, boot_id: str, wall_now: float) -> None:
        """Show a pool that another driver leads, in which these events have happened. `say_trouble` says who leads."""
        if state is not self.state:
            self.clock_base = clock_base(state, boot_id=boot_id, boot_now=self._boot_clock(), wall_now=wall_now)
        self.state, self.is_open = state, True
        if events:
            for listener in (*self.listeners, *self.late_listeners):
                listener(events)

    def say_trouble(self, trouble: str, leader_url: str | None = None) -> None:
        """Refuse every command with this reason: the history is not known, or another driver leads, or none is known to."""
        self.outbox.trouble, self._leader_url = trouble, leader_url

    def step_down(self, trouble: str) -> None:
        """Stop leading. What is not known to be written may be written or not: the journal tells its next leader."""
        self._live.stop()
        self.is_open = False
        self.outbox.abandon(trouble)
        self._waiters.release_all()
        self._is_settled.set()

    async def do(self, command: cmd.Command, caller: Hashable = None) -> list[ev.Event]:
        """Carry out a command, and return its events once they are written; NotWritten or TooManyCalls if that is not to be."""
        answer: Answer = asyncio.get_running_loop().create_future()
        if self._calls or not self._has_time():
            if self._calls_of[caller] >= MOST_OF_ONE_CALLER:
                most = f"{MOST_OF_ONE_CALLER} calls of this caller wait for their turn already"
                raise TooManyCalls(f"{most}, which is the limit; ask again later.")
            self._calls_of[caller] += 1
            self._calls.append((command, caller, answer))
        else:
            self._begin(command, answer)
        events = await answer
        if isinstance(command, cmd.RequestLease) and self._is_queued(command.lease_id):
            await self._is_settled.wait()
        return events

    def note(self, command: cmd.Command) -> None:
        """Carry out a command without a caller, after those before it. In trouble it waits, or is dropped if it is a reading."""
        if self.trouble is None or not isinstance(command, cmd.Observe):
            self._noted.append(command)
            self._carry_out_noted()
        elif not self.is_open and not self.is_closed:
            # It cannot affect a lease before the history is known, and the GPUs can be shown.
            for node in sorted({reading.gpu.key.node for reading in command.readings}):
                replay(self.state, decide(self.state, cmd.AnnounceNode(node, ""), self.now()))
            replay(self.state, decide(self.state, command, self.now()))

    @property
    def trouble(self) -> str | None:
        """Why nothing can be granted or ended at present. Then only heartbeats are taken, because they need no write."""
        return self.outbox.trouble or (None if self._may_act() else LEADERSHIP_UNSURE)

    @property
    def is_in_charge(self) -> bool:
        """Whether this driver changes the pool, though it may be unsure whether it still leads."""
        return self.outbox.writer is not None

    @property
    def is_leading(self) -> bool:
        return self.is_in_charge and self._may_act()

    def not_written(self) -> NotWritten:
        return NotWritten(self.trouble, is_temporary=self.is_open, leader_url=self._leader_url)

    async def find(self, lease_id: str) -> Lease | None:
        """The lease as it is written; None if it is unknown. Raises NotWritten if neither can be told."""
        if not self.is_leading:
            raise self.not_written()
        while (batch := self.outbox.batch_of(lease_id)) is not None:
            if self.trouble is not None:
                raise self.not_written()
            await self._written(batch)
        return self.state.find(lease_id)

    async def caught_up(self) -> None:
        """Wait until all events so far are written; in trouble, return at once."""
        if self.trouble is None and (batch := self.outbox.batch_of(None)) is not None:
            with suppress(NotWritten):
                await self._written(batch)

    async def wait_while_queued(self, lease_id: str, timeout_s: float, gone: Caller | None = None) -> None:
        """Wait until the lease has left the queue, or as below. A grant that has to be taken up is told before it is written:
        its client only hears that it should call again, and that call waits for the journal.
        """
        if self._is_queued(lease_id):
            await self.wait_for_change((lease_id,), timeout_s, gone)

    async def wait_for_change(self, lease_ids: Sequence[str], timeout_s: float, gone: Caller | None = None) -> None:
        """Wait until one of these leases was granted, warned or has ended, and that is written, or until the timeout, or
        until the client is `gone`.
        """
        if timeout_s > 0 and not self.is_closed:
            await self._waiters.wait(lease_ids, timeout_s, gone)

    def release_waiters(self) -> None:
        """End all waits with what is known so far: the driver is about to close."""
        self.is_closed = True
        self._waiters.release_all()
        self._is_settled.set()

    def close(self) -> None:
        """Write what is left and stop. Leases stay as they are: the journal keeps them."""
        self.release_waiters()
        self._live.stop()
        self.outbox.close()

    async def _written(self, batch: WriteBatch) -> None:
        caller: Answer = asyncio.get_running_loop().create_future()
        batch.callers[caller] = []
        await caller

    def _is_queued(self, lease_id: str) -> bool:
        return isinstance(self.state.leases.get(lease_id), QueuedLease)

    def _begin(self, command: cmd.Command, answer: Answer) -> None:
        """Carry out the command of a call, which is answered once that is written."""
        self._begin_turn()
        try:
            carry_out = self._carry_out if self.trouble is None else self._renew_unwritten
            events, batch = carry_out(command)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            answer.set_exception(error)
        else:
            if batch is None:
                answer.set_result(events)
            else:
                batch.callers[answer] = events

    def _renew_unwritten(self, command: cmd.Command) -> tuple[list[ev.Event], None]:
        """Take a heartbeat while the journal cannot be written, so that no holder loses a GPU because of a full disk. A lease
        whose request is not written is not known to its client, so it cannot be renewed. All other commands are NotWritten.
        """
        if not self.is_leading or not isinstance(command, cmd.Renew):
            raise self.not_written()
        self._live.look()
        now = self.now()
        unwritten = self.outbox.begun_or_ended()
        unknown = [id_ for id_ in command.lease_ids if id_ in unwritten]
        events = decide(self.state, cmd.Renew(tuple(id_ for id_ in command.lease_ids if id_ not in unknown)), now)
        replay(self.state, events)
        return events + [ev.Refused(now, ev.RefusalCode.UNKNOWN_LEASE, id_) for id_ in unknown], None

    def _begin_turn(self) -> None:
        """Begin to measure what this turn of the loop does, if that was not begun."""
        if self._turn_ends == inf:
            self._turn_ends = self._work_clock() + TURN_S
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _has_time(self) -> bool:
        return self._work_clock() < self._turn_ends

    def _end_turn(self) -> None:
        """Do what the turn before had no time for, and write what both did in one commit."""
        self._turn_ends = inf
        self._carry_out_noted()
        while self._calls and self._has_time():
            command, caller, answer = self._calls.popleft()
            self._calls_of[caller] -= 1
            if not answer.done():  # else the caller has left
                self._begin(command, answer)
        if not self._calls:
            self._calls_of.clear()
        self.outbox.flush()

    def _carry_out_noted(self) -> None:
        while self._noted and self.trouble is None and self._has_time():
            self._carry_out(self._noted.popleft())

    def _tick(self) -> None:
        """The ticker rings: something may be due though no command comes."""
        if self.trouble is not None:
            self._is_settled.set()  # none is considered any more
            return
        wall_offset_s = self._wall_clock() - self.now()
        if abs(wall_offset_s - self.state.wall_offset_s) > WALL_CLOCK_SET_S:
            logger.warning("the wall clock was set by %+.1f s", wall_offset_s - self.state.wall_offset_s)
            self._carry_out(cmd.SetWallTime(wall_offset_s))
        self._carry_out(cmd.Tick())
        self.outbox.hurry()

    def _lose(self, lost_s: float) -> None:
        """Let no lease run in the time in which no heartbeat could be read."""
        if lost_s >= LONG_AWAY_S and self.state.leases:
            logger.warning(
                "this process was stopped or busy, or its machine slept, and took no heartbeat for %.1f s, which do not "
                "count for any lease",
                lost_s,
            )
        step(self.state, cmd.LoseTime(lost_s), self.now(), lambda: False)

    def _carry_out(self, command: cmd.Command) -> tuple[list[ev.Event], WriteBatch | None]:
        """Carry out a command; return its events, and the batch with them if a client must wait for it."""
        self._live.look()
        self._begin_turn()
        now, commands, events = self.now(), [command], list[ev.Event]()
        for each in commands:
            happened = step(self.state, each, now, self._has_time)
            events += happened
            # A waiter that died while queued must not keep the GPU from the next one until its death is noticed.
            granted = [event.lease_id for event in happened if isinstance(event, ev.LeaseGranted)]
            commands += [
                cmd.EndLease(lease_id, EndReason.HOLDER_DIED) for lease_id in granted if self._is_dead(lease_id)
            ]
        found = [self.state.find(event.lease_id) for event in events if isinstance(event, ev.LeaseEnded)]
        batch = self.outbox.add(events, [lease.record for lease in found if isinstance(lease, EndedLease)])
        for listener in self.early_listeners:
            listener(events)
        for event in events:
            if isinstance(event, ev.LeaseGranted) and event.take_up_s is not None:
                self._waiters.tell(event.lease_id)
        self._live.ring_at(self.state.next_due_at())
        if self.state.settled_until > -inf:
            self._is_settled.set()
        else:
            self._is_settled.clear()
        return events, batch

    def _is_dead(self, lease_id: str) -> bool:
        """Whether this lease was granted to a process of this machine that runs no more."""
        lease = self.state.leases.get(lease_id)
        process = lease.request.holder.process_on(self._node) if isinstance(lease, ActiveLease) else None
        return process is not None and not self._is_alive(process)

    def _tell(self, batch: WriteBatch) -> None:
        """Answer the callers of a batch that is written, and tell what happened."""
        try:
            for listener in self.listeners:
                listener(batch.news)
        finally:
            # Waiters first: their GPUs stand still until they know of the grant.
            for event in batch.news:
                if isinstance(event, ev.LeaseGranted | ev.LeaseWarned | ev.LeaseEnded):
                    self._waiters.tell(event.lease_id)
            for caller, answer in batch.callers.items():
                if not caller.done():
                    caller.set_result(answer)
            self._carry_out_noted()
        asyncio.get_running_loop().call_soon(self._tell_late, batch.news)  # behind the callers, which are woken

    def _tell_late(self, news: Sequence[ev.Event]) -> None:
        for listener in self.late_listeners:
            listener(news)
