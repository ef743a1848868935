"""Bad input: each has its clear answer, and nothing is changed by it."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
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
from tests.server.running import ask_over

BODY_LIMIT = 65_536
BODY_TIMEOUT_S = 10.0
MANY = 1000


class SilentClient(threading.Thread):
    """Sends half a body and then nothing. The server gives it 10 s, during which the other tests run."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(name="silent-client", daemon=True)
        self._address = ("127.0.0.1", server.port)
        self.answer: Answer | None = None
        self.waited_s = 0.0

    def run(self) -> None:
        with socket.create_connection(self._address, timeout=30) as connection:
            began = time.monotonic()
            connection.sendall(b'PUT /leases/half HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n{"gpus": ')
            self.answer = read_raw(connection)
            self.waited_s = time.monotonic() - began


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


@pytest.fixture(scope="module", autouse=True)
def silent(running: ServerProcess) -> Iterator[SilentClient]:
    client = SilentClient(running)
    client.start()
    yield client
    client.join(timeout=30)


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


def kept_open(server: ServerProcess) -> closing[http.client.HTTPConnection]:
    return closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30))


def content(server: ServerProcess) -> list[dict[str, Any]]:
    pool = server.json("/pool")
    return [{**lease, "expires_in_s": None} for lease in (*pool["leases"], *pool["queue"])]


# --- fields ----------------------------------------------------------------------------------------------------------

BAD_FORMS: list[tuple[str, str]] = [
    ('{"gpu": 2}', "gpus"),
    ('{"memory": 2, "ttl": 3}', "memory_mb"),
    ('{"__proto__": {}}', "no such field"),
    ('{"gpus": "2"}', "whole number"),
    ('{"gpus": 1.5}', "whole number"),
    ('{"gpus": true}', "whole number"),
    ('{"gpus": null}', "gpus"),
    ('{"gpus": [1]}', "a list"),
    ('{"gpus": 0}', "1 to 1024"),
    ('{"gpus": -1}', "1 to 1024"),
    ('{"gpus": 1025}', "1 to 1024"),
    ('{"gpus": 1e400}', "gpus"),
    ('{"gpus": NaN}', "gpus"),
    ('{"gpus": 1, "gpus": 2}', "twice"),
    ('{"memory_mb": NaN}', "NaN"),
    ('{"memory_mb": Infinity}', "Infinity"),
    ('{"memory_mb": -Infinity}', "Infinity"),
    ('{"memory_mb": 0}', "out of range"),
    ('{"memory_mb": -5}', "out of range"),
    ('{"memory_mb": 1e300}', "out of range"),
    ('{"memory_mb": ' + "9" * 5000 + "}", "memory_mb"),
    ('{"memory_mb": "1000"}', "finite number"),
    ('{"ttl_s": NaN}', "NaN"),
    ('{"ttl_s": Infinity}', "ttl_s"),
    ('{"ttl_s": 0}', "ttl_s"),
    ('{"ttl_s": -5}', "ttl_s"),
    ('{"ttl_s": 1e9}', "ttl_s"),
    ('{"ttl_s": false}', "ttl_s"),
    ('{"wait_s": NaN}', "wait_s"),
    ('{"wait_s": -1}', "wait_s"),
    ('{"wait_s": 1e9}', "0 to 300"),
    ('{"priority": 1e7}', "priority"),
    ('{"priority": 10000000}', "1000000"),
    ('{"priority": "high"}', "priority"),
    ('{"memory_threshold_percent": 101}', "0 to 100"),
    ('{"memory_threshold_percent": -1}', "0 to 100"),
    ('{"utilization_threshold_percent": NaN}', "utilization_threshold_percent"),
    ('{"model": ""}', "blank"),
    ('{"model": "   "}', "blank"),
    ('{"model": 100}', "text"),
    ('{"model": "' + "A" * 129 + '"}', "129"),
    ('{"owner": "' + "o" * 257 + '"}', "257"),
    ('{"owner": "a\\nb"}', "owner"),
    ('{"owner": "\\u202egnp.exe"}', "owner"),
    ('{"owner": "\\ud800"}', "owner"),
    # Not on every terminal, so two owners could look like one: a wide blank, one for private use, one not assigned.
    ('{"owner": "a\\u2003b"}', "owner"),
    ('{"owner": "a\\ue000b"}', "owner"),
    ('{"owner": "a\\u0378b"}', "owner"),
    ('{"worker_id": ["x"]}', "text"),
    ('{"host": {}}', "text"),
    ('{"pid": 0}', "pid"),
    ('{"pid": -1}', "pid"),
    ('{"pid": 99999999}', "pid"),
    ('{"pid_started": -1}', "pid_started"),
    ('{"labels": ["a"]}', "labels"),
    ('{"labels": {"a b": "c"}}', "a b"),
    ('{"labels": {"a": 1}}', "labels"),
    ('{"labels": {"a": "' + "x" * 257 + '"}}', "labels"),
    ('{"labels": {' + ",".join(f'"k{i}": "v"' for i in range(33)) + "}}", "33"),
    ("[]", "object"),
    ("null", "object"),
    ('"gpus"', "object"),
    ("7", "object"),
    ("[" * 20_000, ""),
    ('{"a":' * 9_000, ""),
]
BAD_JSON: list[tuple[bytes, str]] = [
    (b"{", "JSON"),
    (b"gpus=1", "JSON"),
    (b'{"gpus": 1,}', "JSON"),
    (b"{'gpus': 1}", "JSON"),
    (b"\x00\x01\x02", "JSON"),
    (b'{"owner": "\xff\xfe"}', "UTF-8"),
    (b"\xff\xfe{\x00}\x00", "UTF-8"),
]


