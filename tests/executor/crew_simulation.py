"""The world around a crew, in virtual time: leases, processes and tasks, of which anything can happen to each.

Every action is checked when it is asked for: `Broken` says which promise it breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_worker_pool.executor import actions as do
from gpu_worker_pool.executor import facts
from gpu_worker_pool.executor.crew import Crew, CrewRules, Requesting

Happening = tuple[str, Callable[[], None]]


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
        self.crew = Crew(rules)
        self.rules = rules
        self.now = 0.0
        self.workers: dict[int, SimulatedWorker] = {}
        self.submitted = 0
        self.sent: dict[int, int] = {}
        self.outcome: dict[int, str] = {}
        self.is_broken = False
        self.is_closed = False
        self.is_stopped = False

    def happen(self, fact: facts.Fact) -> None:
        for action in self.crew.handle(fact, self.now):
            self._carry_out(action)
        unserved = len(self.crew.waiting) + len(self.crew.repeated)
        requested = sum(isinstance(member.state, Requesting) for member in self.crew.members.values())
        require(requested <= unserved, "no lease is requested without a task for it")
        require(len(self.workers) <= self.rules.max_workers, "there are at most max_workers leases")

    def _settle(self, task: int, outcome: str) -> None:
        require(task not in self.outcome, "a task is settled once")
        require(not any(worker.task == task for worker in self.workers.values()), "no process still has it")
        self.outcome[task] = outcome

    def _carry_out(self, action: do.CrewAction) -> None:
        match action:
            case do.LeaseWorker(number):
                require(number not in self.workers, "a worker has one lease")
                require(not self.is_broken, "no lease is requested where no worker can work")
                self.workers[number] = SimulatedWorker()
            case do.StartWorker(number):
                worker = self.workers[number]
                require(
                    worker.is_leased and not worker.is_started and not worker.is_ending, "it starts once, on a lease"
                )
                worker.is_started = True
            case do.SendTask(number, task):
                worker = self.workers[number]
                require(worker.is_ready and worker.task is None, "a task goes to a worker that is ready and idle")
                require(not worker.is_ending and not worker.is_gone, "and that is not being ended")
                require(task not in self.outcome, "a task that is settled is not sent")
                require(all(other.task != task for other in self.workers.values()), "a task runs once at a time")
                self.sent[task] = self.sent.get(task, 0) + 1
                require(self.sent[task] <= 1 + self.rules.retries, "a task is repeated as often as was allowed")
                worker.task = task
            case do.EndWorker(number):
                require(not self.workers[number].is_gone, "what is gone is not ended")
                self.workers[number].is_ending = True
            case do.ReleaseWorker(number):
                require(self.workers[number].is_gone, "a lease is released when no process is left on its GPU")
            case do.FailTask(task, number, cause, attempts):
                require(attempts == self.sent.get(task, 0), "it says how often the task was tried")
                self._settle(task, cause.name)
            case do.RepeatTask(task, number, cause, attempts):
                require(attempts == self.sent[task] and task not in self.outcome, "it says what is repeated")
            case do.CancelTask(task):
                require(not self.sent.get(task), "only a task that never ran is cancelled")
                self._settle(task, "cancelled")
            case do.BreakCrew():
                require(not self.is_broken, "it breaks once")
                self.is_broken = True
            case do.StopCrew():
                require(not self.workers, "no lease is left")
                require(len(self.outcome) == self.submitted, "every task is settled")
                self.is_stopped = True

    def _submit(self) -> None:
        task, self.submitted = self.submitted, self.submitted + 1
        self.happen(facts.TaskSubmitted(task))

    def _cancel(self, task: int) -> None:
        self._settle(task, "cancelled")
        self.happen(facts.TaskCancelled(task))

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.happen(facts.TimePassed())

    def _grant(self, number: int) -> None:
        self.workers[number].is_leased = True
        self.happen(facts.WorkerLeased(number))

    def _ready(self, number: int) -> None:
        self.workers[number].is_ready = True
        self.happen(facts.WorkerReady(number))

    def _answer(self, number: int) -> None:
        worker = self.workers[number]
        task, worker.task = worker.task, None
        assert task is not None
        self._settle(task, "done")
        self.happen(facts.TaskSettled(number, task))

    def _fail_to_send(self, number: int) -> None:
        worker = self.workers[number]
        task, worker.task = worker.task, None
        assert task is not None
        self._settle(task, "cancelled")
        self.happen(facts.TaskNotSent(number, task))

    def _undeliver(self, number: int) -> None:
        worker = self.workers[number]
        task, worker.task = worker.task, None
        assert task is not None
        self.sent[task] -= 1
        self.happen(facts.TaskUndelivered(number, task))

    def _die(self, number: int) -> None:
        self.workers[number].is_gone = True
        self.workers[number].task = None
        self.happen(facts.WorkerGone(number))

    def _release(self, number: int) -> None:
        del self.workers[number]
        self.happen(facts.WorkerReleased(number))

    def close(self, fact: facts.ShutDown | facts.CrewInterrupted) -> None:
        self.is_closed = True
        self.happen(fact)

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
            found.append(("refused", lambda: self.happen(facts.WorkerRefused(number))))
        elif worker.is_started and not worker.is_ready:
            found.append(("ready", lambda: self._ready(number)))
            found.append(("unfit", lambda: self.happen(facts.WorkerUnfit(number))))
        if worker.is_leased:
            found.append(("hung up", lambda: self.happen(facts.WorkerHungUp(number))))
            found.append(("lost", lambda: self.happen(facts.WorkerLeaseLost(number))))
            found.append(("warned", lambda: self.happen(facts.WorkerWarned(number, True))))
            found.append(("goes on", lambda: self.happen(facts.WorkerWarned(number, False))))
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
