"""The thread of an executor: it tells the crew what happens, and carries out what the crew decides.

It passes tasks and answers on between the futures and the workers. Leases are the affair of lease_desk.py.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, ParamSpec

from . import lease_desk as desk
from . import worker as wire
from .crew import Crew, CrewActions, CrewRules, EndingWay, FailureCause, Phase
from .errors import ExecutorBrokenError
from .pickling import pickled_call
from .spawning import main_module, start_message
from .task_book import TaskBook, travelled
from .worker_process import WorkerAnswer, WorkerLease, WorkerProcess
from .worker_troubles import WorkerTroubles

logger = logging.getLogger("gpu_worker_pool.executor")

_ParamsT = ParamSpec("_ParamsT")
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """What the workers of an executor are. Without `has_max_workers`, there are as many as there are GPUs for."""

    rules: CrewRules
    has_max_workers: bool
    wishes: dict[str, Any]
    client_options: dict[str, Any]
    lease_timeout_s: float | None
    grace_s: float
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]


class Manager:
    """Runs the tasks of one executor in a thread that starts with the first of them. Safe to use from every thread."""

    def __init__(self, options: ManagerOptions) -> None:
        self._options = options
        self._name = f"GPUExecutor-{next(_numbers)}"
        # A garbage collection may close an executor in a thread that has the lock.
        self._lock = threading.RLock()
        self._tasks = TaskBook()
        actions = CrewActions(
            lease_worker=self._request,
            start_worker=self._start_worker,
            send_task=self._send,
            end_worker=self._end_worker,
            release_worker=self._release,
            fail_task=self._fail,
            repeat_task=self._log_repetition,
            cancel_task=self._tasks.cancel,
            break_crew=self._break,
        )
        self._crew = Crew(options.rules, actions)
        self._inbox: deque[Callable[[], None] | desk.LeaseNews] = deque()
        self._is_asleep = False
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._workers: dict[int, WorkerProcess] = {}
        self._leases: dict[int, WorkerLease] = {}
        self._troubles = WorkerTroubles()
        self.is_closed = False
        self.broken: ExecutorBrokenError | None = None
        self._pid = os.getpid()
        managers.add(self)

    def __repr__(self) -> str:
        phases = [member.phase for member in list(self._crew.members.values())]
        busy, requested = phases.count(Phase.BUSY), phases.count(Phase.REQUESTING)
        queued = len(self._crew.waiting) + len(self._crew.repeated)
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
            self.check_open()
            future.set_running_or_notify_cancel()
            future.set_exception(error)
            return
        with self._lock:
            self._check_open()
            self._start()
            task = self._tasks.add(future, call)
            self._post(partial(self._happen, self._crew.task_submitted, task))
        future.add_done_callback(partial(self._done, task))

    def check_open(self) -> None:
        """Raise where no task is accepted any more."""
        with self._lock:
            self._check_open()

    def close(self, *, cancels_tasks: bool = False) -> None:
        """Accept no more tasks, and end when all are settled."""
        self._tell(partial(self._happen, self._crew.shut_down, cancels_tasks=cancels_tasks))

    def interrupt(self) -> None:
        """Cancel what waits and end what runs, as Ctrl-C does; called again, at once."""
        self._tell(partial(self._happen, self._crew.interrupted))

    def join(self) -> None:
        """Wait until everything is settled and released."""
        thread = self._thread
        if thread is not None and self.is_own and thread is not threading.current_thread():
            # Not by the thread alone: until Python 3.13, one whose `join` was interrupted seems to have ended.
            self._ended.wait()
            thread.join()

    def forget(self) -> None:
        """Close what a forked process has of its parent's: a guard ends its worker when all ends of its line are closed."""
        self._lock = threading.RLock()
        for worker in self._workers.values():
            worker.forget()
        if self._thread is not None:
            self._awake.close()
            self._wake.close()

    def _tell(self, news: Callable[[], None]) -> None:
        with self._lock:
            self.is_closed = True
            if self._thread is not None and self.is_own:
                self._post(news)

    def _check_open(self) -> None:
        if not self.is_own:
            raise RuntimeError("this executor belongs to the process that made it: make another one after a fork")
        if self.broken is not None:
            raise self.broken
        if self.is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _start(self) -> None:
        if self._thread is None:
            self._main = main_module()
            self._awake, self._wake = socket.socketpair()
            for end in (self._awake, self._wake):
                end.setblocking(False)  # noqa: FBT003 - its only parameter
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _done(self, task: int, future: Future[Any]) -> None:
        if future.cancelled():
            self._post(partial(self._cancelled, task))

    def _post(self, news: Callable[[], None] | desk.LeaseNews) -> None:
        self._inbox.append(news)
        if self._is_asleep:
            self._is_asleep = False
            with suppress(OSError):  # it is full, so the thread will wake up; or closed, at the end
                self._wake.send(b"\0")

    # --- From here on, everything runs in the thread. ---------------------------------------------------------------

    def _run(self) -> None:
        options = self._options
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._desk = desk.LeaseDesk(
            options.wishes,
            options.client_options,
            self._post,
            timeout_s=options.lease_timeout_s,
            grace_s=options.grace_s,
        )
        try:
            while not self._crew.is_stopped:
                self._turn()
        except BaseException as error:
            logger.exception("the executor failed")
            # An error of ours must not leave callers waiting for ever.
            broken = ExecutorBrokenError(f"the executor failed: {error!r}; please report this")
            broken.__cause__ = error
            with self._lock:
                self.broken = broken
            self._tasks.fail_all(broken)
        finally:
            self._desk.close()
            for worker in self._workers.values():
                worker.close()
            self._selector.close()
            self._awake.close()
            self._wake.close()
            self._ended.set()

    def _turn(self) -> None:
        """Wait until something happens, and handle it."""
        self._is_asleep = True
        timeout_s: float | None = 0.0
        if not self._inbox:
            deadline = self._crew.next_deadline
            timeout_s = None if deadline is None else max(deadline - monotonic(), 0.0)
        ready = self._selector.select(timeout_s)
        self._is_asleep = False
        for key, _ in ready:
            if key.data is None:
                with suppress(BlockingIOError):
                    self._awake.recv(4096)
            elif key.data.number in self._workers:
                self._serve(key.data, is_guard=key.fileobj is key.data.guard_line)
        while self._inbox:
            self._take_in(self._inbox.popleft())
        deadline = self._crew.next_deadline
        if deadline is not None and monotonic() >= deadline:
            self._happen(self._crew.time_passed)

    def _happen(self, fact: Callable[_ParamsT, None], *args: _ParamsT.args, **kwargs: _ParamsT.kwargs) -> None:
        self._crew.handle(monotonic(), fact, *args, **kwargs)

    def _take_in(self, news: Callable[[], None] | desk.LeaseNews) -> None:
        match news:
            case desk.LeaseGrant(number, lease):
                self._leases[number] = lease
                self._happen(self._crew.worker_leased, number)
            case desk.LeaseRefusal(number, error):
                self._troubles.refusals[number] = error
                self._happen(self._crew.worker_refused, number)
            case desk.LeaseLoss(number, reason):
                self._troubles.losses[number] = reason
                self._happen(self._crew.worker_lease_lost, number)
            case desk.LeaseNotice(number, ends_at, reason):
                if number in self._workers:
                    self._troubles.notices[number] = reason
                    self._workers[number].tell_limit(self._leases[number].limit if ends_at is None else ends_at)
                    self._happen(self._crew.worker_warned, number, is_warned=ends_at is not None)
            case desk.LeaseSafety(number, until):
                if number in self._workers:
                    self._workers[number].tell_safe_until(until)
            case desk.LeaseReturn(number):
                self._forget_worker(number)
                self._happen(self._crew.worker_released, number)
            case desk.GpusSeen(count):
                self._see_gpus(count)
            case _:
                news()

    def _cancelled(self, task: int) -> None:
        if self._tasks.note_cancelled(task):
            self._happen(self._crew.task_cancelled, task)

    def _see_gpus(self, count: int) -> None:
        if not self._options.has_max_workers:
            most = max(count // int(self._options.wishes["gpus"]), 1)
            self._crew.rules = replace(self._crew.rules, max_workers=most)
            self._happen(self._crew.time_passed)

    def _request(self, number: int) -> None:
        try:
            worker = self._workers[number] = WorkerProcess(number)
        except (OSError, RuntimeError) as error:
            self._troubles.refusals[number] = error
            self._happen(self._crew.worker_refused, number)
            return
        self._watch(worker)
        self._desk.request(number, worker.guard_pid)

    def _start_worker(self, number: int) -> None:
        worker, options = self._workers[number], self._options
        try:
            name = f"{self._name}-worker-{number}"
            message, descriptors = start_message(name, self._main, options.initializer, options.initargs)
        except Exception as error:  # noqa: BLE001 - the initializer's own __reduce__
            self._troubles.unfit[number] = error
            self._happen(self._crew.worker_unfit, number)
            return
        worker.start(self._leases[number], message, descriptors)
        self._watch(worker)

    def _send(self, number: int, task: int) -> None:
        call = self._tasks.begin(task)
        if call is None:
            self._happen(self._crew.task_not_sent, number, task)
        elif not self._workers[number].send_task(task, call):
            self._happen(self._crew.task_undelivered, number, task)
        else:
            self._watch(self._workers[number])

    def _end_worker(self, number: int, way: EndingWay) -> None:
        self._desk.withdraw(number)
        if (worker := self._workers.get(number)) is None:
            self._happen(self._crew.worker_gone, number)
        else:
            worker.end(way)
            self._watch(worker)

    def _release(self, number: int) -> None:
        self._desk.release(number)

    def _fail(self, task: int, number: int, cause: FailureCause, attempts: int) -> None:
        error = self.broken or self._troubles.error(number, self._workers.get(number), cause, attempts)
        self._tasks.fail(task, error)

    def _log_repetition(self, task: int, number: int, cause: FailureCause, attempts: int) -> None:
        reason = self._troubles.reason(number, self._workers.get(number), cause)
        most = self._crew.rules.retries
        logger.warning("%s; task %d is repeated, for the %d. of %d times", reason, task, attempts, most)

    def _break(self, number: int, cause: FailureCause) -> None:
        with self._lock:
            self.broken = self._troubles.breakage(number, self._workers.get(number), cause)

    def _watch(self, worker: WorkerProcess) -> None:
        """Wait for what both lines bring, and until what is left to be sent can be."""
        for line in worker.lines:
            known = self._selector.get_map().get(line)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.has_unsent else 0)
            if line.is_over:
                if known is not None:
                    self._selector.unregister(line)
            elif known is None:
                self._selector.register(line, events, worker)
            elif known.events != events:
                self._selector.modify(line, events, worker)

    def _serve(self, worker: WorkerProcess, *, is_guard: bool) -> None:
        """Read from a worker's lines, and send what waits."""
        for line in worker.lines:
            if line.has_unsent:
                line.flush()
        was_gone = worker.is_gone
        if is_guard:
            worker.receive_from_guard()
        # After the guard: all that the worker had answered before its end is here by then.
        for answer in worker.receive_from_worker():
            self._take_answer(worker, answer)
        self._watch(worker)
        if worker.is_gone and not was_gone:
            self._happen(self._crew.worker_gone, worker.number)
        elif worker.has_hung_up and not worker.is_gone:
            self._happen(self._crew.worker_hung_up, worker.number)

    def _take_answer(self, worker: WorkerProcess, answer: WorkerAnswer) -> None:
        if answer.kind == wire.READY:
            self._happen(self._crew.worker_ready, worker.number)
        elif answer.kind == wire.UNFIT:
            self._troubles.unfit[worker.number] = travelled(answer.body)
            self._happen(self._crew.worker_unfit, worker.number)
        else:
            self._tasks.settle(answer)
            self._happen(self._crew.task_settled, worker.number, answer.task)

    def _forget_worker(self, number: int) -> None:
        worker = self._workers.pop(number, None)
        self._leases.pop(number, None)
        self._troubles.forget(number)
        if worker is not None:
            for line in worker.lines:
                with suppress(KeyError):
                    self._selector.unregister(line)
            worker.close()


# All that there are, for the end of the interpreter and for forks.
managers: weakref.WeakSet[Manager] = weakref.WeakSet()
