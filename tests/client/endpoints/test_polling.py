"""When a client polls its servers: while something waits or a status is asked for, and not because it holds a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from gpu_worker_pool import GPUWorkerPool, ServiceUnavailableError
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.testing import ServerProcess
from tests.client.fault_tools import as_at_first, client_of, id_of, running, soon
from tests.client.wire import Wire
from tests.server.leasing import eventually, release, take


@pytest.fixture(scope="module")
def started() -> Iterator[list[ServerProcess]]:
    with running(2, is_elsewhere=True, SIMULATED_GPUS="1", GPU_POOL_DURABILITY="normal") as servers:
        yield servers


@pytest.fixture
def servers(started: list[ServerProcess]) -> Iterator[list[ServerProcess]]:
    yield started
    as_at_first(started)


@pytest.fixture
def wires(servers: list[ServerProcess]) -> Iterator[list[Wire]]:
    with Wire(servers[0].port) as one, Wire(servers[1].port) as other:
        yield [one, other]


def polls(wire: Wire) -> int:
    return sum(number for call, number in wire.calls.items() if call.startswith("GET /pool"))


async def passed(interval_s: float) -> None:
    """Wait until what was seen is no longer recent."""
    since = boot_time()
    await soon(lambda: boot_time() > since + interval_s, "time passes")


async def test_a_client_that_only_holds_a_gpu_makes_heartbeats_and_nothing_else(
    wires: list[Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_TTL", "1.2")
    async with client_of(*wires, polling_interval=0.05) as client:
        held = await client.request_gpu(timeout=30)
        wire = next(wire for wire in wires if id_of(wire) == held.endpoint_id)
        await soon(lambda: wire.calls["POST /leases/renew"] >= 2, "two heartbeats")
        before = [wire.calls.copy() for wire in wires]
        beats = wire.calls["POST /leases/renew"]
        # Each takes a sixth of the TTL, and so four times a polling interval.
        await soon(lambda: wire.calls["POST /leases/renew"] >= beats + 5, "five more heartbeats")
        made = [wire.calls - known for wire, known in zip(wires, before, strict=True)]
        # The request at the other server may be withdrawn late.
        kinds = {call for call in sum(made, start=made[0]) if not call.startswith("DELETE ")}
        assert kinds == {"POST /leases/renew"}
        assert not held.is_lost


async def test_it_polls_while_a_request_waits(servers: list[ServerProcess], wires: list[Wire]) -> None:
    others = [take(server, ttl_s=600)["id"] for server in servers]
    async with client_of(*wires, polling_interval=0.05) as client:
        waiting = asyncio.create_task(client.request_gpu(timeout=30))
        for wire in wires:
            seen = polls(wire)
            await soon(lambda wire=wire, seen=seen: polls(wire) > seen + 3, "it is polled")  # type: ignore[misc]
        release(servers[0], others[0])
        await waiting


async def test_a_status_that_is_asked_for_again_shows_what_has_changed(servers: list[ServerProcess]) -> None:
    async with client_of(*servers, polling_interval=0.05) as client:
        await soon(lambda: client.get_pool_status().available_gpus == 2, "all are free")
        take(servers[0], ttl_s=600)
        await soon(lambda: client.get_pool_status().available_gpus == 1, "one is taken")


async def test_a_refresh_asks_the_servers_first(servers: list[ServerProcess]) -> None:
    async with client_of(*servers, polling_interval=0.05, endpoint_timeout=5) as client:
        await client.refresh()
        await asyncio.to_thread(take, servers[0], ttl_s=600)
        await passed(0.05)
        await client.refresh()
        assert client.get_pool_status().available_gpus == 1


def test_a_blocking_status_is_as_recent_as_the_polling_interval(servers: list[ServerProcess]) -> None:
    with GPUWorkerPool(servers[0].url, polling_interval=0.05) as pool:
        assert pool.get_pool_status().available_gpus == 1
        take(servers[0], ttl_s=600)
        eventually(lambda: pool.get_pool_status().available_gpus == 0, "it is taken")


async def test_a_request_after_a_while_goes_by_what_is_so_now(servers: list[ServerProcess], wires: list[Wire]) -> None:
    """By availability: another client has taken the GPU that was free when this one looked last."""
    async with client_of(*wires, polling_interval=0.05, endpoint_timeout=5) as client:
        await client.refresh()
        await asyncio.to_thread(take, servers[0], ttl_s=600)
        await passed(0.05)
        held = await client.request_gpu(timeout=30)
        assert held.endpoint_id == id_of(wires[1])
        assert not any(call.startswith("PUT") for call in wires[0].calls)


async def test_a_server_that_is_back_is_found_by_a_request_that_does_not_wait(servers: list[ServerProcess]) -> None:
    first = servers[0]
    async with client_of(first, polling_interval=0.05, endpoint_timeout=5) as client:
        await asyncio.to_thread(first.kill)
        with pytest.raises(ServiceUnavailableError):
            await client.request_gpu(timeout=2)
        await asyncio.to_thread(first.start)
        await passed(0.5)  # its breaker lets a call through by then
        assert (await client.request_gpu(timeout=0)).server_url == first.url
