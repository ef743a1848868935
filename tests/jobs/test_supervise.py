"""A command on a lease: its environment, warnings, limits, the loss, signals, and what became of it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from gpu_worker_pool.failure import FAILED, TAKEN_BACK, TIME_LIMIT, Failure
from gpu_worker_pool.host.guarded import GuardDied, Guarded
from gpu_worker_pool.jobs.leases import GpuRequest, adopted
from gpu_worker_pool.jobs.limited_log import limited_log
from gpu_worker_pool.jobs.supervise import Outcome, SupervisedCommand, supervise
from gpu_worker_pool.models import GPUAssignment, LeaseEnding
from gpu_worker_pool.notices import EndNotice, Loss
from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import OFTEN, take, wait_until_free

SAVES = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"


@pytest.fixture
async def guarded() -> AsyncIterator[Guarded]:
    async with Guarded.start() as one:
        yield one


def now() -> datetime:
    return datetime.now()  # noqa: DTZ005 - local time, as all times of the documents


class Lease:
    """A lease whose loss and warnings the test decides."""

    def __init__(self, ttl_s: float = 60.0) -> None:
        self.lost, self.warned = Loss(ttl_s, is_local=True), EndNotice()
        self.assignment = GPUAssignment(
            0, "worker", now(), lease_id="id", gpu_ids=(0,), lost=self.lost, warned=self.warned
        )

    def warn(self, reason: str, in_s: float = 3600.0) -> None:
        self.warned.set(LeaseEnding(reason, now() + timedelta(seconds=in_s)))


@contextmanager
def output() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


def shell(script: str, out: int = 1, **options: float) -> SupervisedCommand:
    return SupervisedCommand(argv=["sh", "-c", script], env=dict(os.environ), streams=(0, out, 2), **options)  # type: ignore[arg-type]


async def ready(descriptor: int) -> str:
    return (await asyncio.to_thread(os.read, descriptor, 100)).decode().strip()


async def test_the_command_has_the_variables_of_its_lease_and_its_code_is_known(guarded: Guarded) -> None:
    command = shell('[ "$GPU_POOL_LEASE_ID $GPU_POOL_LEASE_GPUS" = "id 0" ]; exit $((7 + $?))')
    assert await supervise(guarded, Lease().assignment, command) == Outcome(7)


@pytest.mark.parametrize("reason", ["preempted", "time_limit", "idle"])
async def test_a_command_that_saves_and_ends_well_after_a_warning_is_known_to_have_been_told_to_end(
    guarded: Guarded, reason: str
) -> None:
    lease = Lease()
    with output() as (reading, writing):
        running = asyncio.create_task(supervise(guarded, lease.assignment, shell(SAVES, writing)))
        assert await ready(reading) == "ready"
        lease.warn(reason)
        outcome = await running
    assert outcome == Outcome(0, reason)
    assert outcome.code_of_run == 0  # as documented: 0 stays 0


@pytest.mark.parametrize(("reason", "code"), [("preempted", TAKEN_BACK), ("time_limit", TIME_LIMIT)])
async def test_a_command_that_is_ended_by_a_warning_was_stopped(guarded: Guarded, reason: str, code: int) -> None:
    lease = Lease()
    running = asyncio.create_task(supervise(guarded, lease.assignment, shell("exec sleep 300")))
    lease.warn(reason)
    outcome = await running
    assert outcome.end_reason == reason
    assert outcome.why is not None
    assert outcome.code_of_run == code


async def test_a_report_that_fails_does_not_end_the_warnings(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    lease, heard = Lease(), asyncio.Queue[LeaseEnding | None]()

    def write_to_full_disk(ending: LeaseEnding | None) -> None:
        heard.put_nowait(ending)
        raise OSError("No space left on device")

    with output() as (reading, writing), caplog.at_level(logging.WARNING):
        command = shell("trap 'echo told' TERM; echo ready; while :; do sleep 0.02; done", writing, grace_s=0.1)
        running = asyncio.create_task(supervise(guarded, lease.assignment, command, on_warning=write_to_full_disk))
        assert await ready(reading) == "ready"
        lease.warn("preempted")
        assert await ready(reading) == "told"
        lease.warned.set(None)
        assert [await heard.get() is None, await heard.get() is None] == [False, True]
        lease.warn("idle", in_s=0.3)
        assert (await running).end_reason == "idle"
    assert "No space left on device" in caplog.text


async def test_a_lost_lease_ends_the_command_and_says_why(guarded: Guarded) -> None:
    lease, heard = Lease(), list[str]()
    running = asyncio.create_task(supervise(guarded, lease.assignment, shell("exec sleep 300"), on_lost=heard.append))
    lease.lost.set("an administrator took it", "revoked")
    outcome = await running
    assert outcome.is_lost
    assert (outcome.code_of_run, outcome.why) == (FAILED, "its GPU was lost: an administrator took it")
    assert heard == ["an administrator took it"]


async def test_a_command_has_a_limit_of_its_own_and_the_next_one_starts_again(guarded: Guarded) -> None:
    lease = Lease()
    for _ in range(2):
        outcome = await supervise(guarded, lease.assignment, shell("exec sleep 300", time_limit_s=0.2))
        assert (outcome.end_reason, outcome.code_of_run) == ("time_limit", TIME_LIMIT)
    assert await supervise(guarded, lease.assignment, shell("exit 3", time_limit_s=60)) == Outcome(3)


async def test_a_command_that_cannot_be_run_is_a_failure_and_the_guard_can_run_the_next(guarded: Guarded) -> None:
    lease = Lease()
    with pytest.raises(Failure, match="cannot be run"):
        await supervise(guarded, lease.assignment, SupervisedCommand(argv=["/etc/passwd"], env={}))
    assert await supervise(guarded, lease.assignment, shell("exit 0")) == Outcome(0)


async def test_a_guard_that_was_killed_is_a_failure_in_words(guarded: Guarded) -> None:
    running = asyncio.create_task(supervise(guarded, Lease().assignment, shell("exec sleep 300")))
    await asyncio.sleep(0)
    os.kill(guarded.pid, 9)
    with pytest.raises(GuardDied, match="the guard of the command was killed"):
        await running


async def test_a_lease_that_another_process_requested_is_adopted_renewed_and_released(guarded: Guarded) -> None:
    with ServerProcess({"SIMULATED_GPUS": "1", **OFTEN}) as server:
        lease = take(server, pid=guarded.pid, time_limit_s=600)
        request = GpuRequest(time_limit_s=600)
        environ = {"HOME": "/nonexistent", "GPU_POOL_SOCKET": ""}
        with output() as (reading, writing):
            async with adopted(str(lease["id"]), server.url, request, environ) as held:
                assignment = held.assignment
                outcome = await supervise(guarded, assignment, shell('echo "$CUDA_VISIBLE_DEVICES"', writing))
                assert (outcome, await ready(reading)) == (Outcome(0), "0")
                assert assignment.ends_at is not None
        wait_until_free(server)
        assert server.json(f"/leases/{lease['id']}")["end_reason"] == "released"
        with pytest.raises(Failure, match="cannot be used: "):
            async with adopted(str(lease["id"]), server.url, request, environ):
                pass


async def test_of_a_long_output_the_end_is_kept_in_two_files(guarded: Guarded, tmp_path: Path) -> None:
    path = tmp_path / "log"
    script = "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done"
    async with limited_log(path, 4000) as log:
        await supervise(
            guarded, Lease().assignment, SupervisedCommand(argv=["sh", "-c", script], env={}, streams=(0, log, log))
        )
    old, new = path.with_name("log.old").read_text(), path.read_text()
    assert len(old) == 2000
    assert len(new) < 2000
    assert (old + new).endswith("line 1998\nline 1999\n")
