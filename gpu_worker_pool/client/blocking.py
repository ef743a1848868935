"""The same client for programs without asyncio. An event loop in a thread of its own does the work."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Self, TypeVar

from gpu_worker_pool.models import PoolStatus

from .pool_client import Assignment, GPUWorkerPoolClient

_BlockingT = TypeVar("_BlockingT")
_ReleaseLate = Callable[[Any], Coroutine[Any, Any, None]]
# How long the end of the program waits for GPUs to be released.
END_S = 10.0


class GPUWorkerPool:
    """Every method of GPUWorkerPoolClient, blocking. Safe to use from several threads at once.

    After a fork it belongs to the parent: the child neither renews nor releases what its parent holds, and must create
    a pool of its own.
    """

    def __init__(self, service_endpoint: str | None = None, **options: Any) -> None:
        self._make_client = partial(GPUWorkerPoolClient, service_endpoint, **options)
        self._client = self._make_client()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<GPUWorkerPool around {self._client!r}>"

    def start(self) -> None:
        """Start; RuntimeError where it is started already."""
        with self._lock:
            if self._thread is not None:
                raise RuntimeError("the pool is already started")
            self._pid = os.getpid()
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(loop,), name="gpu-worker-pool", daemon=True)
            thread.start()
            self._loop, self._thread = loop, thread
        try:
            self._wait(self._client.start())
        except BaseException:
            self._end_thread()
            raise

    def stop(self) -> None:
        """Release all GPUs, and stop. Stopping twice is harmless."""
        if self._thread is None:
            return
        if os.getpid() != self._pid:
            # A forked child has no such thread, and what the client holds is its parent's.
            self._loop = self._thread = None
            self._lock = threading.Lock()
            self._client = self._make_client()
            return
        try:
            self._wait(self._client.stop())
        finally:
            self._end_thread()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def request_gpu(self, timeout: float | None = None, **wishes: Any) -> Assignment:
        """Wait for a GPU. Interrupted (Ctrl-C), it leaves nothing behind."""
        return self._wait(self._client.request_gpu(timeout, **wishes), release=self._client.release_gpu)

    def release_gpu(self, assignment: Assignment) -> None:
        """Release a GPU."""
        self._wait(self._client.release_gpu(assignment))

    @contextmanager
    def gpu(self, timeout: float | None = None, **wishes: Any) -> Iterator[Assignment]:
        """A GPU for the length of a `with` block; StaleAssignmentError at its end if it was lost."""
        assignment = self.request_gpu(timeout, **wishes)
        try:
            yield assignment
        except BaseException:
            if not assignment.is_lost and os.getpid() == self._pid:
                self.release_gpu(assignment)
            raise
        if os.getpid() == self._pid:  # in a forked child it is still its parent's
            self.release_gpu(assignment)

    def is_multi_endpoint_mode(self) -> bool:
        """See `GPUWorkerPoolClient.is_multi_endpoint_mode`."""
        return self._client.is_multi_endpoint_mode()

    def get_pool_status(self) -> PoolStatus:
        """See `GPUWorkerPoolClient.get_pool_status`."""
        return self._ask(self._client.get_pool_status)

    def get_detailed_metrics(self) -> dict[str, Any]:
        """See `GPUWorkerPoolClient.get_detailed_metrics`."""
        return self._ask(self._client.get_detailed_metrics)

    def get_endpoints_info(self) -> list[dict[str, Any]] | None:
        """See `GPUWorkerPoolClient.get_endpoints_info`."""
        return None if self._thread is None else self._ask(self._client.get_endpoints_info)

    def get_error_recovery_status(self) -> dict[str, Any]:
        """See `GPUWorkerPoolClient.get_error_recovery_status`."""
        return self._ask(self._client.get_error_recovery_status)

    def print_error_recovery_summary(self) -> None:
        """See `GPUWorkerPoolClient.print_error_recovery_summary`."""
        self._ask(self._client.print_error_recovery_summary)

    def trigger_endpoint_recovery(self, endpoint_id: str) -> bool:
        """See `GPUWorkerPoolClient.trigger_endpoint_recovery`."""
        return self._wait(self._client.trigger_endpoint_recovery(endpoint_id))

    def queue_request_for_retry(self, request_func: Callable[[], _BlockingT]) -> _BlockingT:
        """See `GPUWorkerPoolClient.queue_request_for_retry`; the function blocks, and runs in a thread of its own."""
        return self._wait(self._client.queue_request_for_retry(partial(asyncio.to_thread, request_func)))

    def _ask(self, function: Callable[[], _BlockingT]) -> _BlockingT:
        async def ask() -> _BlockingT:
            return function()

        return self._wait(ask())

    def _wait(self, work: Coroutine[Any, Any, _BlockingT], release: _ReleaseLate | None = None) -> _BlockingT:
        """Wait for work in the loop's thread. An interrupted caller cancels it, and releases what it still brings."""
        loop, problem = self._loop, None
        if loop is None:
            problem = "the pool is not started: use `with`, or call start() first"
        elif os.getpid() != self._pid:
            problem = "this pool belongs to the process that started it: make another one after a fork"
        elif threading.current_thread() is self._thread:
            problem = "a hook must not call the pool: it runs in the thread that would have to answer"
        if loop is None or problem is not None:
            work.close()
            raise RuntimeError(problem)
        call = _LoopCall(work)
        loop.call_soon_threadsafe(call.start)
        try:
            return call.future.result()
        except BaseException:
            if not call.has_failed:
                _release_unclaimed(call, release, loop)
            raise

    def _end_thread(self) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(END_S)


class _LoopCall(Generic[_BlockingT]):
    """Work in the loop's thread. Its future is never cancelled itself: it would forget a result that just arrives."""

    def __init__(self, work: Coroutine[Any, Any, _BlockingT]) -> None:
        self.future: Future[_BlockingT] = Future()
        self._work = work
        self._task: asyncio.Task[_BlockingT] | None = None

    @property
    def has_failed(self) -> bool:
        return self.future.done() and self.future.exception() is not None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._work)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _done(self, task: asyncio.Task[_BlockingT]) -> None:
        if task.cancelled():
            self.future.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def _release_unclaimed(
    call: _LoopCall[_BlockingT], release: _ReleaseLate | None, loop: asyncio.AbstractEventLoop
) -> None:
    loop.call_soon_threadsafe(call.cancel)
    try:
        got = call.future.result(END_S)
    except (CancelledError, Exception):  # noqa: BLE001 - however it ended, it has no result
        return
    if release is not None:
        asyncio.run_coroutine_threadsafe(release(got), loop).result(END_S)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
