"""The death of a process is reported at once: real processes, on both event loops, with and without pidfd."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.host.processes import ProcessTable
from gpu_worker_pool.server.box.deaths import DeathWatch, open_pidfd
from tests.server.running import ROOT

GENEROUS_S = 60.0
CAT = shutil.which("cat") or "/bin/cat"


def not_implemented(pid: int) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


class Child:
    """A process of ours that ends by itself when its input is closed."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen([CAT], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.id = ProcessId(self.popen.pid, ProcessTable().started(self.popen.pid))

    def kill(self) -> None:
        """Dead when this returns, but a zombie: it is not reaped."""
        os.kill(self.id.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.id.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        """Gone without a trace when this returns."""
        self.popen.communicate(timeout=GENEROUS_S)


class Reports:
    """The leases that were reported, and a way to wait for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.leases: list[str] = []
        self._loop = loop
        self._came = asyncio.Event()

    def __call__(self, lease_id: str) -> None:
        assert asyncio.get_running_loop() is self._loop
        self.leases.append(lease_id)
        self._came.set()

    def until(self, count: int) -> list[str]:
        async def wait() -> None:
            async with asyncio.timeout(GENEROUS_S):
                while len(self.leases) < count:
                    self._came.clear()
                    await self._came.wait()

        self._loop.run_until_complete(wait())
        return self.leases


Start = Callable[[], Child]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    loop: asyncio.AbstractEventLoop = request.param()
    yield loop
    loop.close()


@pytest.fixture
def reports(loop: asyncio.AbstractEventLoop) -> Reports:
    return Reports(loop)


@pytest.fixture
def child() -> Iterator[Callable[[], Child]]:
    children: list[Child] = []

    def start() -> Child:
        children.append(Child())
        return children[-1]

    yield start
    for one in children:
        one.popen.kill()
        one.end()


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc here")


@pytest.fixture(params=[open_pidfd, not_implemented], ids=["pidfd", "polled"])
def watch(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop, reports: Reports) -> Iterator[DeathWatch]:
    watch = DeathWatch(reports, loop, open_pidfd=request.param)
    yield watch
    watch.close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class TestDeath:
    def test_a_killed_process_is_reported_while_it_is_a_zombie(
        self, watch: DeathWatch, reports: Reports, child: Start
    ) -> None:
        process = child()
        watch.watch(process.id, "a")
        process.kill()

        assert reports.until(1) == ["a"]
        assert Path(f"/proc/{process.id.pid}").exists()
        assert len(watch) == 0

    def test_a_process_is_watched_until_its_death_is_reported(
        self, watch: DeathWatch, reports: Reports, child: Start, request: pytest.FixtureRequest
    ) -> None:
        process, has_descriptor = child(), "pidfd" in request.node.name
        assert not watch.is_watched(process.id)
        watch.watch(process.id, "a")
        assert watch.is_watched(process.id) is has_descriptor
        watch.forget("a")
        assert not watch.is_watched(process.id)
        watch.watch(process.id, "b")
        process.kill()
        assert reports.until(1) == ["b"]
        assert not watch.is_watched(process.id)

    @pytest.mark.parametrize("how", [Child.kill, Child.end], ids=["zombie", "gone"])
    def test_one_that_died_before_is_reported_but_not_from_within(
        self, watch: DeathWatch, reports: Reports, child: Start, how: Callable[[Child], None]
    ) -> None:
        process = child()
        how(process)
        watch.watch(process.id, "a")

        assert reports.leases == []
        assert reports.until(1) == ["a"]
        assert len(watch) == 0

    def test_a_pid_that_a_later_process_has_is_reported_and_that_one_left_alone(
        self, watch: DeathWatch, reports: Reports, child: Start
    ) -> None:
        process = child()
        before = open_descriptors()
        earlier = ProcessId(process.id.pid, (process.id.started or 0) - 1)
        watch.watch(earlier, "earlier")
        watch.watch(process.id, "later")

        assert reports.until(1) == ["earlier"]
        assert process.popen.poll() is None
        process.kill()
        assert reports.until(2) == ["earlier", "later"]
        assert open_descriptors() <= before

    def test_a_stopped_process_is_alive(self, watch: DeathWatch, reports: Reports, child: Start) -> None:
        stopped, other = child(), child()
        watch.watch(stopped.id, "stopped")
        watch.watch(other.id, "other")
        os.kill(stopped.id.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.id.pid, os.WSTOPPED)
        other.kill()

        assert reports.until(1) == ["other"]
        stopped.kill()
        assert reports.until(2) == ["other", "stopped"]

    def test_two_hundred_at_once_are_each_reported_once(
        self, watch: DeathWatch, reports: Reports, child: Start
    ) -> None:
        processes = {f"lease-{number}": child() for number in range(200)}
        before = open_descriptors()
        for lease_id, process in processes.items():
            watch.watch(process.id, lease_id)
        for process in processes.values():
            os.kill(process.id.pid, signal.SIGKILL)

        assert sorted(reports.until(200)) == sorted(processes)
        # One more, so that a second report of any would have come before it.
        last = child()
        watch.watch(last.id, "last")
        last.kill()
        assert len(reports.until(201)) == 201
        last.end()
        assert open_descriptors() <= before


class TestLeases:
    def test_all_leases_of_a_process_are_reported_and_it_is_opened_once(
        self, loop: asyncio.AbstractEventLoop, reports: Reports, child: Start
    ) -> None:
        opened: list[int] = []

        def count(pid: int) -> int:
            opened.append(pid)
            return open_pidfd(pid)

        watch = DeathWatch(reports, loop, open_pidfd=count)
        process = child()
        watch.watch(process.id, "a")
        watch.watch(process.id, "b")
        watch.watch(process.id, "a")
        assert (len(watch), opened) == (1, [process.id.pid])
        assert repr(watch) == "<DeathWatch 1 processes (0 polled), 2 leases>"
        process.kill()

        assert reports.until(2) == ["a", "b"]
        watch.close()

    def test_a_forgotten_lease_is_not_reported(self, watch: DeathWatch, reports: Reports, child: Start) -> None:
        forgotten, other = child(), child()
        watch.watch(forgotten.id, "forgotten")
        watch.watch(forgotten.id, "kept")
        watch.watch(other.id, "other")
        watch.forget("forgotten")
        watch.forget("never watched")
        forgotten.kill()

        assert reports.until(1) == ["kept"]
        other.kill()
        assert reports.until(2) == ["kept", "other"]

    def test_one_forgotten_while_its_death_is_on_its_way_is_not_reported(
        self, watch: DeathWatch, reports: Reports, child: Start
    ) -> None:
        gone, other = child(), child()
        gone.end()
        other.end()
        watch.watch(gone.id, "gone")
        watch.forget("gone")
        watch.watch(other.id, "other")

        assert reports.until(1) == ["other"]
        assert len(watch) == 0

    def test_a_process_that_comes_and_goes_leaves_no_descriptor(self, watch: DeathWatch, child: Start) -> None:
        process = child()
        before = open_descriptors()
        for _ in range(3):
            watch.watch(process.id, "a")
            watch.watch(process.id, "b")
            watch.forget("a")
            watch.forget("b")

        assert len(watch) == 0
        assert open_descriptors() <= before

    def test_a_lease_that_got_another_process_ends_with_that_one(
        self, watch: DeathWatch, reports: Reports, child: Start
    ) -> None:
        first, second, other = child(), child(), child()
        watch.watch(first.id, "a")
        watch.watch(other.id, "other")
        watch.watch(second.id, "a")
        assert len(watch) == 2
        first.kill()
        other.kill()

        assert reports.until(1) == ["other"]
        second.kill()
        assert reports.until(2) == ["other", "a"]

    def test_a_report_that_fails_does_not_keep_the_others_back(
        self, loop: asyncio.AbstractEventLoop, reports: Reports, child: Start
    ) -> None:
        faults: list[str] = []
        loop.set_exception_handler(lambda _, context: faults.append(str(context["exception"])))

        def report(lease_id: str) -> None:
            if lease_id == "a":
                raise ValueError("no such lease")
            reports(lease_id)

        watch = DeathWatch(report, loop)
        process = child()
        watch.watch(process.id, "a")
        watch.watch(process.id, "b")
        process.kill()

        assert reports.until(1) == ["b"]
        assert faults == ["no such lease"]
        watch.close()


class TestClose:
    def test_nothing_is_reported_or_watched_afterwards(
        self, loop: asyncio.AbstractEventLoop, watch: DeathWatch, reports: Reports, child: Start
    ) -> None:
        living, dead, other = child(), child(), child()
        dead.end()
        before = open_descriptors()
        watch.watch(living.id, "living")
        watch.watch(dead.id, "dead")
        watch.close()
        watch.watch(living.id, "after")
        assert len(watch) == 0
        assert open_descriptors() <= before
        living.kill()

        still = Reports(loop)
        # Polled as the closed one may have been, so that its look would have come first.
        second = DeathWatch(still, loop, open_pidfd=not_implemented)
        second.watch(other.id, "other")
        other.kill()
        assert still.until(1) == ["other"]
        assert reports.leases == []
        second.close()


class TestWithoutPidfd:
    def test_a_kernel_that_has_none_is_asked_once_for_each_process(
        self, loop: asyncio.AbstractEventLoop, reports: Reports, child: Start
    ) -> None:
        asked: list[int] = []

        def refuse(pid: int) -> int:
            asked.append(pid)
            return not_implemented(pid)

        watch = DeathWatch(reports, loop, open_pidfd=refuse)
        living, other = child(), child()
        watch.watch(living.id, "living")
        watch.watch(other.id, "other")
        other.kill()
        reports.until(1)

        assert asked == [living.id.pid, other.id.pid]
        watch.close()

    @pytest.mark.parametrize("module", ["asyncio", "uvloop"])
    def test_few_descriptors_are_shared_with_connections_and_every_death_is_seen(self, module: str) -> None:
        answer = subprocess.run(
            [sys.executable, "-c", WITH_FEW_DESCRIPTORS, module],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=GENEROUS_S,
        )

        assert answer.stdout.split() == ["polled", "connected", "all", "60"], answer.stderr


# Its 60 processes do not fit into the 40 descriptors it may have.
WITH_FEW_DESCRIPTORS = """
import asyncio, os, resource, signal, socket, subprocess, sys, uvloop
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.server.box.deaths import DeathWatch
loop = {"asyncio": asyncio, "uvloop": uvloop}[sys.argv[1]].new_event_loop()
children = [subprocess.Popen(["sleep", "60"]) for _ in range(60)]
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
done, reported = asyncio.Event(), []
def report(lease_id):
    reported.append(lease_id)
    if len(reported) == len(children):
        done.set()
watch = DeathWatch(report, loop)
for child in children:
    watch.watch(ProcessId(child.pid), str(child.pid))
if len(watch._polled) not in (0, len(children)):
    print("polled")
with socket.socket(), socket.socket():
    print("connected")
for child in children:
    os.kill(child.pid, signal.SIGKILL)
loop.run_until_complete(asyncio.wait_for(done.wait(), 30))
if sorted(reported) == sorted(str(child.pid) for child in children):
    print("all", len(reported))
for child in children:
    child.wait()
watch.close()
loop.close()
"""
