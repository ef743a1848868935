"""Whatever ends a request: no lease, no place in a queue, no task and no socket is left."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool import WorkerTimeoutError
from gpu_worker_pool.testing import ServerProcess
from tests.client.acquire.cleanup.tasks import waiting
from tests.client.fault_tools import (
    Leftovers,
    client_of,
    healthy,
    id_of,
    lease_ids,
    nothing_left,
    occupy,
    sockets,
    soon,
)
from tests.client.foreign_servers import ForeignServer, Gate, ScriptedLeases, Seen, lease
from tests.server.leasing import eventually, release
from tests.server.running import ROOT


async def ended(task: asyncio.Task[Any], within_s: float = 20.0) -> None:
    """It was cancelled, and says so."""
    await asyncio.wait([task], timeout=within_s)
    assert task.done()
    assert task.cancelled()


# --- a task that is cancelled ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21])
async def test_a_task_that_is_cancelled_while_it_asks_leaves_nothing(servers: list[ServerProcess], steps: int) -> None:
    before = Leftovers()
    async with client_of(*servers) as client:
        await healthy(client, *servers)
        task = asyncio.create_task(client.request_gpu(timeout=20))
        for _ in range(steps):  # turns of the loop: wherever it is then
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await client.release_gpu(task.result())
        await nothing_left(*servers)
        assert client.get_pool_status().active_workers in {0, 1}
    await before.none(*servers)


async def test_a_task_that_is_cancelled_while_it_waits_leaves_all_queues_before_it_ends(
    servers: list[ServerProcess],
) -> None:
    before = Leftovers()
    others = occupy(*servers)
    async with client_of(*servers) as client:
        await healthy(client, *servers)
        task = await waiting(client, *servers)
        task.cancel()
        await ended(task)
        assert lease_ids(*servers) == set(others)
        assert client.get_pool_status().blocked_workers == 0
    for server, other in zip(servers, others, strict=True):
        release(server, other)
    await before.none(*servers)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
async def test_a_task_that_is_cancelled_twice_leaves_the_queues_all_the_same(
    servers: list[ServerProcess], steps: int
) -> None:
    others = occupy(*servers)
    async with client_of(*servers) as client:
        await healthy(client, *servers)
        task = await waiting(client, *servers)
        task.cancel()
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await ended(task)
        await soon(lambda: lease_ids(*servers) == set(others), "the queues are left", 15)


@pytest.mark.parametrize("end", ["cancelled", "timeout"])
async def test_one_that_has_won_and_is_ended_while_it_leaves_the_others_gives_back_what_it_won(end: str) -> None:
    """Granted at two at the same moment; the second one takes its time to take its grant back."""
    both, all_granted, never = Gate(), Gate(), Gate()
    grants: list[str] = []

    async def queued(seen: Seen) -> tuple[int, Any]:
        return 202, lease(seen.lease_id, "queued")

    async def grant(seen: Seen) -> tuple[int, Any]:
        await both.passed()
        grants.append(seen.lease_id)
        if len(grants) == 2:
            all_granted.open()
        return 200, lease(seen.lease_id, "active")

    async def confirm(seen: Seen) -> None:
        await all_granted.passed()
        await asyncio.sleep(0.1)  # a network's latency: the other grant arrives before this answer

    async def never_answered(seen: Seen) -> None:
        await never.passed()

    first = ScriptedLeases(put=queued, get=grant, renew=confirm, delete=never_answered)
    second = ScriptedLeases(put=queued, get=grant, renew=confirm, delete=never_answered)
    with ForeignServer(first.behaviour()) as one, ForeignServer(second.behaviour()) as two:
        async with client_of(one, two, endpoint_timeout=1, endpoint_max_retries=0) as client:
            await healthy(client, one, two)
            task = asyncio.create_task(client.request_gpu(timeout=20 if end == "cancelled" else 0.6))
            await soon(lambda: one.asked("GET", "/leases/") and two.asked("GET", "/leases/"), "it waits at both")
            both.open()
            await soon(lambda: first.deleted or second.deleted, "the others are being left")
            is_kept_by_one = bool(second.deleted) and not first.deleted
            kept = first if is_kept_by_one else second
            if end == "cancelled":
                task.cancel()
            await asyncio.wait([task], timeout=15)
            assert task.done()
            if task.cancelled() or task.exception() is not None:
                await soon(lambda: kept.deleted, "what was won is given back", 15)
            else:
                assert end == "timeout", "a grant that was made in time may be kept"
                assert task.result().endpoint_id == id_of(one if is_kept_by_one else two)
            never.open()


# --- other ends of a request -------------------------------------------------------------------------------------------


async def test_a_request_whose_time_is_over_leaves_all_queues_before_it_says_so(servers: list[ServerProcess]) -> None:
    before = Leftovers()
    others = occupy(*servers)
    async with client_of(*servers) as client:
        await healthy(client, *servers)
        with pytest.raises(WorkerTimeoutError) as raised:
            await client.request_gpu(timeout=0.4)
        assert lease_ids(*servers) == set(others)
        assert all(id_of(server) in (raised.value.reason or "") for server in servers)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.request_gpu(timeout=20), 0.3)
        assert lease_ids(*servers) == set(others)
    for server, other in zip(servers, others, strict=True):
        release(server, other)
    await before.none(*servers)


# --- Ctrl-C ------------------------------------------------------------------------------------------------------------


INTERRUPTED = """
import asyncio, sys
from gpu_worker_pool import GPUContextManager, GPUWorkerPoolClient

