"""The blocking twin in programs that are interrupted and that fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any, Self

import pytest

from gpu_worker_pool import GPUWorkerPool
from gpu_worker_pool.testing import ServerProcess
from tests.client.blocking.programs import END_S, Child, active, fill
from tests.server import elsewhere
from tests.server.leasing import eventually, queued
from tests.server.running import ROOT

# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


# The program lives on, so the server cannot see it die: what it does not take back, it keeps.
INTERRUPTED = """
    def use():
        print("begins")
        {use}

    try:
        use()
    except KeyboardInterrupt:
        print("interrupted")
        input()
"""


@pytest.mark.parametrize(
    "use",
    [
        "pool = GPUWorkerPool(url); pool.start(); pool.request_gpu()",
        "with GPUWorkerPool(url) as pool: pool.request_gpu()",
        "with gpu(service_endpoint=url): pass",
    ],
    ids=["request", "pool", "gpu"],
)
def test_ctrl_c_while_waiting_leaves_nothing_behind(server: ServerProcess, use: str) -> None:
    fill(server)
    with Child(server, INTERRUPTED.format(use=use)) as child:
        assert child.hear() == "begins"
        eventually(lambda: len(queued(server)) == 1, "it waits")
        child.interrupt()
        assert child.hear() == "interrupted"
        eventually(lambda: queued(server) == [], "it left the queue")
        assert len(active(server)) == 4
        assert child.end() == (0, "", "")


def test_ctrl_c_in_the_body_gives_the_gpu_back(server: ServerProcess) -> None:
    use = "with gpu(service_endpoint=url) as held: print(held.lease_id); signal.pause()"
    with Child(server, INTERRUPTED.format(use=use)) as child:
        assert child.hear() == "begins"
        lease_id = child.hear()
        assert active(server) == {lease_id}
        child.interrupt()
        assert child.hear() == "interrupted"
        assert active(server) == set()
        assert child.end() == (0, "", "")


class InterruptAt:
    """Interrupts this thread at the nth point of a function at which Python would let a signal in."""

    def __init__(self, point: int, function: str) -> None:
        self._left = point
        self._function = function

    def __enter__(self) -> Self:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def has_come(self) -> bool:
        return self._left <= 0

    def _see(self, frame: FrameType | None, event: str, _: object) -> None:
        while event in {"call", "c_return"} and frame is not None:
            if frame.f_code.co_qualname == self._function:
                self._left -= 1
                if self._left == 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt
                return
            frame = frame.f_back


# A coroutine is made just before it is run.
never_awaited = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@never_awaited
def test_a_request_that_is_interrupted_at_any_point_leaves_nothing_behind(server: ServerProcess) -> None:
    """Also in the moment in which it is granted. Each time at another point, until one comes after the last."""
    with GPUWorkerPool(server.url, polling_interval=3600) as pool:
        pool.release_gpu(pool.request_gpu())  # the first one fills caches, which takes many more points
        for point in count(1):
            with suppress(KeyboardInterrupt), InterruptAt(point, "LoopThread.work") as interrupt:
                assignment = pool.request_gpu()
            if not interrupt.has_come:
                pool.release_gpu(assignment)
                break
        eventually(lambda: not active(server) and not queued(server), "nothing is left")
    assert point > 20


@never_awaited
def test_a_release_that_is_interrupted_at_any_point_releases(server: ServerProcess) -> None:
    with GPUWorkerPool(server.url, polling_interval=3600) as pool:
        # At the first point the handing over itself is entered, and the caller knows that nothing was released.
        for point in count(2):
            assignment = pool.request_gpu(timeout=END_S)
            with suppress(KeyboardInterrupt), InterruptAt(point, "LoopThread.work") as interrupt:
                pool.release_gpu(assignment)
            if not interrupt.has_come:
                break
            eventually(lambda: not active(server), "it is released")
    assert point > 20


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


def renewals(server: ServerProcess) -> Iterator[None]:
    """One each time that the only lease was renewed."""
    last = 0.0
    while True:
        (lease,) = server.json("/pool")["leases"]
        assert lease["state"] == "active"
        if lease["expires_in_s"] > last + 0.1:
            yield
        last = lease["expires_in_s"]


@pytest.fixture(scope="module")
def far_server() -> Iterator[ServerProcess]:
    """A server whose holders are remote, so that their leases expire without heartbeats."""
    with ServerProcess({"REFRESH_INTERVAL": "0.05"}, command=elsewhere.COMMAND) as server:
        yield server


def test_a_forked_child_that_ends_does_not_release_what_its_parent_holds(far_server: ServerProcess) -> None:
    server = far_server
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


def test_a_forked_child_does_not_keep_its_parents_lease_alive(far_server: ServerProcess) -> None:
    server = far_server
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


def test_the_parents_pool_says_in_a_forked_child_that_it_is_not_the_childs(server: ServerProcess) -> None:
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


def test_a_forked_child_that_stopped_its_parents_pool_may_start_it_as_its_own(server: ServerProcess) -> None:
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
def test_multiprocessing(server: ServerProcess, method: str, tmp_path: Any) -> None:
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
