"""The decisions of an executor: which task goes to which worker, when leases are requested and released, what a death means.

Facts and time in, actions out; nothing else is known here. Tasks and workers are known by numbers. A worker is a lease and
a process on it. It is a member of the crew from the request for its lease until that lease is released, so there are never
more leases than members.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from functools import partial
from math import inf
from typing import Final, ParamSpec

_ParamsT = ParamSpec("_ParamsT")
# This many workers in a row that end before they are ready, while no other is, show that none will ever be.
MOST_FAILED_STARTS: Final = 3
# How soon to request a lease again after such a death; each time twice as long, up to about half a minute.
FIRST_PAUSE_S: Final = 0.05
MOST_DOUBLINGS: Final = 9
# How soon to request more leases after a refusal, while there are workers to go on with.
ASK_AGAIN_S: Final = 30.0


class EndingWay(IntEnum):
    """How a worker is ended. Each takes a grace before it becomes the next harder one."""

    # It has nothing to do: it ends by itself. A lease that is only requested is withdrawn.
    QUIETLY = auto()
    # As Ctrl-C does.
    INTERRUPT = auto()
    # As the end of a lease demands it.
    TERMINATE = auto()
    # As a user demands it who has asked before: with hardly any grace.
    AT_ONCE = auto()


class FailureCause(Enum):
    """Why a task has no result. The worker is the one that it is about."""

    WORKER_DIED = auto()
    LEASE_LOST = auto()
    NO_LEASE = auto()
    WORKER_UNFIT = auto()
    STARTS_FAILED = auto()
    # Its lease was about to end, or ended, before the worker was ready; so did those of others before it.
    LEASES_TOO_SHORT = auto()
    INTERRUPTED = auto()


@dataclass(frozen=True, slots=True)
class CrewActions:
    """What a crew can have done. An action may tell the crew at once what follows from it."""

    # Request a lease for a new worker.
    lease_worker: Callable[[int], None]
    start_worker: Callable[[int], None]
    # Of the worker and the task: send it, unless it was cancelled; then tell `task_not_sent`.
    send_task: Callable[[int, int], None]
    # End all its processes, and tell `worker_gone` when none is left. It may be called again with a harder way.
    end_worker: Callable[[int, EndingWay], None]
    # Release its lease, if it has one, and tell `worker_released`.
    release_worker: Callable[[int], None]
    # Of the task and the worker that had it, why, and how often it was sent to a worker: it has no result.
    fail_task: Callable[[int, int, FailureCause, int], None]
    # The same: it will be sent again. This is for the log only.
    repeat_task: Callable[[int, int, FailureCause, int], None]
    cancel_task: Callable[[int], None]
    # Refuse tasks from now on: this worker shows that none can do them.
    break_crew: Callable[[int, FailureCause], None]


@dataclass(frozen=True, slots=True)
class CrewRules:
    """`retries`: how often a task is repeated whose worker died or lost its lease. `idle_release_s`: how long a worker
    without a task keeps its lease. `max_tasks`: after this many tasks a worker is replaced; None: never.
    """

    max_workers: int
    retries: int = 0
    idle_release_s: float = 10.0
    max_tasks: int | None = None


class Phase(Enum):
    """Where a worker is in its life."""

    REQUESTING = auto()
    STARTING = auto()
    IDLE = auto()
    BUSY = auto()
    # It is being ended. It may still answer the task that it has.
    LEAVING = auto()
    # No process of it is left, and its lease is being released.
    RELEASING = auto()


@dataclass(slots=True)
class CrewMember:
    """A worker. `way` and `cause` say how and why it is ended. `tasks_done` counts the tasks that it has answered.
    `failed_start`: why it ends before it was ready, if that is not the crew's own decision.
    """

    phase: Phase = Phase.REQUESTING
    idle_since: float = inf
    task: int | None = None
    way: EndingWay = EndingWay.QUIETLY
    cause: FailureCause = FailureCause.WORKER_DIED
    tasks_done: int = 0
    is_warned: bool = False
    failed_start: FailureCause | None = None


class Crew:
    """The tasks and workers of one executor. `handle` is told what has happened, and has done what follows."""

    def __init__(self, rules: CrewRules, actions: CrewActions) -> None:
        self.rules = rules
        self.members: dict[int, CrewMember] = {}
        # In the order of their submission. Those to be repeated were submitted before all others.
        self.waiting: OrderedDict[int, None] = OrderedDict()
        self.repeated: list[int] = []
        self.is_closing = False
        self.is_interrupted = False
        self.is_stopped = False
        self._actions = actions
        self._decided: deque[Callable[[], None]] = deque()
        self._is_acting = False
        self._now = -inf
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

    def handle(
        self, now: float, fact: Callable[_ParamsT, None], *args: _ParamsT.args, **kwargs: _ParamsT.kwargs
    ) -> None:
        """Take in what has happened, which is one of the facts below, and have done what follows."""
        self._now = now
        fact(*args, **kwargs)
        if not self.is_stopped:
            self._settle()
        if self._is_acting:
            return  # an action tells what follows from it: the call below that does the actions goes on with these
        self._is_acting = True
        while self._decided:
            self._decided.popleft()()
        self._is_acting = False

    # --- facts ------------------------------------------------------------------------------------------------------

    def time_passed(self) -> None:
        """The time of `next_deadline` has come."""

    def task_submitted(self, task: int) -> None:
        self.waiting[task] = None
        if self._broken_by is not None:
            self._fail_all_waiting(*self._broken_by)

    def task_cancelled(self, task: int) -> None:
        """Its caller has cancelled it before it was sent to a worker."""
        self.waiting.pop(task, None)

    def task_not_sent(self, worker: int, task: int) -> None:
        """It did not go to the worker: it was cancelled just now, or it cannot be pickled. Its future is settled."""
        self._free(worker, task)

    def task_settled(self, worker: int, task: int) -> None:
        """The worker has answered, with a result or an exception, and the future has it."""
        self.members[worker].tasks_done += 1
        self._free(worker, task)

    def task_undelivered(self, worker: int, task: int) -> None:
        """The worker had ended before the task reached it. The task has certainly not begun, so that it is sent to another
        worker is not a repetition.
        """
        self._attempts[task] -= 1
        self.members[worker].task = None
        self._end(worker, EndingWay.QUIETLY)
        if self.is_interrupted or self._broken_by is not None:
            cause = FailureCause.INTERRUPTED if self._broken_by is None else self._broken_by[1]
            self._do(self._actions.fail_task, task, worker, cause, self._attempts.pop(task))
        else:
            insort(self.repeated, task)

    def worker_leased(self, worker: int) -> None:
        """The lease that was requested for this worker is granted."""
        if self.members[worker].phase is Phase.REQUESTING:
            self.members[worker].phase = Phase.STARTING
            self._do(self._actions.start_worker, worker)

    def worker_refused(self, worker: int) -> None:
        """There will be no lease for this worker: none could ever be granted, or not in time."""
        self._end(worker, EndingWay.QUIETLY)
        if self._is_any(Phase.STARTING, Phase.IDLE, Phase.BUSY):
            self._ask_after = self._now + ASK_AGAIN_S
        else:
            self._fail_all_waiting(worker, FailureCause.NO_LEASE)

    def worker_ready(self, worker: int) -> None:
        """Its process has started and has run the initializer."""
        member = self.members[worker]
        # One that was warned before does no task, so it does not show that others will.
        if member.phase is Phase.STARTING:
            self._failed_starts = 0
            member.phase, member.idle_since = Phase.IDLE, self._now

    def worker_unfit(self, worker: int) -> None:
        """Its process could not load the program, or its initializer raised an exception. Others would do the same."""
        self._break(worker, FailureCause.WORKER_UNFIT)
        self._end(worker, EndingWay.QUIETLY)

    def worker_hung_up(self, worker: int) -> None:
        """It answers no more: it has just ended, or a task has closed its line."""
        self._end_early(worker, FailureCause.STARTS_FAILED)
        self._end(worker, EndingWay.QUIETLY)

    def worker_lease_lost(self, worker: int) -> None:
        self._end_early(worker, FailureCause.LEASES_TOO_SHORT)
        self._end(worker, EndingWay.TERMINATE, FailureCause.LEASE_LOST)

    def worker_warned(self, worker: int, *, is_warned: bool) -> None:
        """The server will end the lease soon; with `is_warned` false, it has withdrawn the warning."""
        if worker in self.members:
            self.members[worker].is_warned = is_warned

    def worker_gone(self, worker: int) -> None:
        """None of its processes is left, for whatever reason, and all that it had answered was settled before."""
        member = self.members[worker]
        if member.phase is Phase.RELEASING:
            return
        if member.phase in {Phase.REQUESTING, Phase.STARTING}:
            self._fail_start(worker, FailureCause.STARTS_FAILED)
        elif member.failed_start is not None:
            self._fail_start(worker, member.failed_start)
        elif member.task is not None:
            self._lose(member.task, worker, member.cause)
        member.phase, member.task = Phase.RELEASING, None
        self._do(self._actions.release_worker, worker)

    def worker_released(self, worker: int) -> None:
        """Its lease is released, or it had none."""
        self.members.pop(worker, None)

    def shut_down(self, *, cancels_tasks: bool = False) -> None:
        """No more tasks will come. `cancels_tasks`: those that wait are cancelled."""
        self.is_closing = True
        if cancels_tasks:
            for task in self.waiting:
                self._do(self._actions.cancel_task, task)
            self.waiting.clear()

    def interrupted(self) -> None:
        """The user has pressed Ctrl-C: cancel what waits, and end what runs; the second time, at once."""
        is_again, self.is_interrupted = self.is_interrupted, True
        self.shut_down(cancels_tasks=True)
        self._fail_all_waiting(0, FailureCause.INTERRUPTED)
        ways = {Phase.STARTING: EndingWay.TERMINATE, Phase.BUSY: EndingWay.INTERRUPT}
        for worker, member in self.members.items():
            way = EndingWay.AT_ONCE if is_again else ways.get(member.phase)
            if way is not None:
                self._end(worker, way, FailureCause.INTERRUPTED)

    # --- decisions --------------------------------------------------------------------------------------------------

    def _do(self, action: Callable[_ParamsT, None], *args: _ParamsT.args, **kwargs: _ParamsT.kwargs) -> None:
        self._decided.append(partial(action, *args, **kwargs))

    def _free(self, worker: int, task: int) -> None:
        self._attempts.pop(task, None)
        self._failed_starts = 0  # this worker has begun, so others can
        member = self.members[worker]
        if member.task != task:
            return
        member.task = None
        if member.phase is Phase.BUSY:
            member.phase, member.idle_since = Phase.IDLE, self._now
            if self.rules.max_tasks is not None and member.tasks_done >= self.rules.max_tasks:
                self._end(worker, EndingWay.QUIETLY)

    def _end_early(self, worker: int, cause: FailureCause) -> None:
        member = self.members.get(worker)
        if member is not None and member.phase is Phase.STARTING:
            member.failed_start = cause

    def _end(self, worker: int, way: EndingWay, cause: FailureCause = FailureCause.WORKER_DIED) -> None:
        member = self.members.get(worker)
        if member is None or member.phase is Phase.RELEASING:
            return
        if member.phase is Phase.LEAVING:
            if way <= member.way:
                return
            if member.way is not EndingWay.QUIETLY:
                cause = member.cause  # the first one is why it ends
        member.phase, member.way, member.cause = Phase.LEAVING, way, cause
        self._do(self._actions.end_worker, worker, way)

    def _fail_start(self, worker: int, cause: FailureCause) -> None:
        """Request the next lease a little later. After too many such starts no task can be done: a worker that dies is the
        program's fault, so the crew is broken; leases may be longer the next time.
        """
        self._failed_starts += 1
        pause_s = FIRST_PAUSE_S * 2 ** min(self._failed_starts, MOST_DOUBLINGS)
        self._ask_after = max(self._ask_after, self._now + pause_s)
        if self._failed_starts < MOST_FAILED_STARTS or self._is_any(Phase.IDLE, Phase.BUSY):
            return
        if cause is FailureCause.STARTS_FAILED:
            self._break(worker, cause)
        else:
            self._failed_starts = 0
            self._fail_all_waiting(worker, cause)

    def _break(self, worker: int, cause: FailureCause) -> None:
        if self._broken_by is None:
            self._broken_by = (worker, cause)
            self._do(self._actions.break_crew, worker, cause)
        self._fail_all_waiting(worker, cause)

    def _lose(self, task: int, worker: int, cause: FailureCause) -> None:
        """Repeat a task whose worker is gone, or fail it. Only now: before, its first run might still go on."""
        if self._attempts[task] > self.rules.retries or self.is_interrupted or self._broken_by is not None:
            self._do(self._actions.fail_task, task, worker, cause, self._attempts.pop(task))
            return
        self._do(self._actions.repeat_task, task, worker, cause, self._attempts[task])
        insort(self.repeated, task)

    def _fail_all_waiting(self, worker: int, cause: FailureCause) -> None:
        for task in (*self.repeated, *self.waiting):
            self._do(self._actions.fail_task, task, worker, cause, self._attempts.pop(task, 0))
        self.repeated.clear()
        self.waiting.clear()

    def _settle(self) -> None:
        """Send tasks to idle workers, request leases that are missing, end workers that have nothing to do."""
        for worker, member in self.members.items():
            if member.is_warned and member.phase in {Phase.STARTING, Phase.IDLE}:
                self._end_early(worker, FailureCause.LEASES_TOO_SHORT)
                self._end(worker, EndingWay.QUIETLY)
        # The one that worked last first, so that the others become free.
        for since, worker in sorted(self._idle(), reverse=True):
            if self._unserved():
                task = self.repeated.pop(0) if self.repeated else self.waiting.popitem(last=False)[0]
                self._attempts[task] = self._attempts.get(task, 0) + 1
                self.members[worker].phase, self.members[worker].task = Phase.BUSY, task
                self._do(self._actions.send_task, worker, task)
            elif self.is_closing or self._now >= since + self.rules.idle_release_s:
                self._end(worker, EndingWay.QUIETLY)
        self._request()
        self.is_stopped = self.is_closing and not self.members and not self._unserved()

    def _request(self) -> None:
        missing = self._missing()
        if missing > 0 and self._now >= self._ask_after:
            self._ask_after = -inf
            for worker in range(self._next_worker, self._next_worker + missing):
                self.members[worker] = CrewMember()
                self._do(self._actions.lease_worker, worker)
            self._next_worker += missing
        # Those that came last are the last in the queue.
        superfluous = [worker for worker, member in self.members.items() if member.phase is Phase.REQUESTING]
        if self.is_closing and not self._unserved():
            superfluous += [worker for worker, member in self.members.items() if member.phase is Phase.STARTING]
        for worker in superfluous[::-1][: max(-missing, 0)]:
            self._end(worker, EndingWay.QUIETLY)

    def _missing(self) -> int:
        """How many leases there are too few for the tasks that wait; below 0: how many are requested too many."""
        coming = sum(member.phase in {Phase.REQUESTING, Phase.STARTING} for member in self.members.values())
        return min(self._unserved() - coming, self.rules.max_workers - len(self.members))

    def _is_any(self, *phases: Phase) -> bool:
        return any(member.phase in phases for member in self.members.values())

    def _unserved(self) -> int:
        return len(self.waiting) + len(self.repeated)

    def _idle(self) -> Iterator[tuple[float, int]]:
        return ((member.idle_since, worker) for worker, member in self.members.items() if member.phase is Phase.IDLE)
