"""A blocking caller, and what can go wrong under it: a silent, restarted or stopped server, a lost connection, a stop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpu_worker_pool import (
    GPUWorkerPool,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from gpu_worker_pool.client.loop_thread import LoopThread
from gpu_worker_pool.testing import ServerProcess
from tests.client.blocking.programs import END_S, active
from tests.server.leasing import eventually, queued


def test_a_request_that_a_silent_server_gets_late_leaves_nothing_behind(server: ServerProcess) -> None:
    """Its release must not overtake it."""
    with GPUWorkerPool(server.url) as pool:
        with pool.gpu():
            pass
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerTimeoutError, match="has not answered"):
                pool.request_gpu(timeout=0.3)
        finally:
            os.kill(server.pid, signal.SIGCONT)
    eventually(lambda: not active(server) and not queued(server), "nothing is left")


def test_a_stop_in_the_middle_of_requests_and_releases_of_other_threads(server: ServerProcess) -> None:
    """Nothing hangs, nothing is left, and each thread is told why its call ended."""
    for _ in range(8):
        pool = GPUWorkerPool(server.url, polling_interval=3600)
        pool.start()
        workers = [Worker(pool) for _ in range(6)]
        for worker in workers:
            worker.has_begun.wait(END_S)
        pool.stop()
        for worker in workers:
            worker.thread.join(END_S)
            assert isinstance(worker.end, RuntimeError | StaleAssignmentError), worker.end
        eventually(lambda: not active(server) and not queued(server), "nothing is left")


def test_a_call_that_the_end_of_the_loop_cuts_short_says_that_the_pool_was_stopped() -> None:
    """However long a stop waits, a busy machine may take longer."""
    thread, has_begun = LoopThread(), threading.Event()

    async def never_ends() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as caller:
        cut_short = caller.submit(thread.work, never_ends())
        assert has_begun.wait(END_S)
        thread.end()
        with pytest.raises(RuntimeError, match="the pool was stopped meanwhile"):
            cut_short.result(END_S)


class Worker:
    """Requests and releases GPUs in a thread of its own until that fails."""

    def __init__(self, pool: GPUWorkerPool) -> None:
        self.has_begun = threading.Event()
        self.end: BaseException | None = None
        self._pool = pool
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        try:
            while True:
                self._pool.release_gpu(self._pool.request_gpu())
                self.has_begun.set()
        except BaseException as error:  # noqa: BLE001 - whatever it is
            self.end = error
