"""The application under the user's own uvicorn, without the bounds of `gpu-pool serve`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.test_starting import wait_until_it_listens

SOON_S = 30.0
UVICORN = (sys.executable, "-m", "uvicorn", "gpu_worker_pool.gpu_server:app", "--host", "127.0.0.1", "--port", "{port}")


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "1", "PYTHONFAULTHANDLER": "1"}, command=UVICORN) as running:
        # uvicorn listens only after the application has said that it is ready.
        wait_until_it_listens(running)
        yield running


def test_heads_are_bounded_and_open_calls_do_not_keep_it_from_stopping(server: ServerProcess) -> None:
    many = {f"X-{number}": "1" for number in range(120)}
    assert server.ask("/pool", headers=many).status == 431
    assert server.ask(f"/pool?{'x' * 9_000}").status == 414
    assert server.ask("/leases/first", "PUT", body={}).status == 201

    wait = json.dumps({"wait_s": 300}).encode()
    with ExitStack() as opened:
        poll, stream, unsent = (
            opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S)) for _ in range(3)
        )
        stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert stream.recv(10_000).startswith(b"HTTP/1.1 200")
        unsent.sendall(b"PUT /leases/third HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        poll.sendall(
            b"PUT /leases/second HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(wait), wait)
        )
        until = time.monotonic() + SOON_S
        while server.json("/pool")["queue_length"] == 0:
            assert time.monotonic() < until
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        try:
            assert b"202 Accepted" in poll.recv(10_000), "a long poll is answered with what is known"
            server.process.wait(SOON_S)
        except (TimeoutError, subprocess.TimeoutExpired):
            server.process.send_signal(signal.SIGABRT)  # so that its log tells what each thread does
            server.process.wait(SOON_S)
            pytest.fail(f"the server does not stop:\n{server.log()}")
    assert "Application shutdown complete" in server.log()
