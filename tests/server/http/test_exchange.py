"""Calls that begin without a task are answered as all others are."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from gpu_worker_pool.server.http.exchange import rest_of
from gpu_worker_pool.server.http.time_limits import TimeLimits
from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import eventually

SOON_S = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    # A GPU that was just released is granted again only after a reading, so each call here finds another one.
    with ServerProcess({"SIMULATED_GPUS": "8"}) as running:
        yield running


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S)


def put(lease_id: str, body: bytes = b"{}", *headers: bytes) -> bytes:
    lines = (b"Host: localhost", b"Content-Length: %d" % len(body), *headers)
    return b"PUT /leases/%b HTTP/1.1\r\n%b\r\n\r\n%b" % (lease_id.encode(), b"\r\n".join(lines), body)


def delete(lease_id: str) -> bytes:
    return b"DELETE /leases/%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % lease_id.encode()


def answers(connection: socket.socket, number: int) -> list[tuple[int, Any]]:
    """The status and the body of so many answers."""
    found: list[tuple[int, Any]] = []
    with connection.makefile("rb") as received:
        while len(found) < number:
            status, length = int(received.readline().split()[1]), 0
            while (line := received.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if status != 100:
                found.append((status, json.loads(received.read(length))))
    return found


def test_calls_that_arrive_at_once_are_answered_in_their_order(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(put("one") + delete("one") + put("two") + delete("two"))
        found = [(status, body["id"], body["state"]) for status, body in answers(connection, 4)]
    assert found == [(201, "one", "active"), (200, "one", "ended"), (201, "two", "active"), (200, "two", "ended")]


@pytest.mark.parametrize("headers", [(), (b"Expect: 100-continue",)])
def test_a_body_that_comes_later_is_waited_for(server: ServerProcess, headers: tuple[bytes, ...]) -> None:
    body = b'{"priority": 7}'
    lease_id = f"later-{len(headers)}"
    whole = put(lease_id, body, *headers)
    with connect(server) as connection:
        connection.sendall(whole[: -len(body)])
        assert server.ask("/livez").status == 200  # the head has been read
        connection.sendall(body[:5])
        assert server.ask("/livez").status == 200
        connection.sendall(body[5:] + delete(lease_id))
        (status, lease), (_, ended) = answers(connection, 2)
    assert (status, lease["priority"], ended["state"]) == (201, 7, "ended")


def test_a_connection_that_is_not_kept_is_closed_after_the_answer(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(put("last", b"{}", b"Connection: close"))
        received = b""
        while piece := connection.recv(10_000):
            received += piece
    assert b"\r\nconnection: close\r\n" in received
    assert json.loads(received.partition(b"\r\n\r\n")[2])["state"] == "active"
    assert server.ask("/leases/last", "DELETE").status == 200


def test_a_waiter_whose_connection_breaks_is_noticed(server: ServerProcess) -> None:
    def waiting() -> str:
        lines = server.ask("/metrics").body.decode().splitlines()
        return next(line for line in lines if line.startswith("gpupool_waiting_connections"))

    assert server.ask("/leases/all", "PUT", body={"gpus": 8, "wait_s": 30}).status == 201
    with connect(server) as connection:
        connection.sendall(put("waits", b'{"wait_s": 60}'))
        eventually(lambda: waiting().endswith(" 1.0"), "it waits")
    eventually(lambda: waiting().endswith(" 0.0"), "it has left")
    for lease_id in ("waits", "all"):
        assert server.ask(f"/leases/{lease_id}", "DELETE").status == 200


def test_a_body_that_is_too_large_is_refused_though_it_has_arrived(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(put("large", b" " * 65_537))
        assert b"413" in connection.recv(100)


def begun(call: Coroutine[Any, Any, None]) -> asyncio.Future[asyncio.Task[None]]:
    """Begin a coroutine in a callback of the event loop, where there is no task; return the task of its rest."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[asyncio.Task[None]] = loop.create_future()
    loop.call_soon(lambda: made.set_result(loop.create_task(rest_of(call, call.send(None)))))
    return made


async def test_a_call_that_began_without_a_task_has_time_limits() -> None:
    said: list[str] = []

    async def work() -> None:
        said.append("began")
        with pytest.raises(TimeoutError):
            async with TimeLimits().within(0.0):
                await asyncio.Event().wait()
        said.append("ended")

    await (await begun(work()))
    assert said == ["began", "ended"]


async def test_a_call_that_began_without_a_task_can_be_cancelled() -> None:
    said: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            said.append("cancelled")
            raise

    task = await begun(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert said == ["cancelled"]
