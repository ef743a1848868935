"""Bad input: each has its clear answer, and nothing is changed by it."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from gpu_worker_pool.testing import Answer, ServerProcess
from tests.server.leasing import (
    OFTEN,
    LongPoll,
    assert_problem,
    eventually,
    get,
    new_id,
    put,
    queue,
    release,
    release_all,
    take,
)

BODY_LIMIT = 65_536


def read_raw(connection: socket.socket) -> Answer:
    """An answer, and whatever of it came where the server hung up while we were still sending."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess(
        {"SIMULATED_GPUS": "2", "GPU_POOL_MAX_QUEUED_PER_OWNER": "25", "LOG_LEVEL": "warning", **OFTEN}
    ) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    release_all(running)


@pytest.fixture
def unchanged(server: ServerProcess) -> Iterator[ServerProcess]:
    """A pool with a holder and a waiter, which are the same after the test."""
    take(server, gpus=2, owner="ann")
    queue(server, owner="bob")
    before = content(server)
    yield server
    assert content(server) == before
    assert server.json("/health")["status"] == "healthy"


def content(server: ServerProcess) -> list[dict[str, Any]]:
    pool = server.json("/pool")
    return [{**lease, "expires_in_s": None} for lease in (*pool["leases"], *pool["queue"])]


# --- ids and queries -------------------------------------------------------------------------------------------------

BAD_IDS = [
    "a/b",
    "a%2Fb",
    "..%2f..%2fetc%2Fpasswd",
    "%2e",
    "%2e%2e",
    "%00",
    "a%00b",
    "a%0Ab",
    "a%20b",
    "%20",
    "%C3%BC",
    "%F0%9F%98%80",
    "%ff%fe",
    "a'b",
    "a%22b",
    "%3Cscript%3E",
    "%ED%A0%80",
    "x" * 129,
    "x" * 5000,
    "",
]


def test_ids_that_are_none(unchanged: ServerProcess) -> None:
    for lease_id in BAD_IDS:
        for method in ("PUT", "DELETE", "GET"):
            answer = unchanged.ask(f"/leases/{lease_id}", method, body={} if method == "PUT" else None)
            detail = assert_problem(answer, 422, "lease id")
            assert detail.isascii(), detail
            assert len(detail) < 300, detail


# --- bodies ----------------------------------------------------------------------------------------------------------


def test_a_body_at_the_limit_is_taken_and_one_over_it_is_not(unchanged: ServerProcess) -> None:
    form = json.dumps({"gpus": 3}).encode()

    assert_problem(unchanged.ask("/leases/bad", "PUT", body=form.ljust(BODY_LIMIT)), 422, "3 GPUs")
    answer = unchanged.ask("/leases/bad", "PUT", body=form.ljust(BODY_LIMIT + 1))
    assert_problem(answer, 413, str(BODY_LIMIT))
    lease_id = unchanged.json("/pool")["queue"][0]["id"]
    assert_problem(unchanged.ask(f"/leases/{lease_id}", "DELETE", body=b" " * (BODY_LIMIT + 1)), 413, str(BODY_LIMIT))
    assert_problem(unchanged.ask(f"/leases/{lease_id}", "DELETE", body={"reason": "x"}), 422, "DELETE takes no body")
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("framing", ["said to be 100 MB", "in chunks"])
def test_a_body_of_100_mb_is_refused_early(unchanged: ServerProcess, framing: str) -> None:
    piece, whole = b" " * 65_536, 100_000_000
    is_chunked = framing == "in chunks"
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {whole}"
    sent = 0
    with socket.create_connection(("127.0.0.1", unchanged.port), timeout=30) as connection:
        connection.sendall(f"PUT /leases/bad HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode())
        try:
            while sent < whole and not is_readable(connection):
                connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
                sent += len(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 20_000_000, "what lies in the sockets' buffers, and no more"
        assert_problem(read_raw(connection), 413, str(BODY_LIMIT))


def is_readable(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(30)


def test_who_hangs_up_in_the_middle_of_a_body_has_asked_for_nothing(unchanged: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", unchanged.port), timeout=30) as connection:
        connection.sendall(b"PUT /leases/cut HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n{}")
    assert_problem(unchanged.ask("/leases/cut"), 404)


# --- too much --------------------------------------------------------------------------------------------------------


def test_waiting_connections_are_bounded_and_all_are_let_go_at_the_end() -> None:
    with ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_MAX_WAITING": "40", "LOG_LEVEL": "warning"}) as server:
        take(server)
        waiter = queue(server)["id"]
        with ExitStack() as stack:
            polls = [stack.enter_context(LongPoll(server, f"/leases/{waiter}?wait_s=60")) for _ in range(40)]
            full = eventually(lambda: refused(server, waiter), "there is room for 40")
            assert_problem(full, 503, "40", "wait_s")
            assert "retry-after" in full.headers
            one_more = new_id()
            assert put(server, one_more, wait_s=60).status == 202, (
                "a caller that asks is told at once that it is queued"
            )
            assert get(server, waiter)["state"] == "queued", "who does not wait is answered"

            polls.pop().close()
            eventually(lambda: get_status(server, f"/leases/{waiter}?wait_s=0.05") == 200, "a place is free again")
            release(server, waiter)
            answers = [poll.answer() for poll in polls]
        assert {answer.json["end_reason"] for answer in answers} == {"cancelled"}


def get_status(server: ServerProcess, path: str) -> int:
    return server.ask(path).status


def refused(server: ServerProcess, lease_id: str) -> Answer | None:
    answer = server.ask(f"/leases/{lease_id}?wait_s=0.05")
    return answer if answer.status == 503 else None
