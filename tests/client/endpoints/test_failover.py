"""Several servers, some of them dead, stopped, slow or out of their minds: requests are served by the others."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool import (
    GPUWorkerPoolClient,
    RequestRefusedError,
    ServiceUnavailableError,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from gpu_worker_pool.host.clock import boot_time
from tests.client.fault_tools import (
    as_at_first,
    breaker,
    client_of,
    healthy,
    id_of,
    lease_ids,
    nothing_left,
    occupy,
    running,
    soon,
    stopped,
)
from tests.client.foreign_servers import (
    Behaviour,
    ForeignServer,
    Gate,
    ScriptedLeases,
    Seen,
    breaking_off,
    closing,
    garbage,
    hanging,
    huge,
    internal_error,
    lease,
    no_http,
    not_found,
    redirecting,
    saying,
    slowed,
    statistics,
)
from tests.client.wire import Wire
from tests.server.leasing import get, put, release
from tests.server.running import RunningServer, free_port

# Far less than what it would take to wait for a server that does not answer, and enough on a busy machine.
QUICKLY_S = 8.0


@pytest.fixture(scope="module")
def three() -> Iterator[list[RunningServer]]:
    with running(3) as servers:
        yield servers


@pytest.fixture
def servers(three: list[RunningServer]) -> Iterator[list[RunningServer]]:
    yield three
    as_at_first(three)


async def served_elsewhere(client: GPUWorkerPoolClient, bad: Any, number: int = 4) -> None:
    """So many requests one after the other, each quickly, none of them there."""
    assignments = []
    for _ in range(number):
        began = time.monotonic()
        assignment = await client.request_gpu(timeout=30)
        assert time.monotonic() - began < QUICKLY_S
        assert assignment.endpoint_id != id_of(bad)
        assignments.append(assignment)
    assert len({assignment.global_gpu_id for assignment in assignments}) == number
    for assignment in assignments:
        await client.release_gpu(assignment)


# --- one of three is in a bad way ------------------------------------------------------------------------------------


async def test_a_killed_server_is_passed_over_and_its_breaker_opens_and_closes_again(
    servers: list[RunningServer],
) -> None:
    first, *others = servers
    async with client_of(*servers) as client:
        await healthy(client, *servers)
        first.kill()

        await served_elsewhere(client, first)
        await soon(lambda: breaker(client, first) == "open", "the breaker is open")
        await healthy(client, *others)
        status = client.get_error_recovery_status()
        assert status["circuit_breaker_stats"][id_of(first)]["times_opened"] >= 1
        assert [breaker(client, other) for other in others] == ["closed", "closed"]

        first.start()
        await healthy(client, *servers)
        assert breaker(client, first) == "closed"
        held = [await client.request_gpu(timeout=30) for _ in range(6)]
        assert sum(assignment.endpoint_id == id_of(first) for assignment in held) == 2
    await nothing_left(*servers)


@pytest.mark.parametrize("strategy", ["availability", "round_robin"])
async def test_a_stopped_server_is_passed_over_and_nothing_is_left_at_it_when_it_goes_on(
    servers: list[RunningServer], strategy: str
) -> None:
    first, *_ = servers
    async with client_of(*servers, load_balancing_strategy=strategy) as client:
        await healthy(client, *servers)
        with stopped(first):
            await served_elsewhere(client, first)
            await soon(lambda: id_of(first) in client.get_error_recovery_status()["degraded_endpoints"], "it is down")
            await served_elsewhere(client, first)
        await healthy(client, *servers)
        await nothing_left(*servers)
        held = [await client.request_gpu(timeout=30) for _ in range(6)]
        assert len({assignment.global_gpu_id for assignment in held}) == 6
    await nothing_left(*servers)


async def test_a_slow_server_delays_nobody(servers: list[RunningServer]) -> None:
    with Wire(servers[0].port) as slow:
        async with client_of(slow, *servers[1:], endpoint_timeout=5, load_balancing_strategy="round_robin") as client:
            await healthy(client, slow, *servers[1:])
            slow.delay_s = 1.0
            await served_elsewhere(client, slow)
            slow.delay_s = 0.0
    await nothing_left(*servers)


async def test_a_request_that_arrives_after_it_was_withdrawn_leaves_no_lease(servers: list[RunningServer]) -> None:
    """The network keeps no order between two connections."""
    slow_server, other = servers[:2]
    with Wire(slow_server.port) as slow:
        async with client_of(slow, other, load_balancing_strategy="round_robin", endpoint_timeout=5) as client:
            await healthy(client, slow, other)
            slow.delayed_methods = (b"PUT",)
            slow.delay_s = 0.6
            for assignment in [await client.request_gpu(timeout=30) for _ in range(2)]:
                await client.release_gpu(assignment)
            assert any(call.startswith("PUT") for call in slow.calls)
            # It is there for a moment: what it must not do is to stay for the whole TTL, which is 30 s.
            await soon(lambda: lease_ids(slow_server), "the late request arrived")
            await nothing_left(slow_server, within_s=15)


NONSENSE_POOLS: dict[str, Any] = {
    "no_object": [1, 2, 3],
    "index_is_a_text": {"gpus": [{"gpu_id": "0", "uuid": "x", "state": "free"}], "leases": [], "queue": []},
    "leases_with_texts_for_gpus": {"gpus": [], "leases": [{"state": "active", "gpus": ["GPU-1"]}], "queue": []},
    "leases_with_a_number_for_gpus": {"gpus": [], "leases": [{"state": "active", "gpus": 5}], "queue": []},
    "a_huge_number": {
        "gpus": [{"gpu_id": 0, "uuid": "x", "state": "leased", "memory_total_mb": 10**400, "memory_used_mb": 1}],
        "leases": [],
        "queue": [],
    },
}

BAD: dict[str, Behaviour] = {
    "garbage": garbage,
    "internal_error": internal_error,
    "not_found": not_found,
    "huge": huge,
    "redirecting": redirecting("http://127.0.0.1:1"),
    "hanging": hanging,
    "closing": closing,
    "breaking_off": breaking_off,
    "no_http": no_http,
    "slow": slowed(ScriptedLeases().behaviour(), 2.0),
    **{f"pool_{name}": saying(200, json.dumps(pool).encode()) for name, pool in NONSENSE_POOLS.items()},
}


# A number that nobody has is no reason not to use the server, as long as it is survived.
@pytest.mark.parametrize("name", [name for name in BAD if name != "pool_a_huge_number"])
async def test_a_server_that_goes_bad_is_passed_over_and_used_again_when_it_is_well(
    servers: list[RunningServer], name: str
) -> None:
    good = ScriptedLeases().behaviour()
    others = servers[:2]
    with ForeignServer(good) as foreign:
        async with client_of(foreign, *others) as client:
            await healthy(client, foreign, *others)
            foreign.behaviour = BAD[name]

            await served_elsewhere(client, foreign, 3)
            await healthy(client, *others)
            assert client.get_error_recovery_status()["errors"][id_of(foreign)]
            await served_elsewhere(client, foreign, 1)

            foreign.behaviour = good
            await healthy(client, foreign, *others)
            await soon(lambda: breaker(client, foreign) == "closed", "its breaker is closed")
    await nothing_left(*servers)


BAD_AT_FIRST = ["internal_error", "huge", "hanging", "closing", "pool_leases_with_texts_for_gpus", "pool_a_huge_number"]


@pytest.mark.parametrize("name", BAD_AT_FIRST)
async def test_a_server_that_is_bad_at_first_delays_no_start_and_is_used_when_it_is_well(
    servers: list[RunningServer], name: str
) -> None:
    other = servers[0]
    with ForeignServer(BAD[name]) as foreign:
        began = time.monotonic()
        async with client_of(foreign, other) as client:
            await served_elsewhere(client, foreign, 2)
            assert time.monotonic() - began < QUICKLY_S
            foreign.behaviour = ScriptedLeases().behaviour()
            await healthy(client, foreign, other)
    await nothing_left(other)


GPU = {"node": "n", "gpu_id": 0, "uuid": "GPU-x", "name": "x"}
NONSENSE_LEASES: dict[str, Any] = {
    "active_without_gpus": {"state": "active", "gpus": []},
    "gpus_are_null": {"state": "active", "gpus": None},
    "gpus_are_texts": {"state": "active", "gpus": ["GPU-x"]},
    "gpu_without_uuid": {"state": "active", "gpus": [{"gpu_id": 0}]},
    "index_is_a_text": {"state": "active", "gpus": [{**GPU, "gpu_id": "0"}]},
    "index_is_negative": {"state": "active", "gpus": [{**GPU, "gpu_id": -3}]},
    "index_is_enormous": {"state": "active", "gpus": [{**GPU, "gpu_id": 2**70}]},
    "index_is_a_truth": {"state": "active", "gpus": [{**GPU, "gpu_id": True}]},
    "state_is_a_number": {"state": 5, "gpus": [GPU]},
    "state_is_a_list": {"state": [], "gpus": [GPU]},
    "no_state": {"gpus": [GPU]},
    "a_list": [],
    "nothing": None,
    "a_text": "active",
}


@pytest.mark.parametrize("name", NONSENSE_LEASES)
async def test_a_lease_that_makes_no_sense_is_not_taken_for_a_gpu(servers: list[RunningServer], name: str) -> None:
    other = servers[0]
    told = NONSENSE_LEASES[name]
    scripted = ScriptedLeases(put=(201, told if not isinstance(told, dict) else {"id": "x", "env": 5, **told}))
    with ForeignServer(scripted.behaviour()) as foreign:
        async with client_of(foreign, other) as client:
            await healthy(client, foreign, other)
            await served_elsewhere(client, foreign, 2)
            # The strategy tries the one with all its GPUs free first; were it never asked, this would prove nothing.
            asked = {seen.lease_id for seen in foreign.asked("PUT")}
            assert asked
            await soon(lambda: asked <= set(scripted.deleted), "what was asked for there is withdrawn")
    await nothing_left(other)


async def test_facts_beside_the_gpus_that_make_no_sense_are_left_out() -> None:
    scripted = ScriptedLeases(
        put=lambda seen: _answer(201, lease(seen.lease_id, "active", fence="seven", env=[1], position="x"))
    )
    with ForeignServer(scripted.behaviour()) as foreign:
        async with client_of(foreign) as client:
            assignment = await client.request_gpu(timeout=30)
            assert assignment.env == {}
            assert assignment.fence is None


async def _answer(status: int, data: Any) -> tuple[int, Any]:
    return status, data


async def test_a_statistics_only_server_beside_others_is_used_and_its_death_is_survived(
    servers: list[RunningServer],
) -> None:
    other = servers[0]
    with ForeignServer(statistics(2)) as foreign:
        async with client_of(foreign, other) as client:
            await healthy(client, foreign, other)
            held = [await client.request_gpu(timeout=30) for _ in range(4)]
            assert len({assignment.global_gpu_id for assignment in held}) == 4
            for assignment in held:
                await client.release_gpu(assignment)
            foreign.behaviour = closing
            await healthy(client, other)
            await served_elsewhere(client, foreign, 2)
    await nothing_left(other)


async def test_a_statistics_only_server_that_does_not_tell_sizes_hands_out_whole_gpus() -> None:
    summary = statistics(1)

    async def behave(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await (internal_error if seen.path == "/gpu/stats" else summary)(seen, writer)

    with ForeignServer(behave) as foreign:
        async with client_of(foreign) as client:
            assert (await client.request_gpu(timeout=3)).local_gpu_id == 0


# --- waiting everywhere ----------------------------------------------------------------------------------------------


async def waiter_of(
    client: GPUWorkerPoolClient, *servers: RunningServer, **wishes: Any
) -> tuple[asyncio.Task[Any], str]:
    """A request that waits at all of these servers, and its lease id."""
    before = lease_ids(*servers)
    task = asyncio.create_task(client.request_gpu(timeout=20, **wishes))

    def waits() -> str | None:
        new = [lease_ids(server) - before for server in servers]
        return next(iter(new[0])) if all(new) else None

    return task, await soon(waits, "it waits at all of them")


async def test_a_waiter_takes_the_first_grant_and_leaves_the_other_queues(servers: list[RunningServer]) -> None:
    others = occupy(*servers)
    async with client_of(*servers) as client:
        await healthy(client, *servers)
        task, lease_id = await waiter_of(client, *servers)
        assert all(lease_id in lease_ids(server) for server in servers), "the same id everywhere"
        release(servers[1], others[1])
        assignment = await asyncio.wait_for(task, QUICKLY_S)
        assert assignment.endpoint_id == id_of(servers[1])
        await soon(lambda: lease_ids(servers[0], servers[2]) == {others[0], others[2]}, "the other queues are left")
        await client.release_gpu(assignment)
        await nothing_left(servers[1])


async def test_of_two_grants_at_the_same_moment_one_is_kept_and_the_other_is_back_before_anybody_sees(
    servers: list[RunningServer],
) -> None:
    others = occupy(*servers[:2])
    async with client_of(*servers[:2]) as client:
        await healthy(client, *servers[:2])
        tasks = [(await waiter_of(client, *servers[:2]))[0] for _ in range(4)]
        for server, other in zip(servers, others, strict=False):
            await asyncio.to_thread(release, server, other)
        assignments = await asyncio.wait_for(asyncio.gather(*tasks), 20)
        assert len({assignment.global_gpu_id for assignment in assignments}) == 4
        ids = {assignment.lease_id for assignment in assignments}
        await soon(lambda: lease_ids(*servers[:2]) == ids, "nothing else is held")


def granting_at_once() -> tuple[ScriptedLeases, ScriptedLeases, Gate, Gate]:
    """Two servers that let wait and grant when the first gate is opened. The first one confirms its grant only when the
    second has made its own, so that there are two; the second takes it back when the second gate is opened.
    """
    grant, give_back, both = Gate(), Gate(), Gate()

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
        await give_back.passed()

    full = {**ScriptedLeases.empty_pool()}
    first = ScriptedLeases(pool=(200, full), put=queued, get=first_get, renew=first_renew)
    second = ScriptedLeases(pool=(200, full), put=queued, get=second_get, renew=first_renew, delete=second_delete)
    return first, second, grant, give_back


async def test_the_second_of_two_grants_is_given_back_before_the_caller_sees_the_first() -> None:
    first, second, grant, give_back = granting_at_once()
    with ForeignServer(first.behaviour()) as one, ForeignServer(second.behaviour()) as two:
        async with client_of(one, two, endpoint_timeout=5) as client:
            await healthy(client, one, two)
            task = asyncio.create_task(client.request_gpu(timeout=30))
            await soon(lambda: one.asked("GET", "/leases/") and two.asked("GET", "/leases/"), "it waits at both")
            grant.open()
            await soon(lambda: first.deleted or second.deleted, "one of them is given back")
            kept, given_back = (one, second) if second.deleted else (two, first)
            assert given_back.deleted == [seen.lease_id for seen in one.asked("PUT")]
            if given_back is second:
                assert not task.done(), "nobody sees the one before the other is back"
            give_back.open()
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


async def test_a_grant_that_was_long_under_way_is_made_sure_of_whatever_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody knows when in the meantime it was answered: the client may have been stopped, and the lease have ended."""
    monkeypatch.setenv("GPU_POOL_TTL", "1.2")

    async def queued(seen: Seen) -> tuple[int, Any]:
        return 202, lease(seen.lease_id, "queued")

    async def granted_late(seen: Seen) -> tuple[int, Any]:
        await asyncio.sleep(0.2)  # more than a twelfth of the TTL
        return 200, lease(seen.lease_id, "active", ttl_s=1.2, expires_in_s=1.2)

    async def over(seen: Seen) -> tuple[int, Any]:
        return 200, {"renewed": [], "lost": [{"id": seen.json["ids"][0], "reason": "expired"}]}

    scripted = ScriptedLeases(put=queued, get=granted_late, renew=over)
    with ForeignServer(scripted.behaviour()) as foreign:
        async with client_of(foreign, endpoint_timeout=5) as client:
            with pytest.raises(WorkerTimeoutError):
                await client.request_gpu(timeout=0.6)
            assert foreign.asked("POST", "/leases/renew")


