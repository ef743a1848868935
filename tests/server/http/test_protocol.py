"""What comes before a request is known is bounded, too."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess

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
