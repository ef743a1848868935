"""The workers of an executor, and which of them does what: an event loop in a thread of its own.

A worker is a lease, and a process on it that a ProcessPoolExecutor of its own gives one task at a time. It is a member of the
crew from the request for its lease until that lease is released, so there are never more leases than members. All that
belongs to the crew is used in the loop only. Users' futures are settled in other threads, because their callbacks may take
long, and no heartbeat waits for them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final

from gpu_worker_pool.client.pool_client import Assignment
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.models import LeaseEnding
from gpu_worker_pool.wire.endings import after_warning

from . import worker as program
from .errors import ExecutorBrokenError, WorkerLostError
from .leases import WorkerLeases
from .spawning import main_module
from .tasks import Task, pickled_call, travelled
from .worker_process import EndingWay, Phase, Worker

logger = logging.getLogger("gpu_worker_pool.executor")

# This many workers in a row that end before they are ready, while no other is, show that none will ever be.
_MOST_FAILED_STARTS: Final = 3
# How soon to request a lease again after such a death; each time twice as long, up to about half a minute.
_FIRST_PAUSE_S: Final = 0.05
_MOST_DOUBLINGS: Final = 9
# How soon to request more leases after a refusal, while there are workers to go on with.
_ASK_AGAIN_S: Final = 30.0
# For a worker that must end at once: enough for a handler of SIGTERM that only removes a file.
_LEAST_GRACE_S: Final = 0.5
_INTERRUPTED: Final = "the executor was interrupted"
# As in `worker 12345 on GPU 2 was killed by SIGTERM, because ...`
_LIMITED: Final = ", because its lease was about to reach its time limit"
_LATE: Final = ", because no heartbeat of its lease had reached the server for too long"
# More than there are workers: each has a thread while it starts and while it ends.
_MOST_THREADS: Final = 4096

_numbers = itertools.count(1)
# Of which crew the current thread settles a future.
_settling = threading.local()


@dataclass(frozen=True, slots=True)
class CrewOptions:
    """`max_workers`: None: as many as there are GPUs for. `retries`: how often a task is repeated whose worker died or lost
    its lease. `idle_release_s`: how long a worker without a task keeps its lease. `max_tasks`: after this many tasks a
    worker is replaced; None: never. `wishes`, `client_options` and `lease_timeout_s` are those of the leases.
    """

    max_workers: int | None
    retries: int
    idle_release_s: float
    max_tasks: int | None
    wishes: dict[str, Any]
    client_options: dict[str, Any]
    lease_timeout_s: float | None
    grace_s: float
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]


class Crew:
    """Runs the tasks of one executor in a thread that starts with the first of them. Safe to use from every thread."""

    def __init__(self, options: CrewOptions) -> None:
        self._options = options
        self._name = f"GPUExecutor-{next(_numbers)}"
        # A garbage collection may close an executor in a thread that has the lock.
        self._lock = threading.RLock()
        self._settling = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = threading.Event()
        self._inbox: deque[Callable[[], None]] = deque()
        self._task_numbers = itertools.count(1)
        # All that are not settled, and those of them that wait for a worker, the next one first.
        self._tasks: dict[int, Task] = {}
        self._waiting: OrderedDict[int, Task] = OrderedDict()
        self._workers: dict[Worker, asyncio.Task[None]] = {}
        self._max_workers = options.max_workers or 1
        self._failed_starts = 0
        self._ask_after = -inf
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._is_interrupted = False
        self.is_closed = False
        self.broken: ExecutorBrokenError | None = None
        self._pid = os.getpid()
        crews.add(self)

    def __repr__(self) -> str:
        phases = [worker.phase for worker in list(self._workers)]
        busy, requested = phases.count(Phase.BUSY), phases.count(Phase.REQUESTING)
        queued = len(self._waiting)
        return f"{len(phases) - requested} workers, {busy} busy; {requested} leases requested; {queued} tasks queued"

    @property
    def is_own(self) -> bool:
        """Whether this is the process that made it, and not a fork of that."""
        return os.getpid() == self._pid

    def submit(self, future: Future[Any], function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Have it called by a worker. The call is pickled now: later changes of its arguments do not reach it."""
        try:
            call = pickled_call(function, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the user's own __reduce__
            with self._lock:
                self._check_open()
            future.set_running_or_notify_cancel()
            future.set_exception(error)
            return
        with self._lock:
            self._check_open()
            self._start()
            task = Task(next(self._task_numbers), future, call)
            self._tasks[task.number] = task
            self._post(partial(self._accept, task))
        future.add_done_callback(partial(self._done, task))

    def close(self, *, cancels_tasks: bool = False) -> None:
        """Accept no more tasks, and end when all are settled."""
        self._close(partial(self._shut_down, cancels_tasks=cancels_tasks))

    def interrupt(self) -> None:
        """Cancel what waits and end what runs, as Ctrl-C does; called again, at once."""
        self._close(self._interrupt)

    def join(self) -> None:
        """Wait until everything is settled and released. A callback of one of its own futures does not wait: it would wait
        for itself.
        """
        if self._loop is not None and self.is_own and getattr(_settling, "crew", None) is not self:
            # Not for the thread: until Python 3.13, one whose `join` was interrupted seems to have ended.
            self._ended.wait()

    def forget(self) -> None:
        """Close what a forked process has of its parent's: a guard ends its worker when all ends of its line are closed."""
        self._lock = threading.RLock()
        for worker in self._workers:
            worker.guarded.forget()

    def _close(self, news: Callable[[], None]) -> None:
        with self._lock:
            self.is_closed = True
            if self._loop is not None and self.is_own:
                self._post(news)

    def _check_open(self) -> None:
        if not self.is_own:
            raise RuntimeError("this executor belongs to the process that made it: make another one after a fork")
        if self.broken is not None:
            raise self.broken
        if self.is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _start(self) -> None:
        """Start the thread. Where that is not possible (too many open files, say), the caller of `submit` is told."""
        if self._loop is None:
            self._main = main_module()
            loop = asyncio.new_event_loop()
            try:
                threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True).start()
            except BaseException:
                loop.close()
                raise
            self._loop = loop

    def _done(self, task: Task, future: Future[Any]) -> None:
        if future.cancelled():
            self._post(partial(self._drop, task))

    def _post(self, news: Callable[[], None]) -> None:
        """Have this called in the loop."""
        self._inbox.append(news)
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._take_in_posted)

    def _settle(self, task: Task, settle: Callable[..., None], *args: Any) -> None:
        """Settle a future, which calls its callbacks. Never in the loop."""
        # One after the other, as the callbacks of other executors are called.
        with self._settling:
            self._tasks.pop(task.number, None)
            _settling.crew = self
            try:
                settle(*args)
            finally:
                _settling.crew = None

    # --- From here on, everything runs in the loop, except `_answered`. ----------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_until_complete(self._serve())
        except BaseException as error:
            logger.exception("the executor failed")
            # An error of ours must not leave callers waiting for ever.
            broken = ExecutorBrokenError(f"the executor failed: {error!r}; please report this")
            broken.__cause__ = error
            with self._lock:
                self.broken = broken
            for task in list(self._tasks.values()):
                self._settle(task, task.fail, broken)
        finally:
            self._ended.set()
            loop.close()

    async def _serve(self) -> None:
        loop, options = asyncio.get_running_loop(), self._options
        loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, f"{self._name}-waiting"))
        self._stopped: asyncio.Future[None] = loop.create_future()
        self._leases = WorkerLeases(options.wishes, options.client_options, self._see_gpus, options.lease_timeout_s)
        try:
            self._take_in()
            await self._stopped
        finally:
            for work in self._workers.values():
                work.cancel()
            await asyncio.gather(*self._workers.values(), return_exceptions=True)
            await self._leases.close()
            await loop.shutdown_default_executor()

    def _take_in_posted(self) -> None:
        if self._inbox:
            self._take_in()

    def _take_in(self) -> None:
        """Handle what was posted, and do what follows."""
        try:
            while self._inbox:
                self._inbox.popleft()()
            self._adjust()
        except BaseException as error:  # noqa: BLE001 - `_run` raises it
            self._stop(error)

    def _stop(self, error: BaseException | None = None) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None) if error is None else self._stopped.set_exception(error)

    # --- what happens ------------------------------------------------------------------------------------------------

    def _accept(self, task: Task) -> None:
        self._waiting[task.number] = task
        if self.broken is not None:
            self._fail_waiting(self.broken)

    def _drop(self, task: Task) -> None:
        """Its caller has cancelled it. Those who wait for it are told, unless it has just been about to be sent."""
        if self._waiting.pop(task.number, None) is not None:
            self._tasks.pop(task.number, None)
            task.begin()

    def _answered(self, worker: Worker, task: Task, answer: Future[tuple[bool, bytes]]) -> None:
        """The worker has answered, or is gone. This is called in a thread of its pool."""
        error = answer.exception()
        if isinstance(error, BrokenProcessPool):
            self._post(partial(self._hang_up, worker, task))
            return
        # First this: the worker can go on while the answer is unpickled and the callbacks are called.
        self._post(partial(self._free, worker))
        if error is not None:
            self._settle(task, task.fail, error)  # Ctrl-C, just before or after the task
        else:
            self._settle(task, task.take_answer, *answer.result())

    def _free(self, worker: Worker) -> None:
        self._failed_starts = 0  # this worker has begun, so others can
        worker.tasks_done += 1
        if worker.phase is Phase.BUSY:
            worker.phase, worker.idle_since = Phase.IDLE, self._now
            if self._options.max_tasks is not None and worker.tasks_done >= self._options.max_tasks:
                self._end(worker, EndingWay.QUIETLY)

    def _hang_up(self, worker: Worker, task: Task | None = None) -> None:
        """It answers no more: it has just ended, or a task has closed its line."""
        worker.lost_task = task
        if worker.phase is Phase.STARTING:
            worker.was_lease_short = False
        self._end(worker, EndingWay.QUIETLY)

    def _lose_lease(self, worker: Worker, reason: str) -> None:
        worker.loss = reason
        if worker.phase is Phase.STARTING:
            worker.was_lease_short = True
        self._end(worker, EndingWay.TERMINATE, f"the worker's lease{worker.where} was lost: {reason}")
        self._adjust()

    def _warn(self, worker: Worker, ending: LeaseEnding | None) -> None:
        worker.notice = "" if ending is None else ending.reason
        self._adjust()

    def _see_gpus(self, count: int) -> None:
        if self._options.max_workers is None:
            self._max_workers = max(count // int(self._options.wishes["gpus"]), 1)
            self._adjust()

    def _refuse(self, error: Exception) -> None:
        """There will be no lease for a worker: none could ever be granted, or not in time."""
        if self._is_any(Phase.STARTING, Phase.IDLE, Phase.BUSY):
            self._pause(_ASK_AGAIN_S)
        else:
            self._fail_waiting(error)

    def _shut_down(self, *, cancels_tasks: bool = False) -> None:
        self._is_closing = True
        if cancels_tasks:
            # Those that are to be repeated run, for their callers.
            tasks = [task for task in self._waiting.values() if not task.is_running]
            for task in tasks:
                del self._waiting[task.number]
            self._settle_aside(tasks, Task.cancel)

    def _interrupt(self) -> None:
        is_again, self._is_interrupted = self._is_interrupted, True
        self._shut_down(cancels_tasks=True)
        self._fail_waiting(WorkerLostError(_INTERRUPTED))
        ways = {Phase.STARTING: EndingWay.TERMINATE, Phase.BUSY: EndingWay.INTERRUPT}
        for worker in self._workers:
            way = EndingWay.AT_ONCE if is_again else ways.get(worker.phase)
            if way is not None:
                self._end(worker, way, _INTERRUPTED)

    # --- the life of a worker ----------------------------------------------------------------------------------------

    async def _employ(self, worker: Worker) -> None:
        """Request its lease, run its process, and release the lease when nothing of it is left."""
        try:
            assignment = await self._leased(worker)
            if assignment is not None:
                try:
                    await self._run_worker(worker, assignment)
                finally:
                    await self._leases.release(assignment)
        finally:
            await worker.close()

    async def _leased(self, worker: Worker) -> Assignment | None:
        """Its lease; None where there will be none, or it is not wanted any more."""
        worker.request = asyncio.create_task(self._leases.request(worker.guarded.pid))
        try:
            assignment = await worker.request
        except asyncio.CancelledError:
            if worker.phase is not Phase.LEAVING:
                raise
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, the tasks must hear of it
            worker.phase = Phase.LEAVING
            if worker.is_guard_gone:
                self._fail_start(worker)
            else:
                self._refuse(error)
            return None
        if worker.phase is Phase.LEAVING:
            await self._leases.release(assignment)
            return None
        worker.phase = Phase.STARTING
        return assignment

    async def _run_worker(self, worker: Worker, assignment: Assignment) -> None:
        starting = asyncio.create_task(self._get_ready(worker))
        try:
            warned, lost = partial(self._warn, worker), partial(self._lose_lease, worker)
            await worker.run(assignment, self._options.grace_s, warned, lost)
        finally:
            # All that it had answered is settled then, also where it died.
            await asyncio.gather(starting, worker.close_pool(), return_exceptions=True)
        was_starting, worker.phase = worker.phase is Phase.STARTING, Phase.LEAVING
        self._take_in()
        if was_starting or worker.was_lease_short is not None:
            self._fail_start(worker)
        elif worker.lost_task is not None:
            self._lose(worker.lost_task, worker)

    async def _get_ready(self, worker: Worker) -> None:
        """Send the process what it needs to start, and wait for its first answer."""
        try:
            first = await asyncio.to_thread(worker.pool.submit, program.answer_first)
            pid, failure = await asyncio.wrap_future(first)
        except (BrokenProcessPool, ConnectionError):
            self._hang_up(worker)
        except Exception as error:  # noqa: BLE001 - the initializer's own __reduce__
            if worker.phase is Phase.STARTING:
                self._break(worker, _unfit(error))
            worker.send_nothing()
        else:
            worker.pid = pid
            if failure is not None:
                self._break(worker, _unfit(travelled(failure)))
            elif worker.phase is Phase.STARTING:
                # One that was warned before does no task, so it does not show that others will.
                self._failed_starts = 0
                worker.phase, worker.idle_since = Phase.IDLE, self._now
        self._take_in()

    def _end(self, worker: Worker, way: EndingWay, cause: str | None = None) -> None:
        if worker.phase is Phase.LEAVING and way <= worker.way:
            return
        worker.cause = worker.cause or cause  # the first one is why it ends
        is_requesting, worker.phase, worker.way = worker.phase is Phase.REQUESTING, Phase.LEAVING, way
        if worker.request is not None and is_requesting:
            worker.request.cancel()
        else:
            worker.end(way)

    # --- decisions ---------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _adjust(self) -> None:
        """Send tasks to idle workers, request leases that are missing, end workers that have nothing to do."""
        options, now = self._options, self._now
        for worker in self._workers:
            if worker.notice and worker.phase in {Phase.STARTING, Phase.IDLE}:
                if worker.phase is Phase.STARTING:
                    worker.was_lease_short = True
                self._end(worker, EndingWay.QUIETLY)
        idle = [worker for worker in self._workers if worker.phase is Phase.IDLE]
        # The one that worked last first, so that the others become free.
        for worker in sorted(idle, key=lambda worker: worker.idle_since, reverse=True):
            has_nothing_to_do = not self._send_next(worker)
            if has_nothing_to_do and (self._is_closing or now >= worker.idle_since + options.idle_release_s):
                self._end(worker, EndingWay.QUIETLY)
        missing = self._missing()
        if now >= self._ask_after:
            for _ in range(missing):
                self._request()
        # Those that came last are the last in the queue.
        unwanted = [worker for worker in self._workers if worker.phase is Phase.REQUESTING]
        if self._is_closing and not self._waiting:
            unwanted += [worker for worker in self._workers if worker.phase is Phase.STARTING]
        for worker in unwanted[::-1][: max(-missing, 0)]:
            self._end(worker, EndingWay.QUIETLY)
        self._set_timer()
        if self._is_closing and not (self._workers or self._waiting):
            self._stop()

    def _set_timer(self) -> None:
        """Come back when an idle worker may have to end."""
        idle = [worker.idle_since for worker in self._workers if worker.phase is Phase.IDLE]
        if idle and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(min(idle) + self._options.idle_release_s, self._wake_up)

    def _wake_up(self) -> None:
        self._timer = None
        self._take_in()

    def _pause(self, pause_s: float) -> None:
        """Request no leases for so long."""
        self._ask_after = max(self._ask_after, self._now + pause_s)
        asyncio.get_running_loop().call_at(self._ask_after, self._take_in)

    def _send_next(self, worker: Worker) -> bool:
        """Send the next task to this worker; whether there was one."""
        while self._waiting:
            number, task = self._waiting.popitem(last=False)
            if not task.begin():
                self._tasks.pop(number, None)
                continue
            try:
                answer = worker.pool.submit(program.run, task.call)
            except RuntimeError:
                # The pool is broken. The task has certainly not begun, so another worker begins it for the first time.
                self._put_back(task)
                self._hang_up(worker)
                return True
            task.attempts += 1
            worker.phase = Phase.BUSY
            answer.add_done_callback(partial(self._answered, worker, task))
            return True
        return False

    def _request(self) -> None:
        """Request a lease for a new worker."""
        try:
            worker = Worker(self._main, self._options.initializer, self._options.initargs)
        except (OSError, Failure) as error:
            self._refuse(RuntimeError(str(error)) if isinstance(error, Failure) else error)
            return
        self._workers[worker] = work = asyncio.create_task(self._employ(worker))
        work.add_done_callback(partial(self._release, worker))

    def _release(self, worker: Worker, work: asyncio.Task[None]) -> None:
        """It has no lease any more, and nothing of it is left."""
        del self._workers[worker]
        if not work.cancelled() and (error := work.exception()) is not None:
            self._stop(error)
        self._take_in()

    def _missing(self) -> int:
        """How many leases there are too few for the tasks that wait; below 0: how many are requested too many."""
        coming = sum(worker.phase in {Phase.REQUESTING, Phase.STARTING} for worker in self._workers)
        return min(len(self._waiting) - coming, self._max_workers - len(self._workers))

    def _is_any(self, *phases: Phase) -> bool:
        return any(worker.phase in phases for worker in self._workers)

    def _lose(self, task: Task, worker: Worker) -> None:
        """Repeat a task whose worker is gone, or fail it. Only now: before, its first run might still go on."""
        most = self._options.retries + 1
        if task.attempts < most and not self._is_interrupted and self.broken is None:
            logger.warning(
                "%s; retrying task %d (attempt %d of %d)", worker.reason, task.number, task.attempts + 1, most
            )
            self._put_back(task)
            return
        error = WorkerLostError(worker.reason, exit_code=worker.exit_code, attempts=task.attempts)
        self._settle_aside([task], partial(Task.fail, error=self.broken or error))

    def _put_back(self, task: Task) -> None:
        self._waiting[task.number] = task
        self._waiting.move_to_end(task.number, last=False)
        if self.broken is not None or self._is_interrupted:
            self._fail_waiting(self.broken or WorkerLostError(_INTERRUPTED))

    def _fail_start(self, worker: Worker) -> None:
        """Request the next lease a little later. After too many such starts no task can be done: a worker that dies is the
        program's fault, so the executor is broken; leases may be longer the next time.
        """
        self._failed_starts += 1
        self._pause(_FIRST_PAUSE_S * 2 ** min(self._failed_starts, _MOST_DOUBLINGS))
        if self._failed_starts < _MOST_FAILED_STARTS or self._is_any(Phase.IDLE, Phase.BUSY):
            return
        if not worker.was_lease_short:
            self._break(
                worker,
                ExecutorBrokenError(
                    f"the workers end before they are ready; of the last one, {worker.reason}. What they wrote to standard "
                    "error says more"
                ),
            )
            return
        self._failed_starts = 0
        known = f"was over {after_warning(worker.notice)}" if worker.notice else "was lost"
        why = "" if worker.loss is None else f": {worker.loss}"
        self._fail_waiting(
            WorkerLostError(
                f"leases end before their workers are ready; that of the last worker {known}{why}", attempts=0
            )
        )

    def _break(self, worker: Worker, error: ExecutorBrokenError) -> None:
        """Refuse tasks from now on: this worker shows that none can do them."""
        with self._lock:
            self.broken = self.broken or error
        self._fail_waiting(self.broken)
        self._end(worker, EndingWay.QUIETLY)

    def _fail_waiting(self, error: BaseException) -> None:
        tasks = list(self._waiting.values())
        self._waiting.clear()
        self._settle_aside(tasks, lambda task: task.fail(_for_task(error, task)))

    def _settle_aside(self, tasks: list[Task], settle: Callable[[Task], None]) -> None:
        """Settle futures in another thread."""

        def settle_all() -> None:
            for task in tasks:
                self._settle(task, settle, task)

        asyncio.get_running_loop().run_in_executor(None, settle_all)


def _for_task(error: BaseException, task: Task) -> BaseException:
    """Each task says how often it was begun."""
    return WorkerLostError(error.reason, attempts=task.attempts) if isinstance(error, WorkerLostError) else error


def _unfit(error: BaseException) -> ExecutorBrokenError:
    broken = ExecutorBrokenError(
        f"a worker could not start, because it could not load the main module or the initializer failed: {error!r}"
    )
    broken.__cause__ = error
    return broken


# All that there are, for the end of the interpreter and for forks.
crews: weakref.WeakSet[Crew] = weakref.WeakSet()
