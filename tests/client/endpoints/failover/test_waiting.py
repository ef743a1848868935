"""Waiting in the queues of several servers, and what becomes of requests when servers go away and come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_worker_pool import GPUWorkerPoolClient, RequestRefusedError, ServiceUnavailableError
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.testing import ServerProcess
from tests.client.endpoints.failover.elsewhere import QUICKLY_S
from tests.client.fault_tools import breaker, client_of, healthy, id_of, lease_ids, nothing_left, occupy, soon
from tests.client.foreign_servers import ForeignServer, Gate, ScriptedLeases, Seen, lease
from tests.server.leasing import get, release

# --- waiting everywhere ----------------------------------------------------------------------------------------------


async def waiter_of(
    client: GPUWorkerPoolClient, *servers: ServerProcess, **wishes: Any
) -> tuple[asyncio.Task[Any], str]:
    """A request that waits at all of these servers, and its lease id."""
    before = lease_ids(*servers)
    task = asyncio.create_task(client.request_gpu(timeout=20, **wishes))

    def waits() -> str | None:
        new = [lease_ids(server) - before for server in servers]
        return next(iter(new[0])) if all(new) else None

    return task, await soon(waits, "it waits at all of them")


def granting_at_once() -> tuple[ScriptedLeases, ScriptedLeases, Gate, Gate]:
    """Two servers that let wait and grant when the first gate is opened. The first one confirms its grant only when the
    second has made its own, so that there are two; the second takes it back when the second gate is opened.
    """
    grant, release_lease, both = Gate(), Gate(), Gate()

    async def queued(seen: Seen) -> tuple[int, Any]:
        return 202, lease(seen.lease_id, "queued")

    async def first_get(seen: Seen) -> tuple[int, Any]:
        await grant.passed()
        return 200, lease(seen.lease_id, "active")

    async def first_renew(seen: Seen) -> None:
        await both.passed()
        await asyncio.sleep(0.1)  # a network's latency: the other grant arrives before this answer

    async def second_get(seen: Seen) -> tuple[int, Any]:
        await grant.passed()
        both.open()
        return 200, lease(seen.lease_id, "active")

    async def second_delete(seen: Seen) -> None:
        await release_lease.passed()

    full = {**ScriptedLeases.empty_pool()}
    first = ScriptedLeases(pool=(200, full), put=queued, get=first_get, renew=first_renew)
    second = ScriptedLeases(pool=(200, full), put=queued, get=second_get, renew=first_renew, delete=second_delete)
    return first, second, grant, release_lease


async def test_the_second_of_two_grants_is_given_back_before_the_caller_sees_the_first() -> None:
    first, second, grant, release_lease = granting_at_once()
    with ForeignServer(first.behaviour()) as one, ForeignServer(second.behaviour()) as two:
        async with client_of(one, two, endpoint_timeout=5) as client:
            await healthy(client, one, two)
            task = asyncio.create_task(client.request_gpu(timeout=30))
            await soon(lambda: one.asked("GET", "/leases/") and two.asked("GET", "/leases/"), "it waits at both")
            grant.open()
            await soon(lambda: first.deleted or second.deleted, "one of them is given back")
            kept, released = (one, second) if second.deleted else (two, first)
            assert released.deleted == [seen.lease_id for seen in (two if released is second else one).asked("PUT")]
            if released is second:
                assert not task.done(), "nobody sees the one before the other is back"
            release_lease.open()
            assignment = await asyncio.wait_for(task, 20)
            assert assignment.endpoint_id == id_of(kept)


# What is left of a TTL of 600 s, as the answer to a poll says it; a heartbeat would be due after 200 s.
@pytest.mark.parametrize(
    ("facts", "is_made_sure"),
    [
        ({"ttl_s": 600.0, "expires_in_s": 600.0}, False),
        ({"ttl_s": 600.0, "expires_in_s": 560.0}, False),
        ({"ttl_s": 600.0, "expires_in_s": 500.0}, True),
        ({"ttl_s": 600.0, "expires_in_s": 900.0}, True),
        ({"ttl_s": 600.0, "expires_in_s": None}, True),
        ({"expires_in_s": 600.0}, True),
        ({}, True),
    ],
)
async def test_a_grant_that_was_waited_for_is_made_sure_of_unless_it_is_new(
    facts: dict[str, Any], is_made_sure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_TTL", "600")

    async def queued(seen: Seen) -> tuple[int, Any]:
        return 202, lease(seen.lease_id, "queued")

    async def granted(seen: Seen) -> tuple[int, Any]:
        return 200, lease(seen.lease_id, "active", **facts)

    with ForeignServer(ScriptedLeases(put=queued, get=granted).behaviour()) as foreign:
        async with client_of(foreign) as client:
            before = boot_time()
            assignment: Any = await client.request_gpu(timeout=30)
            assert bool(foreign.asked("POST", "/leases/renew")) == is_made_sure
            ran_s = 0.0 if is_made_sure else 600.0 - facts["expires_in_s"]
            # A third of the TTL before its end, reckoned from what had run of it.
            assert before + 400.0 - ran_s - 0.1 < assignment.lost.ends_at < boot_time() + 400.0 - ran_s


async def test_a_grant_whose_box_does_not_answer_yet_is_asked_for_again_under_the_same_id() -> None:
    """After a take-over the new leader knows the grant before its box has joined. Under another id the place in the queue
    would be lost, and the first lease would keep its GPU for nothing.
    """
    answers: Iterator[Any] = iter([{"renewed": [], "lost": []}])

    async def granted(seen: Seen) -> tuple[int, Any]:
        return 200, lease(seen.lease_id, "active")

    async def renewed(seen: Seen) -> tuple[int, Any] | None:
        return None if (unknown := next(answers, None)) is None else (200, unknown)

    with ForeignServer(ScriptedLeases(put=granted, renew=renewed).behaviour()) as foreign:
        async with client_of(foreign) as client:
            assignment: Any = await client.request_gpu(timeout=30)
            assert {seen.lease_id for seen in foreign.asked("PUT")} == {assignment.lease_id}


async def test_a_server_that_dies_while_one_waits_there_is_dropped(servers: list[ServerProcess]) -> None:
    first, second, _ = servers
    others = occupy(first, second)
    async with client_of(first, second) as client:
        await healthy(client, first, second)
        task, _ = await waiter_of(client, first, second)
        first.kill()
        await healthy(client, second)
        assert not task.done()
        release(second, others[1])
        assert (await asyncio.wait_for(task, QUICKLY_S)).endpoint_id == id_of(second)


async def test_a_waiter_joins_a_server_that_is_back(servers: list[ServerProcess]) -> None:
    first, second, _ = servers
    occupy(second)
    first.kill()
    async with client_of(first, second) as client:
        task, lease_id = await waiter_of(client, second)
        assert not task.done()
        first.start()
        assert (await asyncio.wait_for(task, 20)).endpoint_id == id_of(first)
        await soon(lambda: lease_id not in lease_ids(second), "the queue of the other is left")


async def test_a_waiter_keeps_its_place_when_the_server_is_restarted(servers: list[ServerProcess]) -> None:
    first = servers[0]
    (other,) = occupy(first)
    async with client_of(first) as client:
        task, lease_id = await waiter_of(client, first)
        await asyncio.to_thread(first.restart)
        await soon(lambda: client.get_error_recovery_status()["healthy_endpoints"], "it is up")
        await soon(lambda: get(first, lease_id)["position"] == 1, "it waits still")
        release(first, other)
        assert (await asyncio.wait_for(task, 20)).lease_id == lease_id


async def test_a_waiter_who_was_thrown_out_of_a_queue_asks_again_each_time_with_another_id() -> None:
    """It was not heard of for too long, three times over."""

    async def queued(seen: Seen) -> tuple[int, Any]:
        return 202, lease(seen.lease_id, "queued")

    async def expired(seen: Seen) -> tuple[int, Any]:
        return 200, lease(seen.lease_id, "ended", end_reason="expired")

    scripted = ScriptedLeases(put=queued, get=expired)
    with ForeignServer(scripted.behaviour()) as foreign:
        async with client_of(foreign) as client:
            task = asyncio.create_task(client.request_gpu(timeout=20))
            await soon(lambda: len(foreign.asked("PUT")) >= 4, "it was asked four times", 15)
            task.cancel()
            await asyncio.wait([task])
    ids = [seen.lease_id for seen in foreign.asked("PUT")]
    assert len(set(ids)) == len(ids)


async def test_a_waiter_that_an_operator_took_out_of_the_queue_does_not_come_back(servers: list[ServerProcess]) -> None:
    first = servers[0]
    occupy(first)
    async with client_of(first) as client:
        task, lease_id = await waiter_of(client, first)
        assert first.ask(f"/admin/leases/{lease_id}/revoke", "POST").status == 200
        with pytest.raises(RequestRefusedError, match="revoked by"):
            await asyncio.wait_for(task, 20)


# --- what cannot be served -------------------------------------------------------------------------------------------


async def test_what_is_impossible_everywhere_is_refused_at_once(servers: list[ServerProcess]) -> None:
    async with client_of(*servers) as client:
        await healthy(client, *servers)
        began = time.monotonic()
        with pytest.raises(RequestRefusedError) as raised:
            await client.request_gpu(timeout=20, gpus=3)
        assert time.monotonic() - began < QUICKLY_S
        assert isinstance(raised.value, ValueError)
        assert set(raised.value.reasons) == {id_of(server) for server in servers}
        with pytest.raises(RequestRefusedError):
            await client.request_gpu(timeout=20, model="*H100*")
    await nothing_left(*servers)


async def test_what_is_impossible_at_one_is_served_by_the_other(servers: list[ServerProcess]) -> None:
    scripted = ScriptedLeases(put=(422, {"detail": "there is no such GPU here"}))
    (other,) = occupy(servers[0])
    with ForeignServer(scripted.behaviour()) as foreign:
        async with client_of(foreign, servers[0]) as client:
            await healthy(client, foreign, servers[0])
            task, _ = await waiter_of(client, servers[0])
            release(servers[0], other)
            assert (await asyncio.wait_for(task, QUICKLY_S)).endpoint_id == id_of(servers[0])
            assert len(foreign.asked("PUT")) == 1, "who refused is not asked again"


# --- recovery by hand ------------------------------------------------------------------------------------------------


async def test_a_recovery_that_is_triggered_does_not_wait_for_the_breaker(servers: list[ServerProcess]) -> None:
    first, second, _ = servers
    async with client_of(first, second, endpoint_health_check_interval=60) as client:
        await healthy(client, first, second)
        first.kill()
        await soon(lambda: breaker(client, first) == "open", "the breaker is open")
        assert await client.trigger_endpoint_recovery(id_of(first)) is False
        for _ in range(5):  # each failure makes it wait longer
            await client.trigger_endpoint_recovery(id_of(first))
        first.start()
        assert await client.trigger_endpoint_recovery(id_of(first)) is True
        await healthy(client, first, second)
        assert breaker(client, first) == "closed"
        assert await client.trigger_endpoint_recovery("nobody") is False


async def test_a_queued_request_that_finds_no_server_is_made_again(servers: list[ServerProcess]) -> None:
    first = servers[0]
    async with client_of(first, endpoint_health_check_interval=0.1) as client:
        calls: list[int] = []
        failures: list[ServiceUnavailableError] = []

        async def request() -> Any:
            calls.append(1)
            if len(calls) == 1:
                first.kill()
                await soon(lambda: client.get_error_recovery_status()["degraded_endpoints"], "it is down")
            try:
                return await client.request_gpu(timeout=0.3)
            except ServiceUnavailableError as error:
                failures.append(error)
                raise

        task = asyncio.create_task(client.queue_request_for_retry(request))
        await soon(lambda: failures, "it was made once")
        await asyncio.wait([task], timeout=0.1)
        assert not task.done(), "it failed because there was no server, so it is made again when there is one"
        await asyncio.to_thread(first.start)
        assert (await asyncio.wait_for(task, 20)).local_gpu_id in {0, 1}
        assert len(calls) >= 2
