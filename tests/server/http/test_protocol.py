"""What comes before a request is known is bounded, too."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.http.protocol import BoundedProtocol
from gpu_worker_pool.server.serving import configuration
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.testing import ServerProcess
from gpu_worker_pool.wire.bounds import CLIENT_IDLE_S
from tests.server.leasing import eventually, queue, release, take

SOON_S = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S)


def test_half_a_head_and_silence_are_closed(server: ServerProcess) -> None:
    with connect(server) as silent, connect(server) as half:
        half.sendall(b"GET /livez HTTP/1.1\r\nHost: local")
        assert half.recv(1000) == b""
        assert silent.recv(1000) == b""


def test_a_head_without_end_is_refused_before_it_fills_the_memory(server: ServerProcess) -> None:
    with connect(server) as endless:
        endless.sendall(b"GET /livez HTTP/1.1\r\nX-Long: ")
        answer = b""
        try:
            for _ in range(1000):
                endless.sendall(b"x" * 10_000)
            answer = endless.recv(1000)
        except OSError:
            return  # closed while we sent, which is as good
        assert answer.startswith(b"HTTP/1.1 400")


def test_a_large_head_that_comes_at_once_is_refused(server: ServerProcess) -> None:
    with connect(server) as sender:
        sender.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n")
        assert sender.recv(1000).startswith(b"HTTP/1.1 400")
    assert server.ask("/livez").status == 200


def test_many_requests_over_one_connection_are_not_taken_for_one_large_head(server: ServerProcess) -> None:
    request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Some: " + b"x" * 8_000 + b"\r\n\r\n"
    with connect(server) as sender:
        for _ in range(20):
            sender.sendall(request)
            answer = b""
            while b'"alive"' not in answer:
                answer += sender.recv(4000)
            assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"FETCH /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", "method"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "not valid HTTP"),
        (b"GET /livez HTTP/1.1\r\nHost : localhost\r\n\r\n", "not valid HTTP"),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n", "larger than 65536"),
        (b"GET http://evil.example/livez HTTP/1.1\r\nHost: localhost\r\n\r\n", "evil.example"),
        (b"GET http://localhost:80/livez HTTP/1.1\r\nHost: localhost\r\n\r\n", "localhost:80"),
        (b"GET http://a@localhost/livez HTTP/1.1\r\nHost: localhost\r\n\r\n", "a@localhost"),
        (b"GET http://localhost/livez HTTP/1.1\r\n\r\n", "localhost"),
        (b"GET http://evil.example HTTP/1.1\r\nHost: localhost\r\n\r\n", "evil.example"),
    ],
)
def test_a_head_that_is_not_valid_is_a_problem_that_says_what_is_wrong(
    server: ServerProcess, head: bytes, says: str
) -> None:
    with connect(server) as sender:
        sender.sendall(head)
        answer = b"".join(iter(lambda: sender.recv(4000), b""))
    first, _, body = answer.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 400 ")
    assert b"\r\ncontent-type: application/problem+json\r\n" in first
    problem = json.loads(body)
    assert (problem["status"], problem["title"]) == (400, "Bad Request")
    assert says in problem["detail"]


def test_an_address_that_names_the_host_as_the_host_header_does_is_taken(server: ServerProcess) -> None:
    with connect(server) as sender:
        sender.sendall(b"GET http://LOCALHOST/livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert sender.recv(1000).startswith(b"HTTP/1.1 200")


async def test_a_caller_that_takes_nothing_of_its_answer_is_cut_off() -> None:
    """A real connection, whose buffers are full; the answer never ends by itself."""

    class Hasty(BoundedProtocol):
        stalled_s = 0.01

    was_cut_off = asyncio.Event()

    async def endless(_: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
            await asyncio.sleep(0)
        was_cut_off.set()

    config = uvicorn.Config(endless, http=Hasty, ws="none", log_config=None, lifespan="off")
    config.load()
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(
        lambda: Hasty(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
    )
    with socket.create_connection(listening.sockets[0].getsockname()) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(SOON_S):
            await was_cut_off.wait()
    listening.close()


def test_a_caller_that_sent_several_calls_at_once_and_left_is_noticed(server: ServerProcess) -> None:
    def waiting() -> str:
        lines = server.ask("/metrics").body.decode().splitlines()
        return next(line for line in lines if line.startswith("gpupool_waiting_connections"))

    holder, waiter = take(server, gpus=4)["id"], queue(server)["id"]
    call = f"GET /leases/{waiter}?wait_s=25 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with connect(server) as caller:
        caller.sendall(2 * call + 2 * b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: waiting().endswith(" 1.0"), "it waits")
    eventually(lambda: waiting().endswith(" 0.0"), "it has left")
    for lease in (waiter, holder):
        release(server, lease)
    assert "Traceback" not in (server.folder / "log").read_text(encoding="utf-8")


def test_our_client_closes_an_idle_connection_before_the_server_does() -> None:
    app = create_app(ServerSettings(_env_file=None, simulated_gpus="1"))

    assert configuration(app).timeout_keep_alive > CLIENT_IDLE_S


async def test_an_idle_connection_is_closed() -> None:
    async def empty(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(empty, http=BoundedProtocol, ws="none", log_config=None, lifespan="off")
    config.load()
    config.timeout_keep_alive = 0.05  # type: ignore[assignment]  # uvicorn takes whole seconds
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(
        lambda: BoundedProtocol(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
    )
    async with asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.read() == b""
    writer.close()
    listening.close()
