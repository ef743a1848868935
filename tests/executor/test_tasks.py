"""What tasks are given, what they return and raise, and what becomes of those that cannot be passed on."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from concurrent.futures import BrokenExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool import ExecutorBrokenError, RemoteTaskError, WorkerLostError

from . import work
from .conftest import MakeExecutor
from .test_killed_workers import GUARD, processes
from .work import Gate


def test_a_task_runs_in_a_process_of_its_own_that_sees_its_gpu_and_no_other(executor: MakeExecutor, gate: Gate) -> None:
    ex = executor(2)
    futures = [ex.submit(work.report, gate.path) for _ in range(2)]
    first, second = gate.wait(), gate.wait()

    assert len({first.pid, second.pid, os.getpid()}) == 3
    assert {first.gpu, second.gpu} < {"0", "1", "2", "3"}
    assert first.gpu != second.gpu
    assert first.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert first.env["GPU_POOL_LEASE_GPUS"] == first.gpu
    # From its very start: CUDA reads it when it is loaded, and a library may load it first of all.
    with open(f"/proc/{first.pid}/environ", "rb") as file:  # noqa: PTH123 - not an ordinary file
        assert f"CUDA_VISIBLE_DEVICES={first.gpu}".encode() in file.read().split(b"\0")
    first.let_go("one")
    second.let_go("two")
    assert {future.result() for future in as_completed(futures)} == {"one", "two"}


def test_an_exception_travels_with_the_traceback_it_had_there(executor: MakeExecutor) -> None:
    with pytest.raises(LookupError, match="no model") as caught:
        executor().submit(work.fail, "no model").result()

    assert "work.py" in str(caught.value.__cause__)
    assert "raise LookupError(text)" in str(caught.value.__cause__)


def test_what_cannot_be_passed_on_fails_alone_and_says_what_it_was(executor: MakeExecutor) -> None:
    ex = executor()
    tasks: dict[str, Any] = {
        "pickled call": ex.submit(id, threading.Lock()),
        "unpickled call": ex.submit(work.take_exploding, work.ExplodesHere()),
        "unpickled result": ex.submit(work.return_exploding),
        "pickled error": ex.submit(work.raise_error, "of my own"),
        "unpickled error": ex.submit(work.raise_error, "needs two"),
    }
    errors = {name: future.exception() for name, future in tasks.items()}

    assert "_thread.lock" in str(errors["pickled call"])
    assert isinstance(errors["unpickled call"], LookupError)
    assert isinstance(errors["unpickled result"], LookupError)
    for name, shown in (("pickled error", "Unpicklable: of my own"), ("unpickled error", "NeedsTwoError: 1 and 2")):
        error = errors[name]
        assert isinstance(error, RemoteTaskError)
        assert shown in str(error)
        assert "raise_error" in str(error.__cause__)
    assert ex.submit(abs, -1).result() == 1


def test_a_killed_worker_fails_its_task_and_no_other(executor: MakeExecutor, gate: Gate) -> None:
    ex = executor(2)
    futures = {ex.submit(work.report, gate.path) for _ in range(2)}
    killed, other = gate.wait(), gate.wait()
    killed.kill()
    lost = next(as_completed(futures))
    other.let_go("whole")

    with pytest.raises(WorkerLostError, match=rf"worker {killed.pid} on GPU {killed.gpu} was killed by SIGKILL"):
        lost.result()
    assert (futures - {lost}).pop().result() == "whole"


def test_with_retries_a_task_is_repeated_and_that_is_said(
    executor: MakeExecutor, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    ex = executor(retries=1)
    future = ex.submit(work.report, gate.path)
    first = gate.wait()
    first.kill()
    second = gate.wait()
    assert second.pid != first.pid
    second.let_go("done")

    assert future.result() == "done"
    assert (
        f"worker {first.pid} on GPU {first.gpu} was killed by SIGKILL; retrying task 1 (attempt 2 of 2)" in caplog.text
    )


def test_a_task_that_is_cancelled_at_once_leaves_no_guard(executor: MakeExecutor) -> None:
    ex = executor(4)
    ex.submit(abs, -1).result()
    for _ in range(50):
        ex.submit(abs, -1).cancel()
    ex.shutdown()
    gc.collect()  # an open line would be noticed

    assert processes(GUARD) == []


def test_a_task_has_its_arguments_as_they_were_when_it_was_submitted(executor: MakeExecutor, gate: Gate) -> None:
    ex, numbers = executor(), [1, 2]
    first = ex.submit(work.report, gate.path)
    future = ex.submit(work.sum_of, numbers)
    numbers.append(100)
    gate.wait().let_go()

    assert (first.result(), future.result()) == (None, 3)


def test_large_arguments_and_results_pass(executor: MakeExecutor) -> None:
    ex = executor()
    data = bytes(20_000_000)

    assert ex.submit(work.size_of, data).result() == len(data)
    assert len(ex.submit(work.twice, data).result()) == 2 * len(data)


def test_a_queue_of_multiprocessing_can_be_given_to_the_initializer(executor: MakeExecutor) -> None:
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    ex = executor(initializer=work.initialize_with_queue, initargs=(queue,))

    assert ex.submit(os.getpid).result() == queue.get()
    queue.close()


def test_a_failed_initializer_breaks_the_executor(executor: MakeExecutor) -> None:
    ex = executor(initializer=work.fail_to_initialize)
    with pytest.raises(ExecutorBrokenError, match=r"LookupError\('no such model'\)") as caught:
        ex.submit(abs, 1).result()

    assert "fail_to_initialize" in str(getattr(caught.value.__cause__, "__cause__", None))
    with pytest.raises(BrokenExecutor, match="no such model"):
        ex.submit(abs, 1)
    assert repr(ex) == "<GPUExecutor: broken>"


def test_an_initializer_that_cannot_be_pickled_breaks_it_too(executor: MakeExecutor) -> None:
    with pytest.raises(ExecutorBrokenError, match="lambda"):
        executor(initializer=lambda: None).submit(abs, 1).result()


def test_a_worker_that_is_interrupted_while_it_starts_breaks_nothing(executor: MakeExecutor, tmp_path: Path) -> None:
    ex = executor(initializer=work.interrupt_once, initargs=(str(tmp_path / "interrupted"),))

    assert ex.submit(abs, -1).result() == 1


def test_a_worker_is_replaced_after_max_tasks_per_child(executor: MakeExecutor) -> None:
    ex = executor(max_tasks_per_child=2)
    pids = [ex.submit(os.getpid).result() for _ in range(4)]

    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_a_task_costs_no_more_where_many_wait(executor: MakeExecutor) -> None:
    ex = executor(idle_release_s=1000.0)

    def cost_s(tasks: int) -> float:
        """Processor time of this process for each task."""
        since = time.process_time()
        for future in [ex.submit(abs, -1) for _ in range(tasks)]:
            future.result()
        return (time.process_time() - since) / tasks

    cost_s(200)
    assert cost_s(10_000) < 3 * cost_s(500)


def test_shared_memory_that_a_task_attaches_to_stays_where_it_is(executor: MakeExecutor) -> None:
    from multiprocessing.shared_memory import SharedMemory  # noqa: PLC0415 - only here

    memory = SharedMemory(create=True, size=16)
    try:
        ex = executor(max_tasks_per_child=1)
        for _ in range(2):  # the second after the first worker has ended
            assert ex.submit(work.attach, memory.name).result() == 16
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_workers": 0}, "max_workers is 0; it must be greater than 0"),
        ({"max_workers": 1.5}, r"max_workers is 1\.5; it must be a whole number, 1 or more"),
        ({"max_workers": True}, "max_workers is True"),
        ({"labels": 3}, "labels is 3; it must be a mapping of texts"),
        ({"labels": {"name": 3}}, "labels is {'name': 3}"),
        ({"priority": "x"}, "priority is 'x'"),
        ({"preemptible": "no"}, "preemptible is 'no'"),
        ({"time_limit": 0}, "time_limit_s is 0"),
        ({"time_limit": "10s"}, r"time_limit is 10 s and grace_s is 10 s: .* at least twice grace_s \(20 s\)"),
        ({"gpus": 0}, "gpus is 0"),
        ({"memory": "much"}, "memory: 'much' is not an amount of memory"),
        ({"retries": -1}, "retries is -1; it must be a whole number from 0 to"),
        ({"idle_release_s": -1}, "idle_release_s is -1; it must be a number from 0 to"),
        ({"grace_s": float("nan")}, "grace_s is nan"),
        ({"max_tasks_per_child": 0}, "max_tasks_per_child is 0; it must be greater than 0"),
        ({"time_limit": "soon"}, "soon"),
        ({"memory_threshold": 200}, "memory_threshold is 200"),
    ],
)
def test_bad_options_are_refused_at_once(executor: MakeExecutor, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        executor(**options)
