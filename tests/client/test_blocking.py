"""The blocking twin: for programs with threads, forks, Ctrl-C and no asyncio."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import pytest

import gpu_worker_pool
from gpu_worker_pool import (
    GlobalGPUAssignment,
    GPUWorkerPool,
    GPUWorkerPoolClient,
    MultiEndpointPoolStatus,
    RequestRefusedError,
    WorkerTimeoutError,
)
from gpu_worker_pool.client.pool_client import Assignment
from tests.server.leasing import eventually, queued, release_all, take
from tests.server.running import ROOT, RunningServer

END_S = 20.0


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with RunningServer({"REFRESH_INTERVAL": "0.05", "GPU_POOL_DURABILITY": "normal"}) as server:
        yield server


@pytest.fixture
def server(running: RunningServer) -> Iterator[RunningServer]:
    """Four GPUs."""
    yield running
    release_all(running)


def active(server: RunningServer) -> set[str]:
    return {lease["id"] for lease in server.json("/pool")["leases"] if lease["state"] == "active"}


def fill(server: RunningServer) -> list[str]:
    """Somebody else has all GPUs; his leases."""
    return [take(server)["id"] for _ in range(4)]


PRELUDE = """
import multiprocessing, os, random, signal, sys, threading, time
import gpu_worker_pool
from gpu_worker_pool import GPUWorkerPool, gpu