async def test_a_server_that_dies_while_one_waits_there_is_dropped(servers: list[RunningServer]) -> None:
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


async def test_a_waiter_joins_a_server_that_is_back(servers: list[RunningServer]) -> None:
    first, second, _ = servers
    occupy(second)
    first.kill()
    async with client_of(first, second) as client:
        task, lease_id = await waiter_of(client, second)
        assert not task.done()
        first.start()
        assert (await asyncio.wait_for(task, 20)).endpoint_id == id_of(first)
        await soon(lambda: lease_id not in lease_ids(second), "the queue of the other is left")


async def test_a_waiter_keeps_its_place_when_the_server_is_restarted(servers: list[RunningServer]) -> None:
    first = servers[0]
    (other,) = occupy(first)
    async with client_of(first) as client:
        task, lease_id = await waiter_of(client, first)
        await asyncio.to_thread(first.restart)
        await soon(lambda: client.get_error_recovery_status()["healthy_endpoints"], "it is up")
        await soon(lambda: get(first, lease_id)["position"] == 1, "it waits still")
        release(first, other)
        assert (await asyncio.wait_for(task, 20)).lease_id == lease_id


async def test_a_waiter_who_was_thrown_out_of_a_queue_asks_anew_each_time_with_another_id() -> None:
    """He was not heard of for too long, three times over."""

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


