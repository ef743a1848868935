"""A lease that the client is done with may come back: a database that fails over has lost its end, or a box brings back a grant
that no leader knew of. It is released again, since nothing else would end it while the client's process lives.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpu_worker_pool import GPUWorkerPool
from tests.client.fault_tools import QUICK, client_of, soon
from tests.client.foreign_servers import ForeignServer, ScriptedLeases, Seen, lease
from tests.server.leasing import eventually


class ForgetfulLeases(ScriptedLeases):
    """Forgets a lease that waits, and grants another one; `shown` are active as `/pool` has it."""

    def __init__(self) -> None:
        super().__init__(pool=self.show, put=self.answer, get=(404, {"detail": "there is no such lease"}))
        self.shown: list[str] = []
        self.forgets = False

    async def show(self, _: Seen) -> tuple[int, Any]:
        return 200, self.empty_pool() | {"leases": [lease(lease_id, "active") for lease_id in self.shown]}

    async def answer(self, seen: Seen) -> tuple[int, Any]:
        queues, self.forgets = self.forgets, False
        return (202, lease(seen.lease_id, "queued")) if queues else (201, lease(seen.lease_id, "active"))


async def test_a_request_that_a_server_forgot_is_released_if_it_comes_back_as_a_lease() -> None:
    leases = ForgetfulLeases()
    leases.forgets = True
    with ForeignServer(leases.behaviour()) as server:
        async with client_of(server) as client:
            got = await client.request_gpu(timeout=30)
            given_up, kept = (seen.lease_id for seen in server.asked("PUT"))
            assert got.lease_id == kept != given_up
            # It is released when the other one was granted, in case that it is known by then.
            await soon(lambda: leases.deleted == [given_up], "it is released")
            leases.shown = [given_up, kept]
            await soon(lambda: leases.deleted == [given_up] * 2, "it is released again")
            leases.shown = [kept]
            await client.release_gpu(got)
        assert leases.deleted == [given_up, given_up, kept]


async def test_a_lease_that_is_held_or_another_clients_is_left_alone() -> None:
    leases = ForgetfulLeases()
    with ForeignServer(leases.behaviour()) as server:
        async with client_of(server) as client:
            got = await client.request_gpu(timeout=30)
            leases.shown = [str(got.lease_id), "of-another-client"]
            polls = len(server.asked("GET", "/pool"))
            await soon(lambda: len(server.asked("GET", "/pool")) > polls + 3, "it was seen some times")
            assert leases.deleted == []
            leases.shown.clear()
            await client.release_gpu(got)
        assert leases.deleted == [got.lease_id]


async def test_a_released_lease_is_released_again() -> None:
    leases = ForgetfulLeases()
    with ForeignServer(leases.behaviour()) as server:
        async with client_of(server) as client:
            got = await client.request_gpu(timeout=30)
            await client.release_gpu(got)
            for times in (2, 3):
                leases.shown = [str(got.lease_id)]
                await soon(lambda times=times: len(leases.deleted) >= times, "it is released again")  # type: ignore[misc]
                leases.shown = []
        assert set(leases.deleted) == {got.lease_id}


@pytest.mark.parametrize("endpoints", ["service_endpoint", "service_endpoints"])
def test_a_blocking_client_releases_again_too(endpoints: str) -> None:
    leases = ForgetfulLeases()
    with ForeignServer(leases.behaviour()) as server, GPUWorkerPool(**{endpoints: server.url}, **QUICK) as pool:
        got = pool.request_gpu(timeout=30)
        pool.release_gpu(got)
        leases.shown = [str(got.lease_id)]
        eventually(lambda: leases.deleted == [got.lease_id] * 2, "it is released again")
        leases.shown = []


async def test_what_comes_back_while_the_client_stops_does_not_keep_it() -> None:
    leases = ForgetfulLeases()
    with ForeignServer(leases.behaviour()) as server:
        async with client_of(server) as client:
            got = await client.request_gpu(timeout=30)
            await client.release_gpu(got)
            leases.shown = [str(got.lease_id)]
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("gpu-")] == []