async def main():
    async with GPUWorkerPoolClient(service_endpoints=sys.argv[1], polling_interval=0.1) as client:
        print("started", flush=True)
        async with GPUContextManager(client, timeout=60) as gpu:
            print("holds", flush=True)
            await asyncio.Event().wait()

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.readline()  # it lives on, so nothing ends by its death
"""


@pytest.mark.parametrize("when", ["holding", "waiting"])
def test_an_interrupted_program_has_given_everything_back_when_it_hears_of_it(
    servers: list[ServerProcess], when: str
) -> None:
    others = occupy(*servers) if when == "waiting" else []
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", INTERRUPTED, ",".join(s.url for s in servers)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            assert child.stdout.readline() == "started\n"
            if when == "holding":
                assert child.stdout.readline() == "holds\n"
            else:
                eventually(lambda: all(lease_ids(s) - set(others) for s in servers), "it waits at both")
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "interrupted\n"
            eventually(lambda: lease_ids(*servers) == set(others), "nothing of it is left", 15)
            assert child.stdin is not None
            child.stdin.close()
            assert child.wait(10) == 0
            assert child.stderr.read() == "", "no warning about what was not closed or awaited"
        finally:
            child.kill()


# --- again and again ---------------------------------------------------------------------------------------------------


def resident_kb() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize() // 1024


def is_of_a_timer(known: object) -> bool:
    """asyncio keeps up to a few hundred cancelled timers, each with its context, until it removes them all at once."""
    return isinstance(known, asyncio.TimerHandle | contextvars.Context)


async def test_many_requests_leave_memory_and_counts_as_they_were(servers: list[ServerProcess]) -> None:
    first = servers[0]
    async with client_of(first, endpoint_timeout=5) as client:

        async def cycles(number: int) -> tuple[int, int, int]:
            for _ in range(number):
                assignment = await client.request_gpu(timeout=30)
                await client.release_gpu(assignment)
            gc.collect()
            return (
                len([known for known in gc.get_objects() if not is_of_a_timer(known)]),
                len(asyncio.all_tasks()),
                len(sockets()),
            )

        # The ids that are kept of the last thousand are no objects for the garbage collection, and 100 bytes each.
        objects, tasks, open_sockets = await cycles(200)
        size_kb = resident_kb()
        objects_after, tasks_after, open_sockets_after = await cycles(400)
        assert objects_after - objects < 100, "not one object for every fourth request"
        assert len([timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]) < 20  # type: ignore[attr-defined]
        assert resident_kb() - size_kb < 2000
        assert tasks_after <= tasks + 1
        assert open_sockets_after <= open_sockets + 1
        started = client._started_client
        assert started is not None
        assert not started
        assert not started._releases
        assert not started.tally.waiting
    await nothing_left(first)
