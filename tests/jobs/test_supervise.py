"""A command on a lease: its environment, warnings, limits, the loss, signals, and what became of it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

import pytest

from gpu_worker_pool.client.options import RequestWishes
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.host.guarded import Guarded
from gpu_worker_pool.jobs.leases import adopted
from gpu_worker_pool.jobs.supervise import Outcome, SupervisedCommand, supervise
from gpu_worker_pool.models import GPUAssignment, LeaseEnding
from gpu_worker_pool.notices import EndNotice, Loss
from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import OFTEN, take, wait_until_free
from tests.server.running import free_port


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


async def test_a_lease_that_another_process_requested_is_adopted_renewed_and_released(guarded: Guarded) -> None:
    with ServerProcess({"SIMULATED_GPUS": "1", **OFTEN}) as server:
        lease = take(server, pid=guarded.pid, time_limit_s=600)
        request: RequestWishes = {"time_limit": 600}
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


async def test_a_server_that_is_gone_for_good_is_not_waited_for_for_ever() -> None:
    environ = {"HOME": "/nonexistent", "GPU_POOL_SOCKET": ""}
    with pytest.raises(Failure, match=r"the lease abc cannot be used: endpoint 127\.0\.0\.1: "):
        async with adopted("abc", f"http://127.0.0.1:{free_port()}", {}, environ, within_s=0.0):
            pass
