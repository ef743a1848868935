"""The decisions of an executor: which task goes to which worker, when leases are requested and released, what a death means.

Facts and time in, actions out; nothing else is known here. A worker is a lease and a process on it. It is a member of the
crew from the request for its lease until that lease is released, so there are never more leases than members.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Final, assert_never

from . import actions as do
from . import facts
from .actions import CrewAction, EndingWay, FailureCause

# So many workers in a row that end before they are ready, while no other is, show that none will ever be.
MOST_FAILED_STARTS: Final = 3
# How soon to request a lease again after such a death; each time twice as long, up to about half a minute.
FIRST_PAUSE_S: Final = 0.05
MOST_DOUBLINGS: Final = 9
# How soon to request more leases after a refusal, while there are workers to go on with.
ASK_AGAIN_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class CrewRules:
    """`retries`: how often a task is repeated whose worker died or lost its lease. `idle_release_s`: how long a worker
    without a task keeps its lease. `max_tasks`: after so many tasks a worker is replaced; None: never.
    """

    max_workers: int
    retries: int = 0
    idle_release_s: float = 10.0
    max_tasks: int | None = None


@dataclass(frozen=True, slots=True)
class Requesting:
    """Its lease is requested."""


@dataclass(frozen=True, slots=True)
class Starting:
    """It has a lease, and its process starts."""


@dataclass(frozen=True, slots=True)
class Idle:
    since: float


@dataclass(frozen=True, slots=True)
class Busy:
    task: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """It is being ended. It may still answer the task that it has."""

    way: EndingWay
    task: int | None = None
    cause: FailureCause = FailureCause.WORKER_DIED


@dataclass(frozen=True, slots=True)
class Releasing:
    """No process of it is left, and its lease is being released."""


@dataclass(slots=True)
class CrewMember:
    """A worker. `tasks_done` counts the tasks that it has answered. `failed_start`: why it ends before it was ready, if
    that is not the crew's own decision.
    """

    state: Requesting | Starting | Idle | Busy | Leaving | Releasing = field(default_factory=Requesting)
    tasks_done: int = 0
    is_warned: bool = False
    failed_start: FailureCause | None = None


class Crew:
    """The tasks and workers of one executor. `handle` is told what has happened, and returns what to do."""

    def __init__(self, rules: CrewRules) -> None:
        self.rules = rules
        self.members: dict[int, CrewMember] = {}
        # In the order of their submission. Those to be repeated were submitted before all others.
        self.waiting: dict[int, None] = {}
        self.repeated: dict[int, None] = {}
        self.is_closing = False
        self.is_interrupted = False
        self.is_stopped = False
        # Why no worker can do a task, and which of them showed it.
        self._broken_by: tuple[int, FailureCause] | None = None
        # How often each task that is not settled was sent to a worker; those that never were are not in it.
        self._attempts: dict[int, int] = {}
        self._failed_starts = 0
        self._next_worker = 1
        self._ask_after = -inf

    @property
    def next_deadline(self) -> float | None:
        """When to say that time has passed; None: only another fact can change anything."""
        at = [since + self.rules.idle_release_s for since, _ in self._idle()]
        if self._missing() > 0 and self._ask_after > -inf:
            at.append(self._ask_after)
        return min(at, default=None)

    def handle(self, fact: facts.Fact, now: float) -> list[CrewAction]:
        """Take in what has happened, and decide what follows."""
        out: list[CrewAction] = []
        self._take_in(fact, now, out)
        if not self.is_stopped:
            self._settle(now, out)
        return out

    def _take_in(self, fact: facts.Fact, now: float, out: list[CrewAction]) -> None:
        match fact:
            case facts.TaskSubmitted(task):
                self.waiting[task] = None
                if self._broken_by is not None:
                    self._fail_all_waiting(*self._broken_by, out)
            case facts.TaskCancelled(task):
                self.waiting.pop(task, None)
            case facts.TaskNotSent(worker, task) | facts.TaskSettled(worker, task):
                self._settled(worker, task, now, out, counts=isinstance(fact, facts.TaskSettled))
            case facts.TaskUndelivered(worker, task):
                self._undelivered(worker, task, out)
            case facts.ShutDown(cancels_tasks):
                self._shut_down(out, cancels_tasks=cancels_tasks)
            case facts.CrewInterrupted():
                self._interrupt(out)
            case facts.TimePassed():
                pass
            case _:
                self._take_in_of_worker(fact, now, out)

    def _take_in_of_worker(self, fact: facts.WorkerFact, now: float, out: list[CrewAction]) -> None:
        worker = fact.worker
        match fact:
            case facts.WorkerLeased():
                self._leased(worker, out)
            case facts.WorkerRefused():
                self._refused(worker, now, out)
            case facts.WorkerReady():
                # One that was warned before does no task, so it does not show that others will.
                if isinstance(self.members[worker].state, Starting):
                    self._failed_starts = 0
                    self.members[worker].state = Idle(now)
            case facts.WorkerUnfit():
                self._break(worker, FailureCause.WORKER_UNFIT, out)
                self._end(worker, EndingWay.QUIETLY, out)
            case facts.WorkerHungUp():
                self._note_failed_start(worker, FailureCause.STARTS_FAILED)
                self._end(worker, EndingWay.QUIETLY, out)
            case facts.WorkerGone():
                self._gone(worker, now, out)
            case facts.WorkerReleased():
                self.members.pop(worker, None)
            case facts.WorkerLeaseLost():
                self._note_failed_start(worker, FailureCause.LEASES_TOO_SHORT)
                self._end(worker, EndingWay.TERMINATE, out, FailureCause.LEASE_LOST)
            case facts.WorkerWarned(is_warned=is_warned):
                if worker in self.members:
                    self.members[worker].is_warned = is_warned
            case _:
                assert_never(fact)

    def _settled(self, worker: int, task: int, now: float, out: list[CrewAction], *, counts: bool) -> None:
        self._attempts.pop(task, None)
        member = self.members[worker]
        member.tasks_done += counts
        self._failed_starts = 0  # it has begun, so others can
        match member.state:
            case Leaving(way, task=had, cause=cause) if had == task:
                member.state = Leaving(way, None, cause)
            case Busy(had) if had == task:
                member.state = Idle(now)
                if self.rules.max_tasks is not None and member.tasks_done >= self.rules.max_tasks:
                    self._end(worker, EndingWay.QUIETLY, out)

    def _leased(self, worker: int, out: list[CrewAction]) -> None:
        if isinstance(self.members[worker].state, Requesting):
            self.members[worker].state = Starting()
            out.append(do.StartWorker(worker))

    def _refused(self, worker: int, now: float, out: list[CrewAction]) -> None:
        self._end(worker, EndingWay.QUIETLY, out)
        if self._is_any(Starting, Idle, Busy):
            self._ask_after = now + ASK_AGAIN_S
        else:
            self._fail_all_waiting(worker, FailureCause.NO_LEASE, out)

    def _gone(self, worker: int, now: float, out: list[CrewAction]) -> None:
        member = self.members[worker]
        match member.state:
            case Requesting() | Starting():
                self._fail_start(worker, FailureCause.STARTS_FAILED, now, out)
            case Leaving() if member.failed_start is not None:
                self._fail_start(worker, member.failed_start, now, out)
            case Busy(task):
                self._lose(task, worker, FailureCause.WORKER_DIED, out)
            case Leaving(_, int(task), cause):
                self._lose(task, worker, cause, out)
            case Releasing():
                return
            case _:
                pass
        member.state = Releasing()
        out.append(do.ReleaseWorker(worker))

    def _note_failed_start(self, worker: int, cause: FailureCause) -> None:
        member = self.members.get(worker)
        if member is not None and isinstance(member.state, Starting):
            member.failed_start = cause

    def _fail_start(self, worker: int, cause: FailureCause, now: float, out: list[CrewAction]) -> None:
        """Request the next lease a little later. After too many such starts no task can be done: a worker that dies is the
        program's fault, so the crew is broken; leases may be longer the next time.
        """
        self._failed_starts += 1
        pause_s = FIRST_PAUSE_S * 2 ** min(self._failed_starts, MOST_DOUBLINGS)
        self._ask_after = max(self._ask_after, now + pause_s)
        if self._failed_starts < MOST_FAILED_STARTS or self._is_any(Idle, Busy):
            return
        if cause is FailureCause.STARTS_FAILED:
            self._break(worker, cause, out)
        else:
            self._failed_starts = 0
            self._fail_all_waiting(worker, cause, out)

    def _lose(self, task: int, worker: int, cause: FailureCause, out: list[CrewAction]) -> None:
        """Repeat a task whose worker is gone, or fail it. Only now: before, its first run might still go on."""
        if self._attempts[task] > self.rules.retries or self.is_interrupted or self._broken_by is not None:
            out.append(do.FailTask(task, worker, cause, self._attempts.pop(task)))
            return
        out.append(do.RepeatTask(task, worker, cause, self._attempts[task]))
        self._put_back(task)

    def _put_back(self, task: int) -> None:
        self.repeated = dict.fromkeys(sorted((*self.repeated, task)))

    def _undelivered(self, worker: int, task: int, out: list[CrewAction]) -> None:
        """Send a task that has not begun to another worker; that is not a repetition."""
        self._attempts[task] -= 1
        member = self.members[worker]
        if isinstance(member.state, Busy):
            member.state = Leaving(EndingWay.QUIETLY)
            out.append(do.EndWorker(worker, EndingWay.QUIETLY))
        elif isinstance(member.state, Leaving):
            member.state = Leaving(member.state.way)
        if self.is_interrupted or self._broken_by is not None:
            cause = FailureCause.INTERRUPTED if self._broken_by is None else self._broken_by[1]
            out.append(do.FailTask(task, worker, cause, self._attempts.pop(task)))
        else:
            self._put_back(task)

    def _break(self, worker: int, cause: FailureCause, out: list[CrewAction]) -> None:
        if self._broken_by is None:
            self._broken_by = (worker, cause)
            out.append(do.BreakCrew(worker, cause))
        self._fail_all_waiting(worker, cause, out)

    def _shut_down(self, out: list[CrewAction], *, cancels_tasks: bool) -> None:
        self.is_closing = True
        if cancels_tasks:
            out += map(do.CancelTask, self.waiting)
            self.waiting.clear()

    def _interrupt(self, out: list[CrewAction]) -> None:
        """End what runs, as Ctrl-C does; the second time, at once."""
        is_again, self.is_interrupted = self.is_interrupted, True
        self._shut_down(out, cancels_tasks=True)
        self._fail_all_waiting(0, FailureCause.INTERRUPTED, out)
        for worker, member in self.members.items():
            if is_again:
                self._end(worker, EndingWay.AT_ONCE, out, FailureCause.INTERRUPTED)
            elif isinstance(member.state, Starting):
                self._end(worker, EndingWay.TERMINATE, out, FailureCause.INTERRUPTED)
            elif isinstance(member.state, Busy):
                self._end(worker, EndingWay.INTERRUPT, out, FailureCause.INTERRUPTED)

    def _fail_all_waiting(self, worker: int, cause: FailureCause, out: list[CrewAction]) -> None:
        failed = (*self.repeated, *self.waiting)
        out += [do.FailTask(task, worker, cause, self._attempts.pop(task, 0)) for task in failed]
        self.repeated.clear()
        self.waiting.clear()

    def _end(
        self, worker: int, way: EndingWay, out: list[CrewAction], cause: FailureCause = FailureCause.WORKER_DIED
    ) -> None:
        member = self.members.get(worker)
        match member and member.state:
            case None | Releasing():
                return
            case Leaving(known, task, known_cause):
                if way.value <= known.value:
                    return
                # The first cause is why it ends.
                state = Leaving(way, task, cause if known is EndingWay.QUIETLY else known_cause)
            case Busy(task):
                state = Leaving(way, task, cause)
            case _:
                state = Leaving(way)
        if member is not None:
            member.state = state
            out.append(do.EndWorker(worker, way))

    def _settle(self, now: float, out: list[CrewAction]) -> None:
        """Send tasks to idle workers, request leases that are missing, end workers that have nothing to do."""
        for worker, member in self.members.items():
            if member.is_warned and isinstance(member.state, Starting | Idle):
                self._note_failed_start(worker, FailureCause.LEASES_TOO_SHORT)
                self._end(worker, EndingWay.QUIETLY, out)
        # The one that worked last first, so that the others become free.
        for since, worker in sorted(self._idle(), reverse=True):
            if (task := self._next_task()) is not None:
                self._attempts[task] = self._attempts.get(task, 0) + 1
                self.members[worker].state = Busy(task)
                out.append(do.SendTask(worker, task))
            elif self.is_closing or now >= since + self.rules.idle_release_s:
                self._end(worker, EndingWay.QUIETLY, out)
        self._request(now, out)
        if self.is_closing and not self.members and not self.waiting and not self.repeated:
            self.is_stopped = True
            out.append(do.StopCrew())

    def _request(self, now: float, out: list[CrewAction]) -> None:
        missing = self._missing()
        if missing > 0 and now >= self._ask_after:
            self._ask_after = -inf
            for _ in range(missing):
                worker, self._next_worker = self._next_worker, self._next_worker + 1
                self.members[worker] = CrewMember()
                out.append(do.LeaseWorker(worker))
        # Those that came last are the last in the queue.
        superfluous = [worker for worker, member in self.members.items() if isinstance(member.state, Requesting)]
        if self.is_closing and not self._unserved():
            superfluous += [worker for worker, member in self.members.items() if isinstance(member.state, Starting)]
        for worker in superfluous[::-1][: max(-missing, 0)]:
            self._end(worker, EndingWay.QUIETLY, out)

    def _missing(self) -> int:
        """How many leases there are too few for the tasks that wait; below 0: how many are requested too many."""
        coming = sum(isinstance(member.state, Requesting | Starting) for member in self.members.values())
        return min(self._unserved() - coming, self.rules.max_workers - len(self.members))

    def _is_any(self, *states: type) -> bool:
        return any(isinstance(member.state, states) for member in self.members.values())

    def _unserved(self) -> int:
        return len(self.waiting) + len(self.repeated)

    def _next_task(self) -> int | None:
        for tasks in (self.repeated, self.waiting):
            for task in tasks:
                del tasks[task]
                return task
        return None

    def _idle(self) -> Iterator[tuple[float, int]]:
        return (
            (member.state.since, worker) for worker, member in self.members.items() if isinstance(member.state, Idle)
        )