def test_forms_that_make_no_sense(unchanged: ServerProcess) -> None:
    """One connection for all of them: a refusal does not cost it."""
    with kept_open(unchanged) as connection:
        for body, word in BAD_FORMS:
            answer = ask_over(connection, "/leases/bad", "PUT", body=body.encode())
            detail = assert_problem(answer, 422)
            assert word in detail, (body[:80], detail)
            assert len(answer.body) < 2000, "what was sent is not sent back at length"
    assert_problem(unchanged.ask("/leases/bad"), 404)


def test_what_is_no_json(unchanged: ServerProcess) -> None:
    for body, word in BAD_JSON:
        assert_problem(unchanged.ask("/leases/bad", "PUT", body=body), 400, word)
    assert_problem(unchanged.ask("/leases/bad"), 404)


def test_several_faults_are_told_at_once(unchanged: ServerProcess) -> None:
    assert_problem(put(unchanged, "bad", gpus=0, ttl_s=-1, gpu=1), 422, "gpus", "ttl_s", "gpu:")


def test_a_thousand_gpus_are_a_good_number_that_is_not_there(unchanged: ServerProcess) -> None:
    assert_problem(put(unchanged, "bad", gpus=1000, wait_s=20), 422, "1000 GPUs")
    assert_problem(unchanged.ask("/leases/bad"), 404)


def test_renewals_that_make_no_sense(unchanged: ServerProcess) -> None:
    bad: list[tuple[Any, str]] = [
        ({}, "ids"),
        ({"ids": []}, "1 to 1000"),
        ({"ids": "all"}, "list"),
        ({"ids": [1]}, "ids.0"),
        ({"ids": ["a/b"]}, "a/b"),
        ({"ids": ["x"] * 1001}, "1 to 1000"),
        ({"ids": ["x"], "ttl_s": 5}, "ttl_s"),
        (["x"], "object"),
    ]
    for form, word in bad:
        assert_problem(unchanged.ask("/leases/renew", "POST", body=form), 422, word)
    assert_problem(unchanged.ask("/leases/renew", "POST", body=b"ids=x"), 400, "JSON")
    assert_problem(unchanged.ask("/leases/renew", "POST"), 422, "ids")


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


@pytest.mark.parametrize("lease_id", ["a", "0", "A.b_c~d-e", "...", "x" * 128, "null", "renew"])
def test_ids_that_look_odd_and_are_fine(server: ServerProcess, lease_id: str) -> None:
    assert put(server, lease_id).status in {200, 201}
    assert server.ask(f"/leases/{lease_id}", "DELETE").json["id"] == lease_id


BAD_QUERIES = [
    ("wait_s=NaN", "wait_s"),
    ("wait_s=inf", "wait_s"),
    ("wait_s=-1", "wait_s"),
    ("wait_s=1e9", "0 to 300"),
    ("wait_s=soon", "soon"),
    ("wait_s=", "wait_s"),
    ("wait_s=1&wait_s=2", "twice"),
    ("wait=5", "wait_s"),
    ("devices=UUID", "uuid"),
    ("x" * 3000 + "=1", "unknown parameter"),
    ("%ff=%00", "unknown parameter"),
    ("&".join(f"a{i}=1" for i in range(30)), "parameter"),
]


def test_queries_that_make_no_sense(unchanged: ServerProcess) -> None:
    lease_id = unchanged.json("/pool")["queue"][0]["id"]
    for query, word in BAD_QUERIES:
        answer = unchanged.ask(f"/leases/{lease_id}?{query}")
        assert answer.status == 422, (query[:60], answer)
        assert_problem(answer, 422, word)
    assert_problem(unchanged.ask("/leases/bad?wait_s=5", "PUT", body={}), 422, "wait_s")
    assert_problem(unchanged.ask(f"/leases/{lease_id}?force=1", "DELETE"), 422, "force")
    assert_problem(unchanged.ask("/leases/renew?all=1", "POST", body={"ids": [lease_id]}), 422, "all")


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


