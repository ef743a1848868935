"""The end of an executor, and of what it has running."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

import pytest

from gpu_worker_pool import GPUExecutor, WorkerLostError
from gpu_worker_pool.testing import ServerProcess
from tests.processes import forked_child, has_ended
from tests.server.leasing import eventually

from . import work
from .conftest import MakeExecutor
from .test_leases import active
from .work import Gate


def test_a_shut_down_waits_for_the_tasks_and_releases_all_leases(
    server: ServerProcess, executor: MakeExecutor, gate: Gate
) -> None:
    ex = executor()
    futures = [ex.submit(work.report, gate.path) for _ in range(2)]
    visitor = gate.wait()
    ended = threading.Event()

    def close() -> None:
        ex.shutdown()
        ended.set()

    closing = threading.Thread(target=close)
    closing.start()
    eventually(lambda: repr(ex) == "<GPUExecutor: shut down>", "it accepts no more")
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        ex.submit(abs, 1)
    assert not ended.is_set()
    visitor.let_go(1)
    gate.wait().let_go(2)
    closing.join()

    assert [future.result() for future in futures] == [1, 2]
    assert active(server) == []
    assert has_ended(visitor.pid)
    ex.shutdown()  # a second time is harmless


def test_the_tasks_of_an_executor_that_is_forgotten_are_still_done(server: ServerProcess, gate: Gate) -> None:
    ex = GPUExecutor(1, service_endpoint=server.url)
    futures = [ex.submit(work.report, gate.path) for _ in range(2)]
    gone = weakref.ref(ex)
    del ex
    gc.collect()
    assert gone() is None
    gate.wait().let_go(1)
    gate.wait().let_go(2)

    assert [future.result() for future in futures] == [1, 2]
    eventually(lambda: active(server) == [], "the leases are released")


def test_a_callback_may_submit_and_shut_down(server: ServerProcess, executor: MakeExecutor) -> None:
    ex, results = executor(), []
    done = threading.Event()

    def go_on(_: object) -> None:
        results.append(ex.submit(abs, -2))
        ex.shutdown()  # from the executor's own thread, which cannot wait for itself
        done.set()

    ex.submit(abs, -1).add_done_callback(go_on)
    assert done.wait(work.MOST_S)
    assert results[0].result() == 2


def test_a_fork_can_do_nothing_with_its_parents_executor_and_harms_nothing(
    server: ServerProcess, executor: MakeExecutor, gate: Gate
) -> None:
    ex = executor()
    future = ex.submit(work.report, gate.path)
    visitor = gate.wait()
    said, say = os.pipe()
    child = os.fork()
    if not child:
        try:
            ex.submit(abs, 1)
        except RuntimeError as error:
            os.write(say, str(error).encode())
        ex.shutdown()
        os._exit(0)
    os.waitpid(child, 0)
    os.close(say)
    assert os.read(said, 1000) == b"this executor belongs to the process that made it: make another one after a fork"
    os.close(said)
    visitor.let_go("unharmed")
    assert future.result() == "unharmed"


def test_while_a_fork_lives_workers_still_end(server: ServerProcess, executor: MakeExecutor, gate: Gate) -> None:
    ex = executor()
    future = ex.submit(work.report, gate.path)
    visitor = gate.wait()
    with forked_child():
        visitor.let_go()
        future.result()
        ex.shutdown()
        assert active(server) == []
        assert has_ended(visitor.pid)


def test_a_worker_that_is_stopped_is_ended(server: ServerProcess, executor: MakeExecutor, gate: Gate) -> None:
    ex = executor(grace_s=0.2)
    future = ex.submit(work.report, gate.path)
    visitor = gate.wait()
    os.kill(visitor.pid, signal.SIGSTOP)
    ex.terminate_workers()
    assert isinstance(future.exception(), KeyboardInterrupt | WorkerLostError)
    assert has_ended(visitor.pid)
    assert active(server) == []


def test_a_task_that_closes_the_line_of_its_worker_fails_and_its_worker_ends(
    server: ServerProcess, executor: MakeExecutor
) -> None:
    ex = executor(grace_s=0.2)
    with pytest.raises(WorkerLostError):
        ex.submit(os.closerange, 3, 64).result()
    assert ex.submit(abs, -1).result() == 1
