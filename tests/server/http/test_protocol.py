"""What comes before a request is known is bounded, too."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState
from websockets.asyncio.client import connect as open_websocket

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
        # One byte too many, so that nothing is left unread: that would reset the connection.
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Long: ".ljust(65_537, b"x"), "larger than 65536"),
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


@asynccontextmanager
async def listening(
    app: Any, *, keep_alive_s: float = 5.0, head_s: float = 5.0, stalled_s: float = 20.0
) -> AsyncIterator[tuple[str, int]]:
    """Our protocol on a real socket, with times of the test, before an application of the test."""

    class Hasty(BoundedProtocol):
        websocket_path = b"/link"

    Hasty.head_s, Hasty.stalled_s = head_s, stalled_s
    config = uvicorn.Config(app, http=Hasty, ws="auto", log_config=None, lifespan="off", ws_ping_interval=None)
    config.load()
    config.timeout_keep_alive = keep_alive_s  # type: ignore[assignment]  # uvicorn takes whole seconds
    loop, state = asyncio.get_running_loop(), ServerState()
    server = await loop.create_server(lambda: Hasty(config=config, server_state=state, app_state={}), "127.0.0.1", 0)
    try:
        async with asyncio.timeout(SOON_S):
            yield server.sockets[0].getsockname()
    finally:
        server.close()


async def empty(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers calls with nothing, and the messages of a WebSocket with themselves."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        return
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


async def until_closed(address: tuple[str, int], request: bytes) -> bytes:
    """What is answered to these bytes until the server closes the connection."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_caller_that_takes_nothing_of_its_answer_is_cut_off() -> None:
    """A real connection, whose buffers are full; the answer never ends by itself."""
    was_cut_off = asyncio.Event()

    async def endless(_: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
            await asyncio.sleep(0)
        was_cut_off.set()

    async with listening(endless, stalled_s=0.01) as address:
        with socket.create_connection(address) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await was_cut_off.wait()


async def test_an_idle_connection_is_closed() -> None:
    async with listening(empty, keep_alive_s=0.05) as address:
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHo",
    ],
)
async def test_a_request_that_is_answered_and_never_ends_is_closed(request_bytes: bytes) -> None:
    async with listening(empty, head_s=0.05, keep_alive_s=0.1) as address:
        assert (await until_closed(address, request_bytes)).startswith(b"HTTP/1.1 200")


async def test_what_follows_a_body_is_bounded() -> None:
    """Trailers, or one trailer without an end: they are not kept, and too many of them end the connection."""
    head = b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    for trailers in (b"A: %b\r\n" % (b"x" * 1000), b"x" * 1000):
        async with listening(empty, head_s=SOON_S) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(head + (b"A: " if b":" not in trailers else b""))
            sent = 0
            with suppress(ConnectionError):
                while not reader.at_eof() and sent < 10_000:
                    writer.write(trailers)
                    await writer.drain()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0):
                            await reader.read(1000)
                    await asyncio.sleep(0)
                    sent += 1
            assert sent < 10_000
            writer.close()


async def test_trailers_are_not_kept_as_headers() -> None:
    scopes: list[Scope] = []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        while (await receive()).get("more_body"):
            pass
        await empty(scope, receive, send)

    async with listening(noting, keep_alive_s=0.05) as address:
        head = b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nHost: other\r\n\r\n"
        assert (await until_closed(address, head)).startswith(b"HTTP/1.1 200")
    assert [value for name, value in scopes[0]["headers"] if name == b"host"] == [b"x"]


async def test_a_websocket_on_a_connection_that_served_a_call_stays_open() -> None:
    async with listening(empty, keep_alive_s=0.05, head_s=0.05) as (host, port):
        connected = socket.create_connection((host, port))
        connected.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await asyncio.to_thread(connected.recv, 65536)).startswith(b"HTTP/1.1 200")
        async with open_websocket(f"ws://{host}:{port}/link", sock=connected, proxy=None) as link:
            # A connection that begins to be idle now is closed, and so all timers before are over.
            await until_closed((host, port), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await link.send("still there")
            assert await link.recv() == "still there"


def test_the_names_of_uvicorn_that_the_protocol_relies_on_are_there() -> None:
    """All that `BoundedProtocol` overrides or uses beyond uvicorn's documents. If this fails, read the new uvicorn."""
    assert inspect.signature(HttpToolsProtocol._unset_keepalive_if_required).parameters.keys() == {"self"}
    assert inspect.signature(HttpToolsProtocol._should_upgrade_to_ws).parameters.keys() == {"self"}
    for name, parameters in {
        "connection_made": ["self", "transport"], "connection_lost": ["self", "exc"], "data_received": ["self", "data"],
        "on_message_begin": ["self"], "on_header": ["self", "name", "value"], "on_headers_complete": ["self"],
        "on_body": ["self", "body"], "on_message_complete": ["self"], "on_response_complete": ["self"],
        "handle_websocket_upgrade": ["self"], "send_400_response": ["self", "msg"], "pause_writing": ["self"],
        "resume_writing": ["self"],
    }.items():  # fmt: skip
        assert list(inspect.signature(getattr(HttpToolsProtocol, name)).parameters) == parameters, name
    config = uvicorn.Config(empty, log_config=None)
    protocol = BoundedProtocol(config=config, server_state=ServerState(), app_state={}, _loop=asyncio.new_event_loop())
    with closing(protocol.loop):
        assert {"url", "headers", "scope", "cycle", "pipeline", "server_state", "transport", "flow"} <= {
            *vars(protocol), *HttpToolsProtocol.on_message_begin.__code__.co_names,
        }  # fmt: skip
    assert {"response_started", "response_complete", "more_body", "disconnected", "message_event"} <= set(
        RequestResponseCycle.__init__.__code__.co_names
    )


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