async def test_a_waiter_that_an_operator_took_out_of_the_queue_does_not_come_back(servers: list[RunningServer]) -> None:
    first = servers[0]
    occupy(first)
    async with client_of(first) as client:
        task, lease_id = await waiter_of(client, first)
        assert first.ask(f"/admin/leases/{lease_id}/revoke", "POST").status == 200
        with pytest.raises(RequestRefusedError, match="operator"):
            await asyncio.wait_for(task, 20)


# --- none of them ----------------------------------------------------------------------------------------------------


async def test_with_all_dead_a_request_waits_and_goes_on_when_one_is_back(servers: list[RunningServer]) -> None:
    first = servers[0]
    first.kill()
    async with client_of(first, Nobody(), Nobody()) as client:
        task = asyncio.create_task(client.request_gpu(timeout=20))
        await soon(
            lambda: client.get_error_recovery_status()["degradation_manager"]["is_fully_degraded"], "all are down"
        )
        assert not task.done()
        first.start()
        assert (await asyncio.wait_for(task, 20)).endpoint_id == id_of(first)


class Nobody:
    """A place where nothing listens."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"


async def test_with_all_dead_the_timeout_names_each_endpoint_and_its_reason() -> None:
    nobodies = [Nobody(), Nobody()]
    with ForeignServer(internal_error) as foreign, ForeignServer(hanging) as hung:
        async with client_of(*nobodies, foreign, hung, endpoint_timeout=0.2) as client:
            with pytest.raises(ServiceUnavailableError) as raised:
                await client.request_gpu(timeout=1)
    error = raised.value
    assert isinstance(error, WorkerTimeoutError)
    assert isinstance(error, TimeoutError)
    assert set(error.reasons) == {id_of(endpoint) for endpoint in (*nobodies, foreign, hung)}
    for nobody in nobodies:
        assert "connect" in error.reasons[id_of(nobody)].lower()
    assert "500" in error.reasons[id_of(foreign)]
    assert "0.2 s" in error.reasons[id_of(hung)]
    assert all(id_of(endpoint) in str(error) for endpoint in (*nobodies, foreign, hung))
    assert error.waited_s == pytest.approx(1, abs=0.5)


async def test_a_reason_is_told_once_however_long_it_lasts() -> None:
    nobody = Nobody()
    async with client_of(nobody, Nobody(), endpoint_health_check_interval=0.05) as client:
        with pytest.raises(ServiceUnavailableError) as raised:
            await client.request_gpu(timeout=1.2)
    reason = raised.value.reasons[id_of(nobody)]
    assert reason.count("not called again") <= 1, reason
    assert len(reason) < 300


@pytest.mark.parametrize("retries", [0, 3])
async def test_the_reason_of_one_that_has_just_died_is_why_it_cannot_be_reached(
    servers: list[RunningServer], retries: int
) -> None:
    """Also while its breaker is open, which is not the reason but what was made of it."""
    first = servers[0]
    async with client_of(
        first, endpoint_max_retries=retries, endpoint_health_check_interval=30, polling_interval=0.05
    ) as client:
        first.kill()
        await soon(lambda: client.get_error_recovery_status()["degraded_endpoints"], "it is down")
        with pytest.raises(ServiceUnavailableError) as raised:
            await client.request_gpu(timeout=0.1)
    (reason,) = raised.value.reasons.values()
    assert "connect" in reason.lower(), reason


async def test_with_all_stopped_while_one_waits_the_timeout_says_that_no_server_answers(
    servers: list[RunningServer],
) -> None:
    first = servers[0]
    occupy(first)
    async with client_of(first) as client:
        before = lease_ids(first)
        task = asyncio.create_task(client.request_gpu(timeout=1.5))
        await soon(lambda: lease_ids(first) - before, "it waits")
        with stopped(first):
            await soon(lambda: client.get_error_recovery_status()["degraded_endpoints"], "it is down")
            with pytest.raises(ServiceUnavailableError):
                await task
    await soon(lambda: lease_ids(first) == before, "the place in the queue is left")


async def test_a_timeout_is_kept_though_a_server_hangs() -> None:
    with ForeignServer(
        ScriptedLeases(put=lambda seen: _answer(202, lease(seen.lease_id, "queued"))).behaviour()
    ) as foreign:
        async with client_of(foreign, endpoint_timeout=1, endpoint_max_retries=0) as client:
            await soon(lambda: client.get_error_recovery_status()["healthy_endpoints"], "it is up")
            foreign.behaviour = hanging
            began = time.monotonic()
            with pytest.raises(WorkerTimeoutError):
                await client.request_gpu(timeout=0.5)
            assert time.monotonic() - began < QUICKLY_S


async def test_a_recovery_by_hand_asks_the_server_though_a_look_at_it_is_under_way(
    servers: list[RunningServer],
) -> None:
    first = servers[0]
    async with client_of(*servers[:2], endpoint_timeout=0.3, endpoint_max_retries=0) as client:
        await healthy(client, *servers[:2])
        with stopped(first):
            await soon(lambda: breaker(client, first) == "half_open", "a look at it is under way, and hangs")
        assert await client.trigger_endpoint_recovery(id_of(first))


# --- what cannot be served -------------------------------------------------------------------------------------------


async def test_what_is_impossible_everywhere_is_refused_at_once(servers: list[RunningServer]) -> None:
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


async def test_what_is_impossible_at_one_is_served_by_the_other(servers: list[RunningServer]) -> None:
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


async def test_a_recovery_that_is_triggered_does_not_wait_for_the_breaker(servers: list[RunningServer]) -> None:
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


async def test_recovery_by_hand_is_for_several_endpoints_only(servers: list[RunningServer]) -> None:
    async with GPUWorkerPoolClient(servers[0].url) as client:
        with pytest.raises(RuntimeError):
            await client.trigger_endpoint_recovery("127.0.0.1")
        with pytest.raises(RuntimeError):
            await client.queue_request_for_retry(client.request_gpu)


async def test_a_request_that_was_queued_for_retry_is_made_when_an_endpoint_is_up(servers: list[RunningServer]) -> None:
    first = servers[0]
    first.kill()
    async with client_of(first) as client:
        calls = []

        async def request() -> Any:
            calls.append(1)
            return await client.request_gpu(timeout=30)

        task = asyncio.create_task(client.queue_request_for_retry(request))
        await asyncio.wait([task], timeout=0.3)
        assert not calls
        first.start()
        assert (await asyncio.wait_for(task, 20)).local_gpu_id in {0, 1}


async def test_a_queued_request_that_finds_no_server_is_made_again(servers: list[RunningServer]) -> None:
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


async def test_an_error_of_a_queued_request_is_its_own(servers: list[RunningServer]) -> None:
    own = WorkerTimeoutError("mine", waited_s=0.1, reason="all are held")

    async def request() -> None:
        raise own

    async with client_of(servers[0]) as client:
        with pytest.raises(WorkerTimeoutError) as raised:
            await client.queue_request_for_retry(request)
    assert raised.value is own


async def test_a_request_that_was_queued_for_retry_gives_up_after_worker_timeout() -> None:
    async with client_of(Nobody(), worker_timeout=0.3) as client:
        with pytest.raises(WorkerTimeoutError):
            await client.queue_request_for_retry(client.request_gpu)


# --- a server that cannot write, or is restarted ---------------------------------------------------------------------


@contextmanager
def full_disk(server: RunningServer) -> Iterator[None]:
    """No file of the server's grows any more, which is what it sees of a disk that is full."""
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))


