"""A head that was read before is known by its bytes, and its call is answered as all others are."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, BinaryIO

import pytest
from starlette.types import Receive, Scope, Send

from gpu_worker_pool.server.http.connection import Connection
from gpu_worker_pool.server.http.known_heads import MOST_BYTES, MOST_HEADS, KnownHeads
from gpu_worker_pool.testing import ServerProcess

SOON_S = 30.0


async def app(_: Scope, __: Receive, ___: Send) -> None:
    raise AssertionError("it is not called here")


def put(lease_id: str, body: bytes = b"{}", *lines: bytes, version: bytes = b"1.1") -> bytes:
    head = (b"PUT /leases/%b HTTP/%b" % (lease_id.encode(), version), b"Host: here", *lines)
    return b"\r\n".join((*head, b"Content-Length: %d" % len(body), b"", body))


def scope(request: bytes, **others: Any) -> dict[str, Any]:
    """As the server reads a request."""
    line, *lines = request.partition(b"\r\n\r\n")[0].split(b"\r\n")
    method, target, _ = line.split(b" ")
    path, _, query = target.partition(b"?")
    headers = [(name.lower(), value) for name, _, value in (line.partition(b": ") for line in lines)]
    return {"method": method.decode(), "path": path.decode(), "query_string": query, "headers": headers, **others}


def learned(*requests: bytes, **others: Any) -> KnownHeads:
    heads, connection = KnownHeads(), Connection(None, None)
    for request in requests:
        heads.learn(request, scope(request, **others), connection, app)
    return heads


def test_the_next_lease_is_found_by_the_head_of_the_one_before() -> None:
    heads = learned(put("first", b'{"gpus": 1}'))

    found = heads.find(put("next-1", b'{"gpus": 2}'))

    assert found is not None
    assert (found.lease_id, found.body) == ("next-1", b'{"gpus": 2}')
    assert found.head.headers == {"host": "here", "content-length": "11"}
    asked = found.scope()
    assert (asked["method"], asked["path"], asked["raw_path"]) == ("PUT", "/leases/next-1", b"/leases/next-1")


@pytest.mark.parametrize(
    "other",
    [
        put("next", b"{ }"),
        put("next", b"{}", b"Accept: a/b"),
        put("next", version=b"1.0"),
        put("next").replace(b"PUT", b"GET"),
        put("next").replace(b"/leases/", b"/other/"),
        # Not all of it, more than it, and two of them.
        put("next")[:-1],
        put("next") + b"P",
        put("next") + put("next"),
        # The server decodes and refuses these.
        put("%6eext"),
        put("next?devices=uuid"),
        put(""),
        put("a b"),
        put("x" * 129),
    ],
)
def test_all_else_must_be_read(other: bytes) -> None:
    assert learned(put("first")).find(other) is None


@pytest.mark.parametrize(
    ("request_", "others"),
    [
        (put("first", b"{}", b"Authorization: Bearer abcdefgh"), {}),
        (put("first", b"{}", b"X-Forwarded-For: 10.0.0.1"), {}),
        (put("first", b"{}", b"Origin: http://here"), {}),
        (put("first", b"{}", b"Connection: close"), {}),
        (put("first", b"{}", b"Expect: 100-continue"), {}),
        (put("first", b"{}", b"User-Agent: " + b"x" * MOST_BYTES), {}),
        # Its path was decoded, or the server adds one before it.
        (put("%66irst"), {"path": "/leases/first"}),
        (put("first"), {"path": "/prefix/leases/first"}),
        # The end of a head whose beginning came before, two requests, and one whose body follows.
        (b"PUT /leases/first HTTP/1.1\r\nre\r\n\r\n", {"headers": []}),
        (put("first") + put("first"), {}),
        (put("first")[:-1], {}),
    ],
)
def test_other_heads_are_not_learned(request_: bytes, others: dict[str, Any]) -> None:
    assert repr(learned(request_, **others)) == "<KnownHeads: 0>"


def test_a_head_is_known_with_its_query() -> None:
    heads = learned(put("first?devices=uuid"))

    found = heads.find(put("next?devices=uuid"))

    assert found is not None
    assert (found.lease_id, found.scope()["query_string"]) == ("next", b"devices=uuid")
    assert heads.find(put("next")) is None
    assert heads.find(put("next?devices=index")) is None
    assert heads.find(put("next?devices=uuid?")) is None


def test_few_heads_are_known() -> None:
    heads = learned(*(put("first", b"x" * length) for length in range(MOST_HEADS + 1)))

    assert repr(heads) == "<KnownHeads: 1>"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "8"}) as running:
        yield running


def answer(received: BinaryIO) -> tuple[int, dict[str, Any]]:
    status, length = int(received.readline().split(b" ")[1]), 0
    while (line := received.readline().strip()) != b"":
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return status, json.loads(received.read(length))


def test_known_and_other_calls_of_one_connection_are_answered_alike(server: ServerProcess) -> None:
    def release(lease_id: str) -> bytes:
        return f"DELETE /leases/{lease_id} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()

    def take(lease_id: str, body: bytes = b'{"ttl_s": 60}') -> bytes:
        return put(lease_id, body).replace(b"Host: here", b"Host: localhost")

    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S) as connection,
        connection.makefile("rb") as received,
    ):

        def ask(request: bytes) -> tuple[int, dict[str, Any]]:
            connection.sendall(request)
            return answer(received)

        for number in range(4):
            status, lease = ask(take(f"known-{number}"))
            assert (status, lease["id"], lease["state"]) == (201, f"known-{number}", "active")
            assert ask(take(f"known-{number}"))[0] == 200
        for number in range(3):
            status, lease = ask(release(f"known-{number}?as=holder"))
            assert (status, lease["id"], lease["state"]) == (200, f"known-{number}", "ended")
        # What is wrong with a known call is said as for others, and the connection goes on.
        assert ask(take("known-3", b'{"ttl_s": 61}'))[0] == 409
        assert ask(take("wrong-1", b'{"ttl_x": 60}'))[0] == 422
        assert ask(take("wrong-1", b'{"ttl_s" 60}x'))[0] == 400
        assert ask(release("never-was"))[0] == 404
        # The end of an address is not taken for the id: it is refused as often as it comes.
        for _ in range(2):
            assert ask(release("other/known-3"))[0] == 422
        # A call that is sent before the last one is answered waits for it.
        connection.sendall(release("known-3"))
        assert ask(release("known-3"))[1]["state"] == "ended"
        assert answer(received)[1]["state"] == "ended"
    assert "Traceback" not in (server.folder / "log").read_text(encoding="utf-8")
