"""A GPU that is no longer ours: it is said early, once, and before anybody could go on using it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_worker_pool import StaleAssignmentError
from gpu_worker_pool.client.acquire.heartbeat import HOLDS_PER_TTL
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.testing import ServerProcess
from tests.client.fault_tools import as_at_first, client_of, lease_ids, nothing_left, running, soon
from tests.client.wire import Wire
from tests.preloaded import PreloadedPopen
from tests.server.leasing import eventually, get
from tests.server.running import ROOT

TTL_S = 3.0
BEAT_S = TTL_S / 3


@pytest.fixture(scope="module")
def one() -> Iterator[list[ServerProcess]]:
    with running(1, is_elsewhere=True, SIMULATED_GPUS="50", GPU_POOL_DURABILITY="normal") as servers:
        yield servers


@pytest.fixture
def server(one: list[ServerProcess], monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.setenv("GPU_POOL_TTL", str(TTL_S))
    yield one[0]
    as_at_first(one)


@pytest.fixture
def wire(server: ServerProcess) -> Iterator[Wire]:
    with Wire(server.port) as line:
        yield line


def lost_now(assignment: Any) -> bool:
    return bool(assignment.is_lost)


async def renewed(wire: Wire, assignment: Any) -> float:
    """Wait until the next heartbeat was answered, so that the answer is not lost; when it was on its way."""
    before, ends_at = wire.calls["POST /leases/renew"], assignment.lost.ends_at
    await soon(lambda: wire.calls["POST /leases/renew"] > before, "a heartbeat")
    sent_at = boot_time()
    await soon(lambda: assignment.lost.ends_at > ends_at, "its answer")
    return sent_at


# --- when --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "frozen"])
async def test_it_is_lost_one_heartbeat_before_the_server_would_end_it(
    server: ServerProcess, wire: Wire, how: str
) -> None:
    told: list[Any] = []
    async with client_of(wire, on_lost=told.append) as client:
        assignment = await client.request_gpu(timeout=30)
        assert assignment.lost is not None
        lease_id = assignment.lease_id or ""
        sent_at = await renewed(wire, assignment)
        if how == "cut":
            wire.cut()
        else:
            wire.is_frozen = True
        assert not lost_now(assignment)

        reason = await asyncio.wait_for(assignment.lost.wait(), 20)
        after_s = boot_time() - sent_at
        # Not before its time, and before the server would.
        assert TTL_S - BEAT_S - 0.25 < after_s < TTL_S
        assert lease_id in lease_ids(server), "the server has not ended it yet"
        assert "heartbeat" in reason
        assert assignment.is_lost
        assert told == [assignment]

        with pytest.raises(StaleAssignmentError) as raised:
            await client.release_gpu(assignment)
        assert raised.value.assignment is assignment
        assert assignment.is_lost
        wire.mend()
    assert told == [assignment]
    await nothing_left(server)


async def test_it_is_reckoned_from_when_the_heartbeat_was_sent_and_held_and_not_from_its_answer(
    server: ServerProcess, wire: Wire
) -> None:
    """The server says how long it held the heartbeat before it renewed; how long the network took, nobody can say."""
    async with client_of(wire, endpoint_timeout=5) as client:
        assignment = await client.request_gpu(timeout=30)
        await renewed(wire, assignment)
        wire.delayed_methods = (b"POST",)
        wire.delay_s = BEAT_S * 0.8  # until it arrives; sent it was at the beginning of that
        before = wire.calls["POST /leases/renew"]
        await soon(lambda: wire.calls["POST /leases/renew"] > before, "a heartbeat was sent")
        sent_at = boot_time()
        ends_at = assignment.lost.ends_at  # type: ignore[union-attr]
        await soon(lambda: assignment.lost.ends_at != ends_at, "it was answered")  # type: ignore[union-attr]
        assert boot_time() - sent_at > BEAT_S * 0.5
        safe_s = assignment.lost.ends_at - sent_at  # type: ignore[union-attr, operator]
        held_s = TTL_S / HOLDS_PER_TTL  # or less, after a call that took long
        assert TTL_S - BEAT_S - 0.2 < safe_s < held_s + TTL_S - BEAT_S + 0.2


async def test_a_heartbeat_survives_a_restart_within_the_ttl(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_TTL", "6")
    async with client_of(server) as client:
        assignment = await client.request_gpu(timeout=30)
        ends_at = assignment.lost.ends_at  # type: ignore[union-attr]
        await asyncio.to_thread(server.restart)
        await soon(lambda: assignment.lost.ends_at > ends_at, "a heartbeat went through", 4)  # type: ignore[union-attr, operator]
        assert not assignment.is_lost
        assert get(server, assignment.lease_id or "")["state"] == "active"
        await client.release_gpu(assignment)
    await nothing_left(server)


async def test_one_call_renews_all_leases_of_an_endpoint(
    server: ServerProcess, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fifty at once take their time on a busy machine, and the first of them must not be lost meanwhile.
    monkeypatch.setenv("GPU_POOL_TTL", str(2 * TTL_S))
    async with client_of(wire, endpoint_timeout=5) as client:
        held = await asyncio.gather(*(client.request_gpu(timeout=30) for _ in range(50)))
        await renewed(wire, held[0])
        before, began = wire.calls["POST /leases/renew"], time.monotonic()
        await soon(lambda: wire.calls["POST /leases/renew"] - before >= 2, "two heartbeats")
        assert time.monotonic() - began > BEAT_S * 0.7
        assert not any(assignment.is_lost for assignment in held)
        assert len(lease_ids(server)) == 50


# --- what becomes of it ------------------------------------------------------------------------------------------------


async def test_a_lease_that_an_operator_revokes_is_lost_with_that_reason(server: ServerProcess) -> None:
    told: list[Any] = []
    events: list[Any] = []
    async with client_of(server, on_lost=told.append, on_event=events.append) as client:
        assignment = await client.request_gpu(timeout=30)
        other = await client.request_gpu(timeout=30)
        assert server.ask(f"/admin/leases/{assignment.lease_id}/revoke", "POST").status == 200
        reason = await asyncio.wait_for(assignment.lost.wait(), 20)  # type: ignore[union-attr]
        assert "revoked" in reason
        assert told == [assignment]
        assert [event.detail for event in events if event.kind == "lost"] == [reason]
        with pytest.raises(StaleAssignmentError, match="revoked"):
            await client.release_gpu(assignment)
        assert not other.is_lost
        await client.release_gpu(other)
    assert told == [assignment]


async def test_a_callback_that_fails_harms_nobody(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []

    def fail(assignment: Any) -> None:
        told.append(assignment)
        raise RuntimeError("the user's own fault")

    async with client_of(server, on_lost=fail) as client:
        held = [await client.request_gpu(timeout=30) for _ in range(3)]
        for assignment in held[:2]:
            server.ask(f"/admin/leases/{assignment.lease_id}/revoke", "POST")
        await soon(lambda: len(told) == 2, "both were told")
        ends_at = held[2].lost.ends_at  # type: ignore[union-attr]
        await soon(lambda: held[2].lost.ends_at > ends_at, "the heartbeats of the others go on")  # type: ignore[union-attr, operator]
        assert not held[2].is_lost
    assert "on_lost failed" in caplog.text


async def test_a_lost_gpu_is_given_back_when_the_server_can_be_reached_again(server: ServerProcess, wire: Wire) -> None:
    """The TTL of the server would have ended it anyway; nobody else's lease is touched."""
    async with client_of(wire) as client:
        assignment = await client.request_gpu(timeout=30)
        wire.cut()
        await asyncio.wait_for(assignment.lost.wait(), 20)  # type: ignore[union-attr]
        wire.mend()
        again = await client.request_gpu(timeout=30)
        assert not again.is_lost
        assert again.lease_id != assignment.lease_id
        await soon(lambda: lease_ids(server) == {again.lease_id}, "the lost one is gone")


