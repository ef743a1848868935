"""The workers of an executor, and which of them does what, in the event loop of its thread.

A worker is a lease, and a process on it that a ProcessPoolExecutor of its own gives one task at a time. Its life is one
coroutine, `_employ`: it requests the lease, takes one task after the other, and releases the lease when nothing of the
process is left. So there are never more leases than workers. Users' futures are settled in other threads, because their
callbacks may take long, and no heartbeat waits for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from math import inf
from typing import Any, Final

from gpu_worker_pool.client.local_client import UNLIMITED_S
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.models import Assignment, LeaseEnding
from gpu_worker_pool.wire.leases import after_warning

from .errors import ExecutorBrokenError, WorkerLostError, cannot_start
from .tasks import Settle, Task
from .worker_process import Phase, Worker, WorkerOptions

logger = logging.getLogger("gpu_worker_pool.executor")

# This many workers in a row that end before they are ready, while no other is, show that none will ever be.
_MOST_FAILED_STARTS: Final = 3
# How soon to request a lease again after such a death; each time twice as long, up to about half a minute.
_FIRST_PAUSE_S: Final = 0.05
_MOST_DOUBLINGS: Final = 9
# How soon to request more leases after a refusal, while there are workers to go on with.
_ASK_AGAIN_S: Final = 30.0
_INTERRUPTED: Final = "the executor was interrupted"


class Crew:
    """All of it is used in the loop only. `main`: how a worker loads the main module."""

    def __init__(self, options: WorkerOptions, main: Mapping[str, Any], settle: Settle) -> None:
        self._options, self._main, self._settle = options, main, settle
        # Those that wait for a worker, the next one first.
        self._waiting: OrderedDict[int, Task] = OrderedDict()
        self.workers: dict[Worker, asyncio.Task[None]] = {}
        # Those that wait for a task; the one that worked last is the last.
        self._idle: list[Worker] = []
        self._max_workers = options.max_workers or 1
        self._failed_starts = 0
        self._request_after = -inf
        self._is_closing = False
        self._is_interrupted = False
        self._error: BaseException | None = None
        self._has_ended = asyncio.Event()
        # Why no worker can do a task.
        self.broken: ExecutorBrokenError | None = None

    def __repr__(self) -> str:
        phases = [worker.phase for worker in list(self.workers)]
        busy, requested = phases.count(Phase.BUSY), phases.count(Phase.REQUESTING)
        queued = len(self._waiting)
        return f"{len(phases) - requested} workers, {busy} busy; {requested} leases requested; {queued} tasks queued"

    async def work(self) -> None:
        """Work until it is closed and all is done; raises what must not happen."""
        try:
            await self._has_ended.wait()
        finally:
            for work in self.workers.values():
                work.cancel()
            await asyncio.gather(*self.workers.values(), return_exceptions=True)
            await self._options.client.stop()
        if self._error is not None:
            raise self._error

    def take_in(self, happen: Callable[..., None], *args: Any) -> None:
        """Handle what has happened, and do what follows."""
        try:
            happen(*args)
            self._adjust()
        except BaseException as error:  # noqa: BLE001 - `work` raises it
            self._error = error
            self._has_ended.set()

    # --- what happens ------------------------------------------------------------------------------------------------

    def accept(self, task: Task) -> None:
        self._waiting[task.number] = task
        if self.broken is not None:
            self._fail_waiting(self.broken)

    def drop(self, task: Task) -> None:
        """Its caller has cancelled it. Those who wait for it are told, unless it has just been about to be sent."""
        if self._waiting.pop(task.number, None) is not None:
            task.begin()

    def close(self, *, cancels_tasks: bool = False) -> None:
        self._is_closing = True
        if cancels_tasks:
            # Those that are to be repeated run, for their callers.
            tasks = [task for task in self._waiting.values() if not task.is_running]
            for task in tasks:
                del self._waiting[task.number]
            self._settle_aside(tasks, Task.cancel)

    def interrupt(self) -> None:
        is_again, self._is_interrupted = self._is_interrupted, True
        self.close(cancels_tasks=True)
        self._fail_waiting(WorkerLostError(_INTERRUPTED))
        for worker in self.workers:
            if worker.phase in {Phase.STARTING, Phase.BUSY} or (is_again and worker.phase is Phase.LEAVING):
                worker.interrupt(_INTERRUPTED, is_again=is_again)

    def _warn(self, worker: Worker, ending: LeaseEnding | None) -> None:
        """Its lease is about to end, or not any more: one that has a task finishes it."""
        worker.notice = "" if ending is None else ending.reason
        if worker.notice and worker.phase in {Phase.STARTING, Phase.IDLE}:
            self._dismiss(worker)

    # --- the life of a worker --------------------------------------------------------------------------------------------

    def _hire(self) -> None:
        """Request a lease for a new worker."""
        try:
            worker = Worker(self._main, self._options)
        except (OSError, Failure) as error:
            self._refuse(RuntimeError(str(error)) if isinstance(error, Failure) else error)
            return
        self.workers[worker] = work = asyncio.create_task(self._employ(worker))
        work.add_done_callback(partial(self.take_in, self._part, worker))

    def _part(self, worker: Worker, work: asyncio.Task[None]) -> None:
        """It has no lease any more, and nothing of it is left."""
        del self.workers[worker]
        if not work.cancelled():
            work.result()

    async def _employ(self, worker: Worker) -> None:
        """Request its lease, run its process, and release the lease when nothing of it is left."""
        try:
            assignment = await self._leased(worker.guarded.pid)
        except Exception as error:  # noqa: BLE001 - whatever it is, the tasks must hear of it
            worker.phase = Phase.LEAVING
            if worker.is_guard_gone:
                self._fail_start(worker)
            else:
                self._refuse(error)
        else:
            worker.phase = Phase.STARTING
            working = asyncio.create_task(self._work(worker))
            try:
                await worker.run(assignment, partial(self._warn, worker), partial(self._dismiss, worker))
            finally:
                self._dismiss(worker)
                # All that it had answered is taken in then, also where it died.
                await asyncio.gather(working, worker.close_pool())
                await self._options.client.release(assignment)
            if worker.task is not None:
                self._lose(worker.task, worker)
            elif not (worker.was_ready or worker.is_unwanted):
                self._fail_start(worker)
        finally:
            await worker.close()

    async def _leased(self, holder: int) -> Assignment:
        """Wait for a lease that belongs to this process. Where there is a limit, a server that does not answer is waited for."""
        client, timeout_s, began = self._options.client, self._options.lease_timeout_s, self._now
        count = await client.start(timeout_s or 0.0)
        if self._options.max_workers is None:
            self._max_workers = max(count // self._options.wishes["gpus"], 1)
            self._adjust()
        left_s = UNLIMITED_S if timeout_s is None else max(timeout_s - (self._now - began), 0.0)
        return await client.request(left_s, {**self._options.wishes, "pid": holder})

    async def _work(self, worker: Worker) -> None:
        """Start its process, and give it one task after the other until it leaves."""
        try:
            failure = await worker.prepare()
            # One that was warned before does no task, so it does not show that others will.
            if worker.phase is Phase.STARTING:
                if failure is not None:
                    self._break(worker, cannot_start(failure))
                    return
                worker.was_ready = True
            while (task := await self._next_task(worker)) is not None:
                await self._run(worker, task)
        except BrokenProcessPool:
            pass  # it has ended
        finally:
            worker.leave()

    async def _next_task(self, worker: Worker) -> Task | None:
        """The next task for this worker; None if it must leave, or there was none for some time."""
        worker.task = None
        is_done = self._options.max_tasks is not None and worker.tasks_done >= self._options.max_tasks
        if worker.notice or is_done or worker.phase is Phase.LEAVING:
            return None
        self._failed_starts = 0  # this worker has begun, so others can
        worker.phase, worker.given = Phase.IDLE, asyncio.get_running_loop().create_future()
        self._idle.append(worker)
        self._adjust()
        if not worker.given.done():
            await asyncio.wait({worker.given}, timeout=self._options.idle_release_s)
        if worker in self._idle:
            self._idle.remove(worker)
        return worker.given.result() if worker.given.done() else None

    async def _run(self, worker: Worker, task: Task) -> None:
        """Have it do the task. BrokenProcessPool if it ends before."""
        loop = asyncio.get_running_loop()
        answered = loop.create_future()

        def settle(answer: Future[tuple[bool, bytes]]) -> None:
            """Called in a thread of the worker's pool."""
            error = answer.exception()
            if isinstance(error, BrokenProcessPool):
                loop.call_soon_threadsafe(answered.set_exception, error)
                return
            # First this: the worker can go on while the answer is unpickled and the callbacks are called.
            loop.call_soon_threadsafe(answered.set_result, None)
            # An error is Ctrl-C, just before or after the task.
            take = partial(Task.fail, error=error) if error else partial(Task.take_answer, answer=answer.result())
            self._settle([task], take)

        try:
            worker.send(task).add_done_callback(settle)
        except RuntimeError:
            # It has ended, and the task has certainly not begun: another worker begins it for the first time.
            self._put_back(task)
            raise BrokenProcessPool from None
        await answered

    def _dismiss(self, worker: Worker) -> None:
        """Have it leave: now if it waits for a lease or a task, else after its task."""
        if worker.phase is Phase.REQUESTING:
            worker.phase = Phase.LEAVING
            # Not now: it may be new, and what has not begun would not be closed.
            asyncio.get_running_loop().call_soon(self.workers[worker].cancel)
            return
        if worker in self._idle:
            self._idle.remove(worker)
        worker.leave()

    # --- decisions ---------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _adjust(self) -> None:
        """Give tasks to idle workers, request leases that are missing, dismiss workers that are too many."""
        while self._idle and (task := self._take_waiting()) is not None:
            # The one that worked last, so that the others become free.
            worker = self._idle.pop()
            worker.phase = Phase.BUSY
            worker.given.set_result(task)
        for worker in list(self._idle) if self._is_closing else ():
            self._dismiss(worker)
        # How many leases there are too few for the tasks that wait; below 0: how many are requested too many.
        coming = sum(worker.phase in {Phase.REQUESTING, Phase.STARTING} for worker in self.workers)
        missing = min(len(self._waiting) - coming, self._max_workers - len(self.workers))
        if self._now >= self._request_after:
            for _ in range(missing):
                self._hire()
        # Those that came last are the last in the queue.
        unwanted = [worker for worker in self.workers if worker.phase is Phase.REQUESTING]
        if self._is_closing and not self._waiting:
            unwanted += [worker for worker in self.workers if worker.phase is Phase.STARTING]
        for worker in unwanted[::-1][: max(-missing, 0)]:
            worker.is_unwanted = True
            self._dismiss(worker)
        if self._is_closing and not (self.workers or self._waiting):
            self._has_ended.set()

    def _take_waiting(self) -> Task | None:
        """The next task that has not been cancelled."""
        while self._waiting:
            _, task = self._waiting.popitem(last=False)
            if task.begin():
                return task
        return None

    def _is_any(self, *phases: Phase) -> bool:
        return any(worker.phase in phases for worker in self.workers)

    def _pause(self, pause_s: float) -> None:
        """Request no leases for this time."""
        self._request_after = max(self._request_after, self._now + pause_s)
        asyncio.get_running_loop().call_at(self._request_after, self.take_in, lambda: None)

    def _refuse(self, error: Exception) -> None:
        """There will be no lease for a worker: none could ever be granted, or not in time."""
        if self._is_any(Phase.STARTING, Phase.IDLE, Phase.BUSY):
            self._pause(_ASK_AGAIN_S)
        else:
            self._fail_waiting(error)

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
        if not worker.notice and worker.loss is None:
            why = f"the workers end before they are ready; of the last one, {worker.reason}"
            self._break(worker, ExecutorBrokenError(f"{why}. What they wrote to standard error says more"))
            return
        self._failed_starts = 0
        known = f"was over {after_warning(worker.notice)}" if worker.notice else "was lost"
        why = "" if worker.loss is None else f": {worker.loss}"
        short = f"leases end before their workers are ready; that of the last worker {known}{why}"
        self._fail_waiting(WorkerLostError(short, attempts=0))

    def _break(self, worker: Worker, error: ExecutorBrokenError) -> None:
        """Refuse tasks from now on: this worker shows that none can do them."""
        self.broken = self.broken or error
        self._fail_waiting(self.broken)
        worker.is_unwanted = True
        worker.leave()

    def _fail_waiting(self, error: BaseException) -> None:
        def fail(task: Task) -> None:
            # Each task says how often it was begun.
            lost = WorkerLostError(error.reason, attempts=task.attempts) if isinstance(error, WorkerLostError) else None
            task.fail(lost or error)

        tasks = list(self._waiting.values())
        self._waiting.clear()
        self._settle_aside(tasks, fail)

    def _settle_aside(self, tasks: Iterable[Task], settle: Callable[[Task], None]) -> None:
        asyncio.get_running_loop().run_in_executor(None, self._settle, tasks, settle)
