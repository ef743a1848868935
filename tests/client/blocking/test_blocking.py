"""The blocking twin of the client: the same methods, from threads."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpu_worker_pool import (
    GPUWorkerPool,
    GPUWorkerPoolClient,
)
from gpu_worker_pool.testing import ServerProcess
from tests.client.blocking.programs import END_S, Child, active, fill
from tests.server.leasing import eventually, queued

# --- the same methods ------------------------------------------------------------------------------------------------


def test_it_has_every_method_of_the_client() -> None:
    for name, method in inspect.getmembers(GPUWorkerPoolClient, inspect.isfunction):
        if name.startswith("_"):
            continue
        twin = getattr(GPUWorkerPool, name)
        assert not inspect.iscoroutinefunction(twin)
        ours = [parameter.name for parameter in inspect.signature(method).parameters.values()]
        theirs = inspect.signature(twin).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in theirs.values())
        assert takes_all or list(theirs) == ours, name


# --- threads ---------------------------------------------------------------------------------------------------------


def test_eight_threads_at_once(server: ServerProcess) -> None:
    held_now: set[Any] = set()
    lock = threading.Lock()

    def work(number: int) -> int:
        for _ in range(10):
            with pool.gpu(timeout=END_S) as assignment:
                with lock:
                    assert assignment.gpu_id not in held_now
                    held_now.add(assignment.gpu_id)
                status = pool.get_pool_status()
                assert status.total_gpus == 4
                with lock:
                    held_now.remove(assignment.gpu_id)
        return number

    with GPUWorkerPool(server.url) as pool, ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(work, range(8))) == list(range(8))
        metrics = pool.get_detailed_metrics()
        assert metrics["load_balancer"]["successful_requests"] == 80
    assert active(server) == set()
    assert queued(server) == []


def test_a_stop_lets_those_go_who_wait_in_other_threads(server: ServerProcess) -> None:
    """With an error that says so, and without leaving them in the server's line, where a GPU would be given to nobody."""
    fill(server)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            pool.request_gpu(timeout=END_S)
        except BaseException as error:  # noqa: BLE001 - whatever it is
            raised.append(error)

    pool = GPUWorkerPool(server.url)
    pool.start()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    eventually(lambda: len(queued(server)) == 1, "it waits")

    pool.stop()
    thread.join(5)

    assert not thread.is_alive()
    assert queued(server) == []
    assert isinstance(raised[0], RuntimeError), raised


def test_a_hook_that_calls_the_pool_is_told_not_to(server: ServerProcess) -> None:
    raised: list[RuntimeError] = []

    def hook(_: object) -> None:
        try:
            pool.get_pool_status()
        except RuntimeError as error:
            raised.append(error)

    pool = GPUWorkerPool(server.url, on_event=hook)
    with pool, pool.gpu():
        pass
    assert raised
    assert "hook" in str(raised[0])


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["pass", "sys.exit(0)", "threading.Thread(target=pool.get_pool_status).start()"])
def test_a_program_that_forgets_to_stop_ends_and_holds_nothing(server: ServerProcess, way: str) -> None:
    program = f"""
        pool = GPUWorkerPool(url)
        pool.start()
        assignment = pool.request_gpu()
        {way}
    """
    with Child(server, program) as child:
        assert child.end() == (0, "", "")
    eventually(lambda: active(server) == set(), "the server sees that it is gone", within_s=15)
