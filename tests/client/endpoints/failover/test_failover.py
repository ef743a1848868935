"""Several servers, some of them dead, stopped, slow or out of their minds: requests are served by the others."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool import GPUWorkerPoolClient, ServiceUnavailableError, StaleAssignmentError, WorkerTimeoutError
from gpu_worker_pool.testing import ServerProcess
from tests.client.endpoints.failover.elsewhere import QUICKLY_S, Nobody, served_elsewhere
from tests.client.fault_tools import breaker, client_of, healthy, id_of, nothing_left, soon, stopped
from tests.client.foreign_servers import (
    Behaviour,
    ForeignServer,
    ScriptedLeases,
    breaking_off,
    closing,
    garbage,
    hanging,
    huge,
    internal_error,
    no_http,
    not_found,
    redirecting,
    saying,
    slowed,
)
from tests.client.wire import Wire

# --- one of three is in a bad way ------------------------------------------------------------------------------------


async def test_a_killed_server_is_passed_over_and_its_breaker_opens_and_closes_again(
    servers: list[ServerProcess],
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
    servers: list[ServerProcess], strategy: str
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


async def test_a_request_that_arrives_after_it_was_withdrawn_leaves_no_lease(servers: list[ServerProcess]) -> None:
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
            # It was there for a moment: what it must not do is to stay for the whole TTL, which is 30 s.
            asked = {call.split()[1].rpartition("/")[2] for call in slow.calls if call.startswith("PUT")}
            await soon(lambda: all(slow_server.ask(f"/leases/{id_}").status == 200 for id_ in asked), "they arrived")
            await nothing_left(slow_server, within_s=15)


NONSENSE_POOLS: dict[str, Any] = {
    "no_object": [1, 2, 3],
    "index_is_a_text": {"gpus": [{"gpu_id": "0", "uuid": "x", "state": "free"}], "leases": [], "queue": []},
    "leases_with_texts_for_gpus": {
        "gpus": [],
        "leases": [{"id": "a", "state": "active", "gpus": ["GPU-1"]}],
        "queue": [],
    },
    "leases_with_a_number_for_gpus": {"gpus": [], "leases": [{"id": "a", "state": "active", "gpus": 5}], "queue": []},
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
    servers: list[ServerProcess], name: str
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
    servers: list[ServerProcess], name: str
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
# One of each kind.
NONSENSE_LEASES: dict[str, Any] = {
    "active_without_gpus": {"state": "active", "gpus": []},
    "gpus_are_texts": {"state": "active", "gpus": ["GPU-x"]},
    "index_is_enormous": {"state": "active", "gpus": [{**GPU, "gpu_id": 2**70}]},
    "index_is_a_truth": {"state": "active", "gpus": [{**GPU, "gpu_id": True}]},
    "state_is_a_list": {"state": [], "gpus": [GPU]},
    "no_state": {"gpus": [GPU]},
    "a_list": [],
    "nothing": None,
}


@pytest.mark.parametrize("name", NONSENSE_LEASES)
async def test_a_lease_that_makes_no_sense_is_not_taken_for_a_gpu(servers: list[ServerProcess], name: str) -> None:
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


# --- none of them ----------------------------------------------------------------------------------------------------


async def test_with_all_dead_the_timeout_names_each_endpoint_and_its_reason() -> None:
    nobodies = [Nobody(), Nobody()]
    with ForeignServer(internal_error) as foreign, ForeignServer(hanging) as hung:
        # On a busy machine a refusal takes a while, too.
        async with client_of(*nobodies, foreign, hung, endpoint_timeout=1.5) as client:
            with pytest.raises(ServiceUnavailableError) as raised:
                await client.request_gpu(timeout=4)
    error = raised.value
    assert isinstance(error, WorkerTimeoutError)
    assert isinstance(error, TimeoutError)
    assert set(error.reasons) == {id_of(endpoint) for endpoint in (*nobodies, foreign, hung)}
    for nobody in nobodies:
        assert "connect" in error.reasons[id_of(nobody)].lower()
    assert "500" in error.reasons[id_of(foreign)]
    assert "1.5 s" in error.reasons[id_of(hung)]
    assert all(id_of(endpoint) in str(error) for endpoint in (*nobodies, foreign, hung))
    assert (error.waited_s or 0) >= 4


@pytest.mark.parametrize("retries", [0, 3])
async def test_the_reason_of_one_that_has_just_died_is_why_it_cannot_be_reached(
    servers: list[ServerProcess], retries: int
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


async def test_a_recovery_by_hand_asks_the_server_though_a_look_at_it_is_under_way(
    servers: list[ServerProcess],
) -> None:
    first = servers[0]
    async with client_of(*servers[:2], endpoint_timeout=0.3, endpoint_max_retries=0) as client:
        await healthy(client, *servers[:2])
        with stopped(first):
            await soon(lambda: breaker(client, first) == "half_open", "a look at it is under way, and hangs")
        assert await client.trigger_endpoint_recovery(id_of(first))


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
    servers: list[ServerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
                    # A worker that loses it lets go at once; a tenure ends with the lock, before the release.
            except BlockingIOError:
                failures.append(f"seed {seed}: {assignment} is held twice")
            with suppress(StaleAssignmentError):
                await client.release_gpu(assignment)

    async def harm() -> None:
        for number in count(1):
            if number > 4 and witness.tenures > 50:
                return
            victim = chance.choice(servers)
            if chance.random() < 0.6:
                await asyncio.to_thread(victim.restart)
            else:
                os.kill(victim.pid, signal.SIGSTOP)
                await asyncio.wait([asyncio.ensure_future(is_over.wait())], timeout=chance.uniform(0.2, 1.0))
                os.kill(victim.pid, signal.SIGCONT)
            enough = witness.tenures + chance.randrange(20)
            await soon(lambda: witness.tenures >= enough, "the workers go on")  # noqa: B023

    async with client_of(*servers) as one, client_of(*servers) as two:
        workers = [asyncio.create_task(work(client)) for client in (one, two) for _ in range(5)]
        async with asyncio.timeout(60):
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
    await nothing_left(*servers)
