"""The death of a process is reported at once: real processes, on both event loops, with and without pidfd."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.server.box.deaths import DeathWatch, open_pidfd
from tests.server.box.deaths.processes import Child, Reports, Start, not_implemented

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
        assert watch.is_watched(process.id) is has_descriptor  # the descriptor is kept for its next lease
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

    def test_a_process_that_comes_and_goes_takes_one_descriptor_until_the_end(
        self, watch: DeathWatch, child: Start
    ) -> None:
        process = child()
        before = open_descriptors()
        for _ in range(3):
            watch.watch(process.id, "a")
            watch.watch(process.id, "b")
            watch.forget("a")
            watch.forget("b")

        assert len(watch) == 0
        assert open_descriptors() <= before + 1
        watch.close()
        assert open_descriptors() <= before

    def test_one_that_died_between_two_leases_is_reported_with_the_second(
        self, watch: DeathWatch, child: Start, reports: Reports
    ) -> None:
        process = child()
        watch.watch(process.id, "first")
        watch.forget("first")
        process.kill()
        watch.watch(process.id, "second")

        assert not watch.is_alive(process.id)
        assert reports.until(1) == ["second"]

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

    def test_one_watched_again_while_its_death_is_on_its_way_is_still_reported(
        self, loop: asyncio.AbstractEventLoop, reports: Reports, child: Start
    ) -> None:
        first, second = child(), child()

        def report(lease_id: str) -> None:
            if lease_id == "first":
                # Both were found dead in one look; the report of "second" is still to come.
                deaths.watch(second.id, "again")
                deaths.forget("second")
            reports(lease_id)

        deaths = DeathWatch(report, loop, open_pidfd=not_implemented)
        deaths.watch(first.id, "first")
        deaths.watch(second.id, "second")
        first.kill()
        second.kill()

        assert reports.until(2) == ["first", "again"]
        deaths.close()

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
