"""The world around a crew, in virtual time: leases, processes and tasks, of which anything can happen to each.

Every action is checked when it is asked for: `Broken` says which promise it breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gpu_worker_pool.executor.crew import Crew, CrewActions, CrewRules, EndingWay, FailureCause, Phase

Happening = tuple[str, Callable[[], None]]
# The name of a fact or an action, and of whom and what it is.
Told = tuple[Any, ...]
_FLAGS = {"worker_warned": "is_warned", "shut_down": "cancels_tasks"}


class RecordedCrew(Crew):
    """A crew that writes down what it wants done."""

    def __init__(self, rules: CrewRules) -> None:
        self.wanted: list[Told] = []
        super().__init__(
            rules, CrewActions(**{field.name: self._recorder(field.name) for field in fields(CrewActions)})
        )

    def _recorder(self, name: str) -> Callable[..., None]:
        return lambda *args: self.wanted.append((name, *args))


def tell(crew: Crew, now: float, name: str, *args: Any) -> None:
    """Tell a crew a fact by its name; a flag comes last."""
    flags = {_FLAGS[name]: args[-1]} if args and isinstance(args[-1], bool) else {}
    crew.handle(now, getattr(crew, name), *args[: len(args) - len(flags)], **flags)


class Broken(AssertionError):  # noqa: N818 - what is found
    pass


def require(holds: bool, promise: str) -> None:
    if not holds:
        raise Broken(promise)


@dataclass
class SimulatedWorker:
    is_leased: bool = False
    is_started: bool = False
    is_ready: bool = False
    is_ending: bool = False
    is_gone: bool = False
    task: int | None = None


class CrewSimulation:
    def __init__(self, rules: CrewRules) -> None:
        actions = CrewActions(**{field.name: getattr(self, f"_{field.name}") for field in fields(CrewActions)})
        self.crew = Crew(rules, actions)
        self.rules = rules
        self.now = 0.0
        self.workers: dict[int, SimulatedWorker] = {}
        self.submitted = 0
        self.sent: dict[int, int] = {}
        self.outcome: dict[int, str] = {}
        self.is_broken = False
        self.is_closed = False
        self.is_stopped = False

    def happen(self, name: str, *args: Any) -> None:
        tell(self.crew, self.now, name, *args)
        if self.crew.is_stopped and not self.is_stopped:
            require(not self.workers, "no lease is left")
            require(len(self.outcome) == self.submitted, "every task is settled")
            self.is_stopped = True
        unserved = len(self.crew.waiting) + len(self.crew.repeated)
        requested = sum(member.phase is Phase.REQUESTING for member in self.crew.members.values())
        require(requested <= unserved, "no lease is requested without a task for it")
        require(len(self.workers) <= self.rules.max_workers, "there are at most max_workers leases")

    def _settle(self, task: int, outcome: str) -> None:
        require(task not in self.outcome, "a task is settled once")
        require(not any(worker.task == task for worker in self.workers.values()), "no process still has it")
        self.outcome[task] = outcome

    def _lease_worker(self, number: int) -> None:
        require(number not in self.workers, "a worker has one lease")
        require(not self.is_broken, "no lease is requested where no worker can work")
        self.workers[number] = SimulatedWorker()

    def _start_worker(self, number: int) -> None:
        worker = self.workers[number]
        require(worker.is_leased and not worker.is_started and not worker.is_ending, "it starts once, on a lease")
        worker.is_started = True

    def _send_task(self, number: int, task: int) -> None:
        worker = self.workers[number]
        require(worker.is_ready and worker.task is None, "a task goes to a worker that is ready and idle")
        require(not worker.is_ending and not worker.is_gone, "and that is not being ended")
        require(task not in self.outcome, "a task that is settled is not sent")
        require(all(other.task != task for other in self.workers.values()), "a task runs once at a time")
        self.sent[task] = self.sent.get(task, 0) + 1
        require(self.sent[task] <= 1 + self.rules.retries, "a task is repeated as often as was allowed")
        worker.task = task

    def _end_worker(self, number: int, _: EndingWay) -> None:
        require(not self.workers[number].is_gone, "what is gone is not ended")
        self.workers[number].is_ending = True

    def _release_worker(self, number: int) -> None:
        require(self.workers[number].is_gone, "a lease is released when no process is left on its GPU")

    def _fail_task(self, task: int, _: int, cause: FailureCause, attempts: int) -> None:
        require(attempts == self.sent.get(task, 0), "it says how often the task was tried")
        self._settle(task, cause.name)

    def _repeat_task(self, task: int, _: int, __: FailureCause, attempts: int) -> None:
        require(attempts == self.sent[task] and task not in self.outcome, "it says what is repeated")

    def _cancel_task(self, task: int) -> None:
        require(not self.sent.get(task), "only a task that never ran is cancelled")
        self._settle(task, "cancelled")

    def _break_crew(self, _: int, __: FailureCause) -> None:
        require(not self.is_broken, "it breaks once")
        self.is_broken = True

    def _submit(self) -> None:
        task, self.submitted = self.submitted, self.submitted + 1
        self.happen("task_submitted", task)

    def _cancel(self, task: int) -> None:
        self._settle(task, "cancelled")
        self.happen("task_cancelled", task)

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.happen("time_passed")

    def _grant(self, number: int) -> None:
        self.workers[number].is_leased = True
        self.happen("worker_leased", number)

    def _ready(self, number: int) -> None:
        self.workers[number].is_ready = True
        self.happen("worker_ready", number)

    def _answer(self, number: int) -> None:
        worker = self.workers[number]
        task, worker.task = worker.task, None
        assert task is not None
        self._settle(task, "done")
        self.happen("task_settled", number, task)

    def _fail_to_send(self, number: int) -> None:
        worker = self.workers[number]
        task, worker.task = worker.task, None
        assert task is not None
        self._settle(task, "cancelled")
        self.happen("task_not_sent", number, task)

    def _undeliver(self, number: int) -> None:
        worker = self.workers[number]
        task, worker.task = worker.task, None
        assert task is not None
        self.sent[task] -= 1
        self.happen("task_undelivered", number, task)

    def _die(self, number: int) -> None:
        self.workers[number].is_gone = True
        self.workers[number].task = None
        self.happen("worker_gone", number)

    def _release(self, number: int) -> None:
        del self.workers[number]
        self.happen("worker_released", number)

    def close(self, end: Told) -> None:
        self.is_closed = True
        self.happen(*end)

    def of_worker(self, number: int, worker: SimulatedWorker) -> list[Happening]:
        """What can happen to a worker, the best first."""
        if worker.is_gone:
            return [("released", lambda: self._release(number))]
        found: list[Happening] = []
        if worker.task is not None:
            found += [("answered", lambda: self._answer(number)), ("not sent", lambda: self._fail_to_send(number))]
            found.append(("undelivered", lambda: self._undeliver(number)))
        if worker.is_ending:
            found.append(("ended", lambda: self._die(number)))
        if not worker.is_leased:
            found.append(("granted", lambda: self._grant(number)))
            found.append(("refused", lambda: self.happen("worker_refused", number)))
        elif worker.is_started and not worker.is_ready:
            found.append(("ready", lambda: self._ready(number)))
            found.append(("unfit", lambda: self.happen("worker_unfit", number)))
        if worker.is_leased:
            found.append(("hung up", lambda: self.happen("worker_hung_up", number)))
            found.append(("lost", lambda: self.happen("worker_lease_lost", number)))
            found.append(("warned", lambda: self.happen("worker_warned", number, True)))
            found.append(("goes on", lambda: self.happen("worker_warned", number, False)))
        return [*found, ("died", lambda: self._die(number))]

    def possible(self) -> list[Happening]:
        found = [item for number, worker in self.workers.items() for item in self.of_worker(number, worker)]
        found += [(f"{s} s pass", lambda s=s: self._pass_time(s)) for s in (0.5, 20.0)]  # type: ignore[misc]
        if not self.is_closed:
            found += [("submitted", self._submit)] * 3
            found += [("cancelled", lambda task=task: self._cancel(task)) for task in list(self.crew.waiting)[:2]]  # type: ignore[misc]
        return found

    def play(self, choices: Sequence[int]) -> None:
        for choice in choices:
            possible = self.possible()
            possible[choice % len(possible)][1]()

    def finish(self) -> None:
        """Let everything go well from here; it must come to an end."""
        for _ in range(100 * (self.submitted + len(self.workers) + 1)):
            if self.is_stopped:
                return
            happening = [items[0] for items in (self.of_worker(*item) for item in self.workers.items())]
            useful = [one for one in happening if one[0] in {"answered", "ended", "granted", "ready", "released"}]
            if useful:
                useful[0][1]()
            else:
                self._pass_time(1.0)
        raise Broken("it comes to an end")