url = sys.argv[1]
sys.stdout.reconfigure(line_buffering=True)
"""


class Child:
    """A program in a process of its own, that says how far it is and is told to go on."""

    def __init__(self, server: RunningServer, program: str, env: dict[str, str] | None = None) -> None:
        text = PRELUDE + textwrap.dedent(program)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text, server.url],
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def hear(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"it ended: {self.process.communicate(timeout=END_S)[1]}")
        return line.strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        """Its exit code and what it said, once it has ended by itself."""
        out, err = self.process.communicate("\n", timeout=END_S)
        return self.process.returncode, out.strip(), err


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


def test_a_gpu_is_requested_and_given_back(server: RunningServer) -> None:
    with GPUWorkerPool(server.url) as pool:
        assignment = pool.request_gpu()
        assert isinstance(assignment.gpu_id, int)
        assert active(server) == {assignment.lease_id}
        status = pool.get_pool_status()
        assert (status.total_gpus, status.available_gpus, status.active_workers) == (4, 3, 1)
        assert pool.get_detailed_metrics()["total_gpus"] == 4
        assert pool.get_endpoints_info() is None
        assert not pool.is_multi_endpoint_mode()
        pool.release_gpu(assignment)
        assert active(server) == set()
        with pytest.raises(ValueError, match="given back before"):
            pool.release_gpu(assignment)


def test_several_endpoints(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    with GPUWorkerPool(service_endpoints=[server.url, "http://127.0.0.1:1"]) as pool:
        endpoint_id = f"127.0.0.1-{server.port}"
        with pool.gpu(timeout=30) as assignment:
            assert isinstance(assignment, GlobalGPUAssignment)
            assert assignment.endpoint_id == endpoint_id
        status = pool.get_pool_status()
        assert isinstance(status, MultiEndpointPoolStatus)
        assert (status.total_endpoints, status.healthy_endpoints) == (2, 1)
        assert pool.get_error_recovery_status()["degraded_endpoints"] == ["127.0.0.1-1"]
        assert pool.trigger_endpoint_recovery(endpoint_id)
        assert not pool.trigger_endpoint_recovery("127.0.0.1-1")
        again = pool.queue_request_for_retry(lambda: pool.request_gpu(timeout=30))
        assert again.endpoint_id == endpoint_id
        pool.print_error_recovery_summary()
        assert "Partial (1/2 endpoints healthy)" in capsys.readouterr().out


def test_one_gpu_for_a_block(server: RunningServer) -> None:
    with gpu_worker_pool.gpu(memory_mb=1000, among=[3], service_endpoint=server.url) as assignment:
        assert active(server) == {assignment.lease_id}
        assert assignment.gpu_id == 3
        assert assignment.env["CUDA_VISIBLE_DEVICES"] == str(assignment.gpu_id)
        (lease,) = server.json("/pool")["leases"]
        assert lease["memory_mb"] == 1000
    assert active(server) == set()


def test_an_exception_in_the_body_gives_the_gpu_back(server: RunningServer) -> None:
    with pytest.raises(ZeroDivisionError), gpu_worker_pool.gpu(service_endpoint=server.url):
        raise ZeroDivisionError
    assert active(server) == set()
    with GPUWorkerPool(server.url) as pool, pytest.raises(ZeroDivisionError), pool.gpu():
        raise ZeroDivisionError
    assert active(server) == set()


def test_errors_are_those_of_the_client(server: RunningServer) -> None:
    pool = GPUWorkerPool(server.url)
    with pytest.raises(RuntimeError, match="not started"):
        pool.request_gpu()
    with pytest.raises(RuntimeError, match="not started"):
        pool.get_pool_status()
    assert pool.get_endpoints_info() is None
    pool.stop()
    with pool:
        with pytest.raises(RuntimeError, match="already started"):
            pool.start()
        with pytest.raises(RuntimeError, match="single endpoint"):
            pool.trigger_endpoint_recovery("server1")
        with pytest.raises(RequestRefusedError):
            pool.request_gpu(gpus=5)
        fill(server)
        with pytest.raises(WorkerTimeoutError):
            pool.request_gpu(timeout=0.05)
        assert queued(server) == []
    with pytest.raises(ValueError, match="memory_threshold"):
        GPUWorkerPool(server.url, memory_threshold=101)


def test_it_can_be_started_again(server: RunningServer) -> None:
    threads = threading.active_count()
    pool = GPUWorkerPool(server.url)
    for _ in range(2):
        with pool, pool.gpu():
            assert len(active(server)) == 1
        assert threading.active_count() == threads


# --- threads ---------------------------------------------------------------------------------------------------------


def test_eight_threads_at_once(server: RunningServer) -> None:
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


def test_a_stop_lets_those_go_who_wait_in_other_threads(server: RunningServer) -> None:
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


def test_a_hook_that_calls_the_pool_is_told_not_to(server: RunningServer) -> None:
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


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_waiting_leaves_nothing_behind(server: RunningServer) -> None:
    fill(server)
    program = """
        with GPUWorkerPool(url) as pool:
            try:
                pool.request_gpu()
            except KeyboardInterrupt:
                print("interrupted")
                input()
    """
    with Child(server, program) as child:
        eventually(lambda: len(queued(server)) == 1, "it waits")
        child.interrupt()
        assert child.hear() == "interrupted"
        eventually(lambda: queued(server) == [], "it left the line", within_s=15)
        assert len(active(server)) == 4
        assert child.end() == (0, "", "")


def test_ctrl_c_that_leaves_the_pool_too_leaves_nothing_behind(server: RunningServer) -> None:
    """The program lives on, so the server cannot see it die: what it does not take back, it keeps."""
    fill(server)
    program = """
        try:
            with GPUWorkerPool(url) as pool:
                pool.request_gpu()
        except KeyboardInterrupt:
            print("interrupted")
            input()
    """
    with Child(server, program) as child:
        eventually(lambda: len(queued(server)) == 1, "it waits")
        child.interrupt()
        assert child.hear() == "interrupted"
        assert queued(server) == []
        assert len(active(server)) == 4
        assert child.end() == (0, "", "")


def test_ctrl_c_while_waiting_in_gpu_leaves_nothing_behind(server: RunningServer) -> None:
    fill(server)
    program = """
        try:
            with gpu(service_endpoint=url):
                pass
        except KeyboardInterrupt:
            print("interrupted")
            input()
    """
    with Child(server, program) as child:
        eventually(lambda: len(queued(server)) == 1, "it waits")
        child.interrupt()
        assert child.hear() == "interrupted"
        assert queued(server) == []
        assert child.end() == (0, "", "")


def test_ctrl_c_in_the_body_gives_the_gpu_back(server: RunningServer) -> None:
    program = """
        try:
            with gpu(service_endpoint=url):
                print("has it")
                signal.pause()
        except KeyboardInterrupt:
            print("interrupted")
            input()
    """
    with Child(server, program) as child:
        assert child.hear() == "has it"
        child.interrupt()
        assert child.hear() == "interrupted"
        assert active(server) == set()
        assert child.end() == (0, "", "")


def test_ctrl_c_at_any_moment_of_a_request_leaves_nothing_behind(server: RunningServer) -> None:
    """Also in the moment in which it is granted."""
    program = """
        def interrupt(_, frame):
            # Only while request_gpu waits: what comes in after it has returned is for the caller to handle.
            while frame is not None:
                if frame.f_code.co_name == "result" and "concurrent" in frame.f_code.co_filename:
                    raise KeyboardInterrupt
                frame = frame.f_back

        signal.signal(signal.SIGALRM, interrupt)
        random.seed(3)
        interrupted = 0
        with GPUWorkerPool(url) as pool:
            for _ in range(250):
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0003, 0.006))
                    assignment = pool.request_gpu()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                else:
                    pool.release_gpu(assignment)
            print(interrupted)
            input()
    """
    with Child(server, program) as child:
        assert int(child.hear()) > 20
        with suppress(AssertionError):
            eventually(lambda: not active(server) and not queued(server), "nothing is left", within_s=15)
        assert active(server) == set()
        assert queued(server) == []
        assert child.end()[0] == 0


# --- forks -----------------------------------------------------------------------------------------------------------

FORKED = """
    def forked(work):
        pid = os.fork()
        if pid == 0:
            work()
            sys.exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def program_of(text: str) -> str:
    return textwrap.dedent(FORKED) + textwrap.dedent(text)