def test_a_compressed_body_is_refused(unchanged: ServerProcess) -> None:
    answer = unchanged.ask("/leases/bad", "PUT", {"Content-Encoding": "gzip"}, b"\x1f\x8b\x08")

    assert_problem(answer, 415, "compressed")


def test_who_hangs_up_in_the_middle_of_a_body_has_asked_for_nothing(unchanged: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", unchanged.port), timeout=30) as connection:
        connection.sendall(b"PUT /leases/cut HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n{}")
    assert_problem(unchanged.ask("/leases/cut"), 404)


def test_what_is_no_http_does_no_harm(unchanged: ServerProcess) -> None:
    for nonsense in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\r\n" * 100, b"PUT /leases/x HTTP/9.9\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", unchanged.port), timeout=30) as connection:
            connection.sendall(nonsense)
            connection.shutdown(socket.SHUT_WR)
            assert not connection.recv(65536).startswith(b"HTTP/1.1 5")


# --- too much --------------------------------------------------------------------------------------------------------


def test_one_owner_cannot_fill_the_queue(server: ServerProcess) -> None:
    take(server, gpus=2)
    prefix = new_id("greedy")
    with kept_open(server) as connection:
        answers = [ask_over(connection, f"/leases/{prefix}-{n}", "PUT", body={"owner": "greedy"}) for n in range(30)]

    assert [answer.status for answer in answers] == [202] * 25 + [429] * 5
    assert_problem(answers[-1], 429, "25", "greedy")
    assert "retry-after" in answers[-1].headers
    assert_problem(server.ask(f"/leases/{prefix}-29"), 404)
    assert put(server, f"{prefix}-0", owner="greedy").status == 200, "asking again for what waits is no more"
    modest = put(server, new_id(), owner="modest")
    assert (modest.status, modest.json["position"]) == (202, 26)
    release(server, f"{prefix}-3")
    assert put(server, f"{prefix}-29", owner="greedy").status == 202


@pytest.fixture
def _many_sockets() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip(f"this process may open {hard} files, and needs 3,000")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_many_sockets")
def test_a_thousand_requests_and_a_thousand_long_polls() -> None:
    """As many requests of one owner as a server takes that nobody has set bounds for, and 1,000 connections that wait."""
    env = {"SIMULATED_GPUS": "1", "LOG_LEVEL": "warning", "REFRESH_INTERVAL": "1", "GPU_POOL_MAX_WAITING": str(MANY)}
    with ServerProcess(env) as server:
        holder = take(server)["id"]
        form = {"owner": "greedy", "ttl_s": 600}
        with kept_open(server) as connection:
            answers = [ask_over(connection, f"/leases/q{n}", "PUT", body=form) for n in range(MANY + 50)]
            assert [answer.status for answer in answers] == [202] * MANY + [429] * 50
            assert_problem(answers[-1], 429, str(MANY), "greedy")
            assert answers[MANY - 1].json["position"] == MANY
            began = time.monotonic()
            assert ask_over(connection, "/health").json["status"] == "healthy"
            assert len(ask_over(connection, "/pool").json["queue"]) == MANY
            assert time.monotonic() - began < 20
        hold_a_thousand_polls(server, holder)


def hold_a_thousand_polls(server: ServerProcess, holder: str) -> None:
    with ExitStack() as stack:
        polls = [stack.enter_context(LongPoll(server, "/leases/q0?wait_s=60")) for _ in range(MANY)]
        eventually(lambda: refused(server, "q0"), "all of them wait", within_s=20)
        began = time.monotonic()
        assert server.ask("/health").status == 200
        assert time.monotonic() - began < 20
        release(server, holder)
        answers = [poll.answer() for poll in polls]
    assert {answer.status for answer in answers} == {200}
    assert {answer.json["position"] for answer in answers} == {0}, "GPUs are set aside"
    assert get(server, "q0")["state"] == "active"


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
            assert put(server, one_more, wait_s=60).status == 202, "who asks is told at once that he is queued"
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


# --- at last, because it takes longest -------------------------------------------------------------------------------


def test_half_a_body_and_then_silence(server: ServerProcess, silent: SilentClient) -> None:
    silent.join(timeout=20)

    assert silent.answer is not None
    assert_problem(silent.answer, 408, "10 seconds")
    assert silent.answer.headers["connection"] == "close"
    assert BODY_TIMEOUT_S - 0.5 < silent.waited_s < BODY_TIMEOUT_S + 15
    assert_problem(server.ask("/leases/half"), 404)
