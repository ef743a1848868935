"""Requests that were read before are known by their bytes, and answered as all others are."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_worker_pool.server.http.polls import MOST_BYTES, MOST_REQUESTS, PolledRequests
from gpu_worker_pool.testing import ServerProcess

SOON_S = 30.0
PATH = "/gpu/count"
DATE = [(b"date", b"today")]


def scope(path: str = PATH, **others: Any) -> dict[str, Any]:
    plain = {"method": "GET", "http_version": "1.1", "query_string": b"", "headers": [(b"host", b"here")]}
    return {"path": path, **plain, **others}


def request(*lines: bytes) -> bytes:
    return b"\r\n".join((b"GET /gpu/count HTTP/1.1", b"Host: here", *lines, b"", b""))


class Polled:
    """One polled path, whose body can be replaced."""

    def __init__(self, body: bytes = b"{}", longest: int = 100) -> None:
        self.body = body
        self.requests = PolledRequests({PATH: lambda: self.body}, ((b"x-own", b"1"),), longest)

    def knows(self, data: bytes) -> bool:
        return self.requests.find(data) is not None


def test_a_request_that_was_read_is_known_by_its_bytes() -> None:
    polled = Polled()
    assert not polled.knows(request())
    polled.requests.learn(request(), scope())
    assert polled.knows(request())
    assert not polled.knows(request(b"Accept: text/html"))


def test_the_answer_has_the_headers_the_length_and_the_body_of_now() -> None:
    polled = Polled(b'{"a":1}')
    polled.requests.learn(request(), scope())
    answer = polled.requests.find(request())
    assert answer is not None
    assert answer.whole(DATE) == b'HTTP/1.1 200 OK\r\ndate: today\r\nx-own: 1\r\ncontent-length: 7\r\n\r\n{"a":1}'
    polled.body = b"{}"
    assert answer.whole(DATE) == b"HTTP/1.1 200 OK\r\ndate: today\r\nx-own: 1\r\ncontent-length: 2\r\n\r\n{}"
    assert answer.whole([(b"date", b"tomorrow")]) == (
        b"HTTP/1.1 200 OK\r\ndate: tomorrow\r\nx-own: 1\r\ncontent-length: 2\r\n\r\n{}"
    )


def test_an_answer_that_is_too_long_for_one_write_is_not_made_here() -> None:
    polled = Polled(b"x" * 101)
    polled.requests.learn(request(), scope())
    answer = polled.requests.find(request())
    assert answer is not None
    assert answer.whole(DATE) is None


@pytest.mark.parametrize(
    ("data", "read_as"),
    [
        (request(), scope("/leases/1")),
        (request(), scope(method="HEAD")),
        (request(), scope(http_version="1.0")),
        (request(), scope(query_string=b"a=1")),
        (request(b"Authorization: Bearer secret"), scope(headers=[(b"host", b"here"), (b"authorization", b"Bearer secret")])),
        (request(b"Connection: close"), scope(headers=[(b"host", b"here"), (b"connection", b"close")])),
        (request(b"Content-Length: 1"), scope(headers=[(b"host", b"here"), (b"content-length", b"1")])),
        (request(b"Accept: " + b"x" * MOST_BYTES), scope(headers=[(b"host", b"here"), (b"accept", b"x" * MOST_BYTES)])),
        # Two requests, of which the second was read as this scope.
        (request() + request(), scope()),
        # The end of a head whose beginning came before.
        (b"ere\r\n\r\n", scope()),
    ],
)  # fmt: skip
def test_other_requests_are_not_learned(data: bytes, read_as: dict[str, Any]) -> None:
    polled = Polled()
    polled.requests.learn(data, read_as)
    assert not polled.knows(data)


def test_only_so_many_requests_are_known() -> None:
    polled = Polled()
    for number in range(MOST_REQUESTS + 1):
        agent = b"%d" % number
        polled.requests.learn(
            request(b"User-Agent: " + agent), scope(headers=[(b"host", b"here"), (b"user-agent", agent)])
        )
    assert sum(polled.knows(request(b"User-Agent: %d" % number)) for number in range(MOST_REQUESTS + 1)) == 1


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running


def counts(connection: socket.socket, number: int) -> list[int]:
    """The count of GPUs in each of so many answers."""
    found: list[int] = []
    with connection.makefile("rb") as received:
        while len(found) < number:
            assert received.readline() == b"HTTP/1.1 200 OK\r\n"
            length = 0
            while (line := received.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            found.append(json.loads(received.read(length))["gpu_count"])
    return found


def test_known_requests_and_others_are_answered_in_turn(server: ServerProcess) -> None:
    known, other = request(), request(b"Cookie: none")
    # Each of these is sent at once: the end of one request may come with the beginning of the next.
    pieces = [
        known,
        known,
        other,
        known,
        known + known,
        known[:30],
        known[30:],
        known,
        known[:-1],
        known[-1:] + known,
        known,
    ]
    with socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S) as connection:
        for piece in pieces:
            connection.sendall(piece)
            number = piece.count(b"\r\n\r\n") if piece != known[-1:] + known else 2
            if piece == known[30:]:
                number = 1
            assert counts(connection, number) == [4] * number


def test_a_call_that_is_under_way_is_answered_before_a_known_request(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S) as connection:
        connection.sendall(request())
        assert counts(connection, 1) == [4]
        assert server.ask("/leases/held", "PUT", body={"gpus": 4}).status == 201
        assert server.ask("/leases/asked", "PUT", body={"gpus": 4}).status == 202
        connection.sendall(b"GET /leases/asked?wait_s=25 HTTP/1.1\r\nHost: here\r\n\r\n")
        connection.sendall(request())
        assert server.ask("/leases/held", "DELETE").status == 200
        assert json.loads(_body(connection))["state"] == "active"
        assert counts(connection, 1) == [4]
        assert server.ask("/leases/asked", "DELETE").status == 200


def _body(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received or b"}" not in received:
        received += connection.recv(1)
    length = int(received.lower().partition(b"content-length:")[2].split()[0])
    rest = length - len(received.partition(b"\r\n\r\n")[2])
    return received.partition(b"\r\n\r\n")[2] + (connection.recv(rest, socket.MSG_WAITALL) if rest else b"")


def test_a_connection_that_begins_with_a_known_request_stays_open_while_it_is_used(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S) as first:
        first.sendall(request())
        assert counts(first, 1) == [4]
    with socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S) as second:
        second.sendall(request())
        assert counts(second, 1) == [4]
        second.sendall(b"GET /gpu/count HTTP/1.1\r\nConnection: close\r\nHost: here\r\n\r\n")
        assert counts(second, 1) == [4]
        assert second.recv(1) == b""