def renewals(server: RunningServer) -> Iterator[None]:
    """One each time that the only lease was renewed."""
    last = 0.0
    while True:
        (lease,) = server.json("/pool")["leases"]
        assert lease["state"] == "active"
        if lease["expires_in_s"] > last + 0.2:
            yield
        last = lease["expires_in_s"]


def test_a_forked_child_that_ends_does_not_release_what_its_parent_holds(server: RunningServer) -> None:
    program = """
        with GPUWorkerPool(url) as pool:
            assignment = pool.request_gpu()
            print(assignment.lease_id)
            print(forked(lambda: None))
            input()
            print(assignment.is_lost)
            pool.release_gpu(assignment)
    """
    with Child(server, program_of(program), {"GPU_POOL_TTL": "1.2"}) as child:
        lease_id = child.hear()
        assert child.hear() == "0"
        assert active(server) == {lease_id}
        for _, _ in zip(range(4), renewals(server), strict=False):
            pass  # the parent goes on giving signs of life
        assert child.end() == (0, "False", "")
    assert active(server) == set()


def test_a_forked_child_that_leaves_the_blocks_does_not_release_what_its_parent_holds(server: RunningServer) -> None:
    """It leaves them as if nothing was: what it leaves is not its own."""
    program = """
        pid = None
        with GPUWorkerPool(url) as pool:
            with pool.gpu() as assignment:
                pid = os.fork()
                if pid:
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    print(code, assignment.lease_id)
                    input()
        if pid == 0:
            sys.exit(0)
    """
    with Child(server, program) as child:
        code, lease_id = child.hear().split()
        assert active(server) == {lease_id}
        returned, _, errors = child.end()
        assert (code, returned, errors) == ("0", 0, "")
    assert active(server) == set()


def test_a_forked_child_does_not_keep_its_parents_lease_alive(server: RunningServer) -> None:
    program = """
        pool = GPUWorkerPool(url)
        pool.start()
        assignment = pool.request_gpu()
        pid = os.fork()
        if pid:
            print(pid)
            input()
        else:
            time.sleep(60)
    """
    with Child(server, program, {"GPU_POOL_TTL": "1"}) as child:
        forked = int(child.hear())
        try:
            child.process.send_signal(signal.SIGSTOP)
            eventually(lambda: active(server) == set(), "the lease of the stopped parent runs out")
            os.kill(forked, 0)  # the child lived all the time
        finally:
            os.kill(forked, signal.SIGKILL)
            child.process.send_signal(signal.SIGCONT)