async def test_with_a_full_disk_requests_go_elsewhere_and_what_is_held_stays_held(
    servers: list[RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_TTL", "0.9")
    first, second, _ = servers
    async with client_of(first) as holder, client_of(first, second) as client:
        held = await holder.request_gpu(timeout=30)
        await healthy(client, first, second)
        with full_disk(first):
            assert put(first, "probe").status == 503
            await served_elsewhere(client, first, 2)
            assert not await _is_lost_within(held, 1.5)
            assert id_of(first) in client.get_error_recovery_status()["healthy_endpoints"]
        await soon(lambda: put(first, "probe").status in {200, 201}, "it can be written again")
        release(first, "probe")
        assert not held.is_lost
        await holder.release_gpu(held)
    await nothing_left(*servers)


async def _is_lost_within(assignment: Any, seconds: float) -> bool:
    lost = asyncio.ensure_future(assignment.lost.wait())
    await asyncio.wait([lost], timeout=seconds)
    is_lost: bool = lost.done()
    lost.cancel()
    return is_lost


async def test_what_is_held_is_kept_over_a_restart_of_the_server(servers: list[RunningServer]) -> None:
    first = servers[0]
    async with client_of(first) as client:
        held = await client.request_gpu(timeout=30)
        await asyncio.to_thread(first.restart)
        assert get(first, held.lease_id or "")["fence"] == held.fence
        assert not held.is_lost
        await client.release_gpu(held)
        await nothing_left(first)


# --- nothing is held twice -------------------------------------------------------------------------------------------


class Witness:
    """A lock per GPU that knows nothing of the pool."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tenures = 0

    @contextmanager
    def holding(self, uuid: str) -> Iterator[None]:
        file = os.open(self._folder / uuid, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody else holds it
            self.tenures += 1
            yield
        finally:
            # Said, and not left to the closing: a server that is being started has a copy of the file until its exec.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


async def test_nothing_is_held_twice_while_servers_are_killed_stopped_and_restarted(
    servers: list[RunningServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_TTL", "2")
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    witness = Witness(tmp_path)
    is_over = asyncio.Event()
    failures: list[str] = []

    async def work(client: GPUWorkerPoolClient) -> None:
        while not is_over.is_set():
            try:
                assignment = await client.request_gpu(timeout=3)
            except WorkerTimeoutError:
                continue
            try:
                assert assignment.lost is not None
                with witness.holding(assignment.uuids[0]):
                    await asyncio.wait([asyncio.ensure_future(assignment.lost.wait())], timeout=chance.uniform(0, 0.2))
                    # Whoever loses it lets go of it at once; a tenure ends with the lock, before it is given back.
            except BlockingIOError:
                failures.append(f"seed {seed}: {assignment} is held twice")
            with suppress(StaleAssignmentError):
                await client.release_gpu(assignment)

    async def harm() -> None:
        for _ in range(4):
            victim = chance.choice(servers)
            if chance.random() < 0.6:
                await asyncio.to_thread(victim.restart)
            else:
                os.kill(victim.pid, signal.SIGSTOP)
                await asyncio.wait([asyncio.ensure_future(is_over.wait())], timeout=chance.uniform(0.2, 1.0))
                os.kill(victim.pid, signal.SIGCONT)

    async with client_of(*servers) as one, client_of(*servers) as two:
        workers = [asyncio.create_task(work(client)) for client in (one, two) for _ in range(5)]
        await harm()
        is_over.set()
        await asyncio.wait(workers, timeout=30)
        for worker in workers:
            worker.result()
    stray = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in stray:
        task.cancel()
    await asyncio.gather(*stray, return_exceptions=True)
    assert failures == []
    assert witness.tenures > 50, f"seed {seed}"
    await nothing_left(*servers)