# --- a holder that did not run -----------------------------------------------------------------------------------------

# The event loop is held up by reading standard input, so that nothing of the client's runs before the first look.
HOLDER = """
import asyncio, sys
from gpu_worker_pool import GPUWorkerPoolClient, StaleAssignmentError

async def main():
    told = []
    async with GPUWorkerPoolClient(sys.argv[1], polling_interval=0.1, on_lost=told.append) as client:
        held = await client.request_gpu(timeout=30)
        print("holds", held.is_lost, flush=True)
        sys.stdin.readline()
        print("first look", held.is_lost, flush=True)
        if sys.argv[2] == "release":
            try:
                await client.release_gpu(held)
            except StaleAssignmentError as error:
                print("stale", error.assignment is held, flush=True)
        try:
            await asyncio.wait_for(held.lost.wait(), 2)
            print("event set", flush=True)
        except TimeoutError:
            print("event not set", flush=True)
        print("last look", held.is_lost, len(told), flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["wait", "release"])
def test_a_process_that_was_stopped_for_longer_than_the_ttl_sees_at_once_that_its_gpu_is_lost(
    server: ServerProcess, what: str
) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GPU_POOL_TTL": "0.6"}
    command = [sys.executable, "-c", HOLDER, server.url, what]
    with PreloadedPopen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == "holds False\n"
            child.send_signal(signal.SIGSTOP)
            eventually(lambda: not lease_ids(server), "the server has ended it")
            child.stdin.write("\n")
            child.stdin.flush()
            child.send_signal(signal.SIGCONT)
            rest = child.stdout.read().splitlines()
            assert child.wait(10) == 0
        finally:
            child.kill()
    assert rest[0] == "first look True"
    if what == "release":
        assert rest.pop(1) == "stale True"
    # A hook is told in whichever way it came out, and what is lost stays lost.
    assert rest[1:] == ["event set", "last look True 1"]


async def test_a_token_that_is_refused_is_said_at_once_and_with_the_loss(
    server: ServerProcess, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    token = "a-token-of-carol-0123456789"  # noqa: S105 - of nobody
    digest = hashlib.sha256(token.encode()).hexdigest()
    assert server.ask(f"/admin/tokens/{digest}", "PUT", body={"name": "carol"}).status == 200
    async with client_of(wire, token=token) as client:
        assignment = await client.request_gpu(timeout=30)
        assert assignment.lost is not None
        await renewed(wire, assignment)

        assert server.ask(f"/admin/tokens/{digest}", "DELETE").status == 200

        await soon(lambda: "they are given up in" in caplog.text, "a warning")
        assert not lost_now(assignment)
        assert "the server refuses the token" in await assignment.lost
    assert caplog.text.count("cannot be renewed") == 1