def test_the_parents_pool_says_in_a_forked_child_that_it_is_not_the_childs(server: RunningServer) -> None:
    program = """
        def work():
            for use in (
                pool.request_gpu,
                pool.get_pool_status,
                pool.get_detailed_metrics,
                lambda: pool.release_gpu(assignment),
            ):
                try:
                    use()
                except RuntimeError as error:
                    assert "after a fork" in str(error), error
                else:
                    raise AssertionError(use)
            pool.stop()

        with GPUWorkerPool(url) as pool:
            assignment = pool.request_gpu()
            print(assignment.lease_id, forked(work))
            input()
    """
    with Child(server, program_of(program)) as child:
        lease_id, code = child.hear().split()
        assert code == "0"
        assert active(server) == {lease_id}
        assert child.end() == (0, "", "")


def test_a_pool_of_its_own_works_in_a_forked_child(server: RunningServer) -> None:
    program = """
        def work():
            with gpu(service_endpoint=url) as mine:
                assert mine.gpu_id != assignment.gpu_id
                assert mine.worker_id != assignment.worker_id

        with GPUWorkerPool(url) as pool:
            assignment = pool.request_gpu()
            print(assignment.lease_id, forked(work))
            input()
            pool.release_gpu(assignment)
    """
    with Child(server, program_of(program)) as child:
        lease_id, code = child.hear().split()
        assert code == "0"
        assert active(server) == {lease_id}
        assert child.end() == (0, "", "")


def test_a_forked_child_that_stopped_its_parents_pool_may_start_it_as_its_own(server: RunningServer) -> None:
    program = """
        def work():
            pool.stop()
            pool.start()
            with pool.gpu() as mine:
                assert mine.gpu_id != assignment.gpu_id
            pool.stop()

        with GPUWorkerPool(url) as pool:
            assignment = pool.request_gpu()
            print(assignment.lease_id, forked(work))
            input()
    """
    with Child(server, program_of(program)) as child:
        lease_id, code = child.hear().split()
        assert active(server) == {lease_id}
        assert (code, child.end()) == ("0", (0, "", ""))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(server: RunningServer, method: str, tmp_path: Any) -> None:
    """Each of its workers has a pool of its own, beside that of the parent, which may be sent the assignments."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys
            from gpu_worker_pool import GPUWorkerPool, gpu

            def work(number):
                with gpu(timeout=20, service_endpoint=sys.argv[1]) as assignment:
                    return assignment

            if __name__ == "__main__":
                with GPUWorkerPool(sys.argv[1]) as pool:
                    mine = pool.request_gpu()
                    with multiprocessing.get_context(sys.argv[2]).Pool(2) as workers:
                        theirs = workers.map(work, range(6))
                    assert mine.gpu_id not in {assignment.gpu_id for assignment in theirs}
                    assert len({assignment.lease_id for assignment in theirs}) == 6
                    assert not mine.is_lost
                    pool.release_gpu(mine)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(program), server.url, method],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert active(server) == set()


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["pass", "sys.exit(0)", "threading.Thread(target=pool.get_pool_status).start()"])
def test_a_program_that_forgets_to_stop_ends_and_holds_nothing(server: RunningServer, way: str) -> None:
    program = f"""
        pool = GPUWorkerPool(url)
        pool.start()
        assignment = pool.request_gpu()
        {way}
    """
    with Child(server, program) as child:
        assert child.end() == (0, "", "")
    eventually(lambda: active(server) == set(), "the server sees that it is gone", within_s=15)


def test_an_assignment_of_another_pool_is_refused(server: RunningServer) -> None:
    with GPUWorkerPool(server.url) as one, GPUWorkerPool(server.url) as other:
        assignment: Assignment = one.request_gpu()
        with pytest.raises(ValueError, match="no assignment of this client"):
            other.release_gpu(assignment)
        assert active(server) == {assignment.lease_id}
