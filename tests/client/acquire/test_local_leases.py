"""Leases of processes on the server's machine last as long as the process, whatever happens to server and client."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpu_worker_pool import GPUWorkerPool, RequestRefusedError, StaleAssignmentError
from gpu_worker_pool.client.local_client import LocalClient
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.request import Holder
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from tests.client.fault_tools import as_at_first, client_of, lease_ids, nothing_left, running, soon
from tests.preloaded import PreloadedPopen
from tests.server.leasing import eventually, get, take

TTL_S = 0.6


@pytest.fixture(scope="module")
def one() -> Iterator[list[ServerProcess]]:
    with running(1, SIMULATED_GPUS="4") as servers:
        yield servers


@pytest.fixture
def server(one: list[ServerProcess], monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.setenv("GPU_POOL_TTL", str(TTL_S))
    yield one[0]
    as_at_first(one)


def wait_for_an_expiry(server: ServerProcess) -> None:
    """Wait until a lease with a longer TTL than the tests' has expired, at a server that runs."""
    lease_id = take(server, ttl_s=3 * TTL_S)["id"]
    eventually(lambda: get(server, lease_id)["state"] == "ended", "it expires")


async def test_an_outage_of_the_server_costs_nothing(server: ServerProcess) -> None:
    async with client_of(server) as client:
        assignment = await client.request_gpu(timeout=30)
        assert assignment.lost is not None
        await asyncio.to_thread(server.kill)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(assignment.lost.wait(), 4 * TTL_S)
        assert not assignment.is_lost

        await asyncio.to_thread(server.start)
        assert lease_ids(server) == {assignment.lease_id}
        await asyncio.to_thread(wait_for_an_expiry, server)
        assert not assignment.is_lost
        await client.release_gpu(assignment)
    await nothing_left(server)


async def test_a_release_by_another_caller_is_told_with_its_name_and_words(server: ServerProcess) -> None:
    told: list[Any] = []
    async with client_of(server, on_lost=told.append) as client:
        assignment = await client.request_gpu(timeout=30)
        assert assignment.lost is not None
        server.ask(f"/leases/{assignment.lease_id}?reason=the%20demo", "DELETE")

        reason = await asyncio.wait_for(assignment.lost.wait(), 20)

        assert reason == f"it was released by {user_name()}: the demo"
        assert told == [assignment]
        with pytest.raises(StaleAssignmentError, match=f"released by {user_name()}: the demo"):
            await client.release_gpu(assignment)


async def test_a_request_that_another_caller_ends_is_said_to_have_waited(server: ServerProcess) -> None:
    async with client_of(server) as client:
        await client.request_gpu(timeout=30, gpus=4)
        waiting = asyncio.create_task(client.request_gpu(timeout=30))
        await soon(lambda: len(lease_ids(server)) == 2, "it waits")
        (lease_id,) = (lease["id"] for lease in server.json("/pool")["queue"])
        server.ask(f"/leases/{lease_id}?reason=cleanup", "DELETE")
        with pytest.raises(RequestRefusedError) as caught:
            await waiting
    assert "the request was ended while it waited" in str(caught.value)
    assert f"it was taken out of the queue by {user_name()}: cleanup; request again" in str(caught.value)


HOLDER = """
import sys
from gpu_worker_pool import GPUWorkerPool
with GPUWorkerPool(sys.argv[1]) as pool, pool.gpu(timeout=30) as held:
    print(held.lease_id, flush=True)
    sys.stdin.readline()
    print(held.is_lost, flush=True)
"""


def test_a_holder_that_stood_still_for_longer_than_the_ttl_has_its_gpu(server: ServerProcess) -> None:
    command = [sys.executable, "-c", HOLDER, server.url]
    with PreloadedPopen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            lease_id = child.stdout.readline().strip()
            child.send_signal(signal.SIGSTOP)
            wait_for_an_expiry(server)
            assert get(server, lease_id)["state"] == "active"
            child.send_signal(signal.SIGCONT)
            wait_for_an_expiry(server)
            assert child.communicate("\n")[0] == "False\n"
            assert child.wait() == 0
        finally:
            child.kill()


def test_a_release_that_could_not_be_delivered_is_repeated_after_the_client_has_stopped(server: ServerProcess) -> None:
    with GPUWorkerPool(server.url) as pool:
        assignment = pool.request_gpu(timeout=30)
        server.kill()

    server.start()

    eventually(lambda: get(server, assignment.lease_id or "")["end_reason"] == "released", "it is released")


def test_a_holder_that_died_while_the_server_was_away_has_no_lease_after_it(server: ServerProcess) -> None:
    command = [sys.executable, "-c", HOLDER, server.url]
    with PreloadedPopen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lease_id = child.stdout.readline().strip()
        server.kill()
        child.kill()
    server.start()

    eventually(lambda: get(server, lease_id)["end_reason"] == "holder_died", "its death is noticed")


def test_a_server_that_stops_says_which_leases_go_on_without_it(server: ServerProcess) -> None:
    with GPUWorkerPool(server.url) as pool:
        pool.request_gpu(timeout=30)
        take(server, ttl_s=60)
        assert server.process is not None
        server.process.send_signal(signal.SIGINT)
        server.process.wait()
        log = (server.folder / "log").read_text()
        assert "this server stops; without it, 1 lease goes on while the process of the holder runs, and 1 of " in log
        server.start()


async def test_a_holder_without_a_process_keeps_its_lease_when_the_client_has_let_it_go(server: ServerProcess) -> None:
    async with LocalClient(replace(ClientConfig.build(service_endpoint=server.url), ttl_s=60.0), {}) as client:
        assignment = await client.request(30.0, {"time_limit": 60}, holder=Holder(host="a laptop"))
        client.let_go(assignment)
    lease = get(server, assignment.lease_id or "")
    assert (lease["state"], lease["host"], lease["pid"], lease["is_local"]) == ("active", "a laptop", None, False)
