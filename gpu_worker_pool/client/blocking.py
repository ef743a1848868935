"""The same client for programs without asyncio, with an event loop in a thread of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from gpu_worker_pool.models import Assignment, LeaseInfo, PoolStatus

from .options import PoolOptions, RequestWishes
from .pool_client import GPUWorkerPoolClient

if TYPE_CHECKING:
    from .loop_thread import LoopThread

_BlockingT = TypeVar("_BlockingT")


class GPUWorkerPool:
    """Every method of GPUWorkerPoolClient, blocking. Safe to use from several threads at once.

    After a fork it belongs to the parent: the child neither renews nor releases what its parent holds, and must create
    a pool of its own.
    """

    def __init__(self, service_endpoint: str | None = None, **options: Unpack[PoolOptions]) -> None:
        self._make_client = partial(GPUWorkerPoolClient, service_endpoint, **options)
        self._client = self._make_client()
        self._thread: LoopThread | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<GPUWorkerPool around {self._client!r}>"

    def start(self) -> None:
        """Start; RuntimeError where it is started already."""
        with self._lock:
            if self._thread is not None:
                raise RuntimeError("the pool is already started")
            from .loop_thread import LoopThread  # noqa: PLC0415 - a program that imports this may never start a pool

            self._pid = os.getpid()
            self._thread = LoopThread()
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
            self._thread = None
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

    def request_gpu(self, timeout: float | None = None, **wishes: Unpack[RequestWishes]) -> Assignment:
        """Wait for a GPU. Interrupted (Ctrl-C), it leaves nothing behind."""
        return self._wait(self._client.request_gpu(timeout, **wishes), self._client.release_gpu)

    def release_gpu(self, assignment: Assignment, *, note: str | None = None) -> None:
        """Release a GPU; see `GPUWorkerPoolClient.release_gpu`."""
        self._wait(self._client.release_gpu(assignment, note=note))

    @contextmanager
    def gpu(self, timeout: float | None = None, **wishes: Unpack[RequestWishes]) -> Iterator[Assignment]:
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

    def leases(self, *, mine: bool = False) -> list[LeaseInfo]:
        """See `GPUWorkerPoolClient.leases`."""
        return self._wait(self._client.leases(mine=mine))

    def lease(self, lease_id: str) -> LeaseInfo | None:
        """See `GPUWorkerPoolClient.lease`."""
        return self._wait(self._client.lease(lease_id))

    def is_multi_endpoint_mode(self) -> bool:
        """See `GPUWorkerPoolClient.is_multi_endpoint_mode`."""
        return self._client.is_multi_endpoint_mode()

    def refresh(self) -> None:
        """See `GPUWorkerPoolClient.refresh`; each report here does this first."""
        self._wait(self._client.refresh())

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
        from asyncio import to_thread  # noqa: PLC0415 - loaded by now

        return self._wait(self._client.queue_request_for_retry(partial(to_thread, request_func)), _drop)

    def _ask(self, function: Callable[[], _BlockingT]) -> _BlockingT:
        async def ask() -> _BlockingT:
            await self._client.refresh()
            return function()

        return self._wait(ask())

    def _wait(
        self,
        work: Coroutine[Any, Any, _BlockingT],
        undo: Callable[[_BlockingT], Coroutine[Any, Any, None]] | None = None,
    ) -> _BlockingT:
        """See `LoopThread.work`."""
        thread, problem = self._thread, None
        if thread is None:
            problem = "the pool is not started: use `with`, or call start() first"
        elif os.getpid() != self._pid:
            problem = "this pool belongs to the process that started it: make another one after a fork"
        elif thread.is_current():
            problem = "a hook must not call the pool: it runs in the thread that would have to answer"
        if thread is None or problem is not None:
            work.close()
            raise RuntimeError(problem)
        return thread.work(work, undo)

    def _end_thread(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()


async def _drop(_: object) -> None:
    """Leave a result that came too late."""
