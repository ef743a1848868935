"""A candidate in the simulation: the thin driver around election, following and the core, with callbacks in virtual time.

It does what the server's driver does, in the same order: it asks the database, steps the pool, appends, and answers callers
only once the append is written and while it may act.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, assert_never

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.fleet.election import (
    ClaimLeadership,
    Election,
    ElectionAction,
    ElectionPace,
    HandOverLeadership,
    LeadershipLost,
    LeadershipWon,
    ReadLeader,
    RenewLeadership,
)
from gpu_worker_pool.core.fleet.following import MOST_AT_ONCE, Following
from gpu_worker_pool.core.fleet.leadership import (
    Append,
    Deposed,
    JournalEnd,
    JournalSnapshot,
    LeaderRow,
    StoredEvent,
    clock_base,
    has_lost_commits,
    judge_append,
    why_lost,
)
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from tests.fleet.batch import Answer, Batch
from tests.fleet.simulated_leader import SimulatedLeader
from tests.fleet.simulated_process import SimulatedProcess

if TYPE_CHECKING:
    from tests.fleet.simulated_world import World

# Some clients that wait call again in time, and some do not.
SETTINGS = PoolSettings(take_up_s=0.6)
SNAPSHOT_EVERY = 8


class SimulatedCandidate(SimulatedProcess):
    election_type: type[Election] = Election
    following_type: type[Following] = Following
    leader_type: type[SimulatedLeader] = SimulatedLeader

    def __init__(self, world: World, name: str, *, clock_offset_s: float, drift: float, spread_s: float) -> None:
        super().__init__(world, name, clock_offset_s=clock_offset_s, drift=drift)
        self.pace = ElectionPace(spread_s=spread_s)

    def start(self) -> None:
        super().start()
        self.election = self.election_type(lambda: self.world.new_id(f"{self.name}-term"), self.pace)
        self.following = self.following_type(SNAPSHOT_EVERY)
        self.state = PoolState(settings=SETTINGS)
        self.clock_base = 0.0
        self.won: LeadershipWon | None = None
        self.generation = 0
        self.is_reading = False
        self.waiting: list[Batch] = []
        self.in_flight: Batch | None = None
        self.unwritten: dict[str, Batch] = {}
        self.led_epoch = 0
        self.leader: SimulatedLeader | None = None
        self.is_closing = False
        self.timer_at = inf
        self.wake()

    def kill(self) -> None:
        if not self.is_dead and self.leader is not None:
            self.leader.close()
        super().kill()

    def pool_now(self) -> float:
        return self.clock_base + self.boot_now()

    def may_act(self) -> bool:
        return self.election.may_act(self.boot_now())

    # Election

    def wake(self) -> None:
        self.carry_out(self.election.wake(self.boot_now()))

    def carry_out(self, actions: Sequence[ElectionAction]) -> None:
        for action in actions:
            self.act(action)
        self.set_timer()

    def lead_later_epoch(self, epoch_seen: int) -> None:
        self.carry_out(self.election.lead_later_epoch(epoch_seen, f"a box has seen {epoch_seen}", self.boot_now()))

    def set_timer(self) -> None:
        """One timer is enough: when it fires too early, because an append renewed the leadership, it is set again."""
        wake_at = self.election.wake_at
        if wake_at < self.timer_at:
            self.timer_at = wake_at
            self.after(max(wake_at - self.boot_now(), 0.0), self.ring, wake_at)

    def ring(self, timer_at: float) -> None:
        if timer_at != self.timer_at:
            return
        self.timer_at = inf
        if self.boot_now() >= self.election.wake_at - 1e-4:
            self.carry_out(self.election.wake(max(self.boot_now(), self.election.wake_at)))
        else:
            self.set_timer()

    def act(self, action: ElectionAction) -> None:
        database, end = self.world.database, self.following.end
        call: Callable[..., Any]
        args: tuple[Any, ...]
        match action:
            case ReadLeader():
                call, args = database.read_leader, ()
            case ClaimLeadership(term=term, seen_epoch=seen):
                call, args = database.claim, (term, self.name, seen)
            case RenewLeadership(epoch=epoch, term=term):
                call, args = database.renew, (epoch, term)
            case HandOverLeadership(epoch=epoch, term=term):
                self.ask(database.hand_over, (epoch, term), lambda _: None, lambda: None)
                return
            case LeadershipWon():
                self.take_charge(action)
                return
            case LeadershipLost():
                self.lose(action)
                return
            case _:
                assert_never(action)

        def then(row: LeaderRow | None) -> None:
            self.carry_out(self.election.answered(action, row, self.boot_now()))
            if row is not None:
                self.hear(row, end)

        def failed() -> None:
            self.election.failed(action, self.boot_now())
            self.carry_out(())

        self.ask(call, args, then, failed)

    def hear(self, row: LeaderRow, end_when_asked: JournalEnd) -> None:
        mine = self.election.leadership
        if mine is None:
            if not self.is_reading:
                self.compare(row.end)
                self.catch_up(row.end)
        elif has_lost_commits(row, mine.epoch, mine.term, end_when_asked) and self.may_act():
            self.step_down(mine.epoch, mine.term, why_lost(row.end, end_when_asked))

    def step_down(self, epoch: int, term: str, reason: str) -> None:
        self.carry_out(self.election.step_down(epoch, term, reason, self.boot_now()))

    def compare(self, end: JournalEnd) -> None:
        """Read the journal again if it lacks what this candidate knows."""
        if self.following.misses(end):
            self.following.reload(why_lost(end, self.following.end))

    def stop(self) -> None:
        """A clean stop: what is in flight is written first."""
        self.is_closing = True
        self.election.retire()
        if self.in_flight is None and not self.waiting:
            self.carry_out(self.election.stop())
            self.world.at(0.0, self.run, self.incarnation, self.kill)

    # Following

    def catch_up(self, end: JournalEnd) -> None:
        if self.is_reading or self.is_closing:
            return
        generation = self.generation
        database = self.world.database

        def failed() -> None:
            if generation == self.generation:
                self.is_reading = False
                if self.won is not None:
                    self.after(0.1, self.catch_up, end)

        def loaded(snapshot: JournalSnapshot | None) -> None:
            if generation == self.generation:
                self.is_reading = False
                self.state = replay(PoolState(settings=SETTINGS), snapshot.events if snapshot else ())
                self.following.loaded(snapshot)
                self.catch_up(end)

        def read(stored: list[StoredEvent] | None) -> None:
            if generation == self.generation:
                self.is_reading = False
                self.take(stored)
                self.catch_up(end)

        if self.following.reload_because is not None:
            self.is_reading = True
            self.ask(database.load_snapshot, (), loaded, failed)
        elif self.following.is_behind(end):
            self.is_reading = True
            self.ask(database.read_events, (self.following.end, MOST_AT_ONCE), read, failed)
        elif self.won is not None:
            self.open_pool()
        else:
            self.write_snapshot_if_due()

    def take(self, stored: list[StoredEvent] | None) -> None:
        if stored is None:
            self.following.reload("the journal does not go on from what this candidate has read")
        else:
            replay(self.state, [each.event for each in stored])
            self.following.take(stored)
            self.election.see_epoch(self.following.epoch)

    def write_snapshot_if_due(self) -> None:
        if self.following.is_snapshot_due(is_leader=self.election.leadership is not None):
            self.write_snapshot()

    def write_snapshot(self) -> None:
        end = self.following.end
        self.following.snapshot_known(end.position)
        args = (end, condense(self.state))
        self.ask(self.world.database.write_snapshot, args, lambda _: None, lambda: None)

    # Taking over

    def take_charge(self, won: LeadershipWon) -> None:
        self.world.log(self.name, f"won epoch {won.epoch}, the journal ends at {won.row.end.position}")
        if won.epoch <= self.led_epoch:
            self.world.violate(f"{self.name} won epoch {won.epoch} after it led epoch {self.led_epoch}")
        self.led_epoch = won.epoch
        self.won = won
        self.generation += 1
        self.is_reading = False
        self.compare(won.row.end)
        self.catch_up(won.row.end)

    def open_pool(self) -> None:
        """Step the take-over; this candidate may act once that is written."""
        assert self.won is not None
        won, self.won = self.won, None
        command = self.take_over_command(won)
        batch = Batch(self.world.new_id("batch"), opens=True)
        events = step(self.state, command, self.pool_now())
        batch.events = [event for event in events if isinstance(event, ev.DurableEvent)]
        batch.events += self.after_take_over(won)
        self.waiting = [batch]
        self.unwritten.clear()
        self.pump()

    def after_take_over(self, won: LeadershipWon) -> list[ev.DurableEvent]:
        """What else follows from a take-over: nothing."""
        return []

    def take_over_command(self, won: LeadershipWon) -> cmd.Command:
        boot_id, heard_at, wall_now = f"{self.name}-boot", won.heard_at, won.row.wall_now
        self.clock_base = clock_base(self.state, boot_id=boot_id, boot_now=heard_at, wall_now=wall_now)
        return cmd.TakeOver(won.epoch, boot_id, self.clock_base, wall_now - (self.clock_base + heard_at))

    def lose(self, action: LeadershipLost) -> None:
        self.world.log(self.name, f"lost epoch {action.epoch}: {action.reason}")
        self.won = None
        self.generation += 1
        self.is_reading = False
        batches = [*([self.in_flight] if self.in_flight else []), *self.waiting]
        self.in_flight, self.waiting = None, []
        self.unwritten.clear()
        if self.leader is not None:
            self.leader.close()
            self.leader = None
        self.following.reload("the leadership was lost")
        for batch in batches:
            for _, _, answer in batch.callers:
                answer(None, None)
        if self.is_closing:
            self.stop()

    # Writing

    def gather(self, events: list[ev.Event]) -> Batch | None:
        durable = [event for event in events if isinstance(event, ev.DurableEvent)]
        told = [event for event in events if isinstance(event, ev.DurableEvent | ev.NodeAnnounced)]
        if not durable:
            self.tell_in_order(told)
            return None
        if not self.waiting:
            self.waiting.append(Batch(self.world.new_id("batch")))
        batch = self.waiting[-1]
        batch.events += durable
        batch.told += told
        for event in durable:
            if (lease_id := getattr(event, "lease_id", None)) is not None:
                self.unwritten[lease_id] = batch
        self.world.at(0.0, self.run, self.incarnation, self.pump)
        return batch

    def tell_in_order(self, events: Sequence[ev.Event]) -> None:
        """What is not written waits for what was to be written before it."""
        last = self.waiting[-1] if self.waiting else self.in_flight
        if last is not None:
            last.told += events
        elif events and self.leader is not None:
            self.leader.written(events)

    def pump(self) -> None:
        if self.in_flight is not None or self.election.leadership is None:
            return
        if self.waiting:
            self.in_flight = self.waiting.pop(0)
            self.send(self.in_flight)

    def send(self, batch: Batch) -> None:
        mine, sent_at = self.election.leadership, self.boot_now()
        if mine is None or self.in_flight is not batch:
            return
        if not self.election.is_trusted(sent_at):
            self.wake()
            return
        append = Append(mine.epoch, mine.term, self.following.end, batch.id, len(batch.events))
        database = self.world.database

        def is_current() -> bool:
            return self.in_flight is batch and self.election.leadership is not None

        def answered(end: JournalEnd | None) -> None:
            if not is_current():
                return
            if end is not None:
                self.election.appended(append.epoch, append.term, sent_at)
                self.written(batch, append, end)
            else:
                self.ask(database.read_leader, (), judged, again)

        def judged(row: LeaderRow) -> None:
            if is_current():
                self.settle(batch, append, row)

        def again() -> None:
            self.after(0.1, self.send, batch)

        args = (append.epoch, append.term, append.end, batch.id, tuple(batch.events))
        self.ask(database.append, args, answered, again)

    def settle(self, batch: Batch, append: Append, row: LeaderRow) -> None:
        outcome = judge_append(append, row)
        self.world.log(self.name, f"append {batch.id} after {append.end.position}: {outcome}")
        if outcome is None:
            self.send(batch)
        elif isinstance(outcome, Deposed):
            self.step_down(append.epoch, append.term, outcome.reason)
        else:
            self.written(batch, append, outcome)

    def written(self, batch: Batch, append: Append, end: JournalEnd) -> None:
        self.in_flight = None
        self.following.written(end, append.epoch)
        for lease_id in [id_ for id_, last in self.unwritten.items() if last is batch]:
            del self.unwritten[lease_id]
        if batch.opens:
            self.election.open(append.epoch, append.term)
            self.world.log(self.name, f"leads epoch {append.epoch}, pool time {self.state.clock:.3f}")
            self.world.note_opened(self, append.epoch)
            self.leader = self.leader_type(self, append.epoch)
            self.leader.open(batch)
        elif self.leader is not None and batch.told:
            self.leader.written(batch.told)
        for events, lease_id, answer in batch.callers:
            if (later := self.unwritten.get(lease_id)) is not None:
                # It was granted meanwhile: its caller is answered when that is written too.
                later.callers.append((events, lease_id, answer))
            elif self.leader is not None:
                self.leader.answer(events, lease_id, answer)
            else:
                answer(None, None)
        if self.is_closing:
            self.stop()
        self.pump()

    # Leading

    def do(self, command: cmd.Command) -> list[ev.Event]:
        return step(self.state, command, self.pool_now())

    def takes(self, command: cmd.Command) -> bool:
        """Whether a command of a client may be carried out now."""
        return self.may_act() and not self.is_closing

    def call(self, command: cmd.RequestLease | cmd.Renew | cmd.Release, answer: Answer) -> None:
        """A client asks."""
        if self.leader is None or not self.takes(command):
            answer(None, None)
        else:
            self.leader.call(command, answer)
