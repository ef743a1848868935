"""Every answer of the server, compared byte for byte with the recordings beside this file.

RECORD=1 pytest tests/server/recorded writes the recordings again; read their difference then.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.server.recorded.openapi import check_still_described, describe
from tests.server.recorded.recorder import (
    IS_RECORDING,
    RECORDINGS,
    Book,
    Connection,
    Scene,
    Server,
    Stream,
    as_json,
    make_request,
)
from tests.server.recorded.scenes import (
    CALLS,
    ELSEWHERE,
    HTML,
    a_book,
    ask_around,
    play_draining,
    play_end,
    play_http,
    walk,
)

TOKENS = {"GPU_POOL_TOKENS": "admin:the-secret-of-admin,ada:the-secret-of-ada,bob:the-secret-of-bob"}
ADMIN, ADA, BOB = (f"Authorization: Bearer the-secret-of-{name}" for name in ("admin", "ada", "bob"))


@pytest.fixture(scope="module", autouse=True)
def slow_body() -> Iterator[tuple[Server, Connection]]:
    """A body that does not arrive: begun before all others, for it takes ten seconds to be given up."""
    with Server() as server, Connection(server) as connection:
        connection.socket.sendall(make_request("PUT /leases/slow", b"{", ("Content-Length: 2",)))
        yield server, connection


def test_what_a_plain_server_answers() -> None:
    with a_book("plain") as (book, server):
        scene = book.scene("reading", server)
        for path in CALLS["read"]:
            walk(scene, path)
        scene.ask("GET /", b"", HTML)
        scene.ask("HEAD /", b"", HTML)
        scene.ask("GET /", b"", "Accept: text/html;q=0.5, application/json")
        scene.ask(
            "OPTIONS /pool", b"", ELSEWHERE, "Access-Control-Request-Method: GET", "Access-Control-Request-Headers: x-a"
        )
        page = book.scene("page", server)
        for path in CALLS["files"]:
            page.file(f"GET {path}")
            page.file(f"GET {path}", ELSEWHERE)
            page.file(f"HEAD {path}")
            ask_around(page, path, ("POST", "PUT", "DELETE", "PATCH"))
        page.ask("GET /ui/app.js", b"", "If-None-Match: *")
        page.file("GET /ui/app.js", 'If-None-Match: "other", W/"others"')
        walk(page, "/ui/")
        for path in CALLS["page_data"]:
            walk(page, path)
        page.ask("GET /ui/data/pool")
        page.file("GET /ui/data/pool", "Accept-Encoding: gzip")
        page.file("GET /ui/data/pool", "Accept-Encoding: br, gzip;q=0.5")
        page.ask("GET /ui/data/pool", b"", "Accept-Encoding: gzip;q=0")
        ask_around(page, "/ui/data/pool", ("POST",))
        page.ask("GET /ui/data/me", b"", ADA)
        page.ask("GET /ui/data/me", b"", "Authorization: Basic eA==")
        around = book.scene("around", server)
        for path in CALLS["write"]:
            around.ask(f"GET {path}")
            around.ask(f"GET {path}", b"", ELSEWHERE)
            around.ask(f"HEAD {path}")
            ask_around(around, path, ("PATCH",))
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH"):
            around.ask(f"{method} /leases/renew", b"", ELSEWHERE)
        around.ask("HEAD /events")
        around.ask("HEAD /events?pace_s=x")
        ask_around(around, "/events", ("POST", "PUT", "DELETE", "PATCH"))
        nowhere = book.scene("nowhere", server)
        for path in CALLS["nowhere"]:
            for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS") if "%" not in path else ("GET", "PUT"):
                nowhere.ask(f"{method} {path}")
            nowhere.ask(f"GET {path}", b"", ELSEWHERE)
        queries = book.scene("queries", server)
        for path in CALLS["queries"]:
            # The page names the version of its files, which changes with each of them.
            (queries.file if path.startswith("/ui?") else queries.ask)(f"GET {path}")
        play_http(book.scene("http", server))


def test_what_is_said_of_bad_forms() -> None:
    with a_book("forms") as (book, server):
        lease = book.scene("lease", server)
        for field, values in CALLS["lease"].items():
            for value in values:
                lease.ask("PUT /leases/x", f'{{"{field}":{value}}}')
        for body in CALLS["bodies"]:
            lease.ask("PUT /leases/x", body)
        lease.ask("PUT /leases/x", json.dumps({f"x{number}": number for number in range(7)}))
        lease.ask("PUT /leases/x", json.dumps({"labels": {f"x{number}": "" for number in range(33)}}))
        lease.ask("PUT /leases/x", json.dumps({"among": list(range(129))}))
        lease.ask("PUT /leases/x", "[" * 30_000)
        lease.ask("PUT /leases/x", b'{"owner":"\xff"}')
        lease.ask("PUT /leases/x", '{"owner":"ada"}'.encode("utf-16"))
        lease.ask("PUT /leases/x", "\ufeff{}")
        other = book.scene("other", server)
        for body in CALLS["renew"]:
            other.ask("POST /leases/renew", body)
        other.ask("POST /leases/renew", json.dumps({"ids": [f"x{number}" for number in range(1001)]}))
        for body in CALLS["drain"]:
            other.ask("POST /admin/gpus/0/drain", body)
        for path in CALLS["targets"]:
            other.ask(path)
        bodies = book.scene("bodies", server)
        for call in (
            "PUT /leases/x",
            "POST /leases/renew",
            "POST /admin/gpus/0/drain",
            "PUT /admin/ignored-processes/x",
        ):
            bodies.ask(call, b"{}", "Content-Encoding: gzip")
            bodies.ask(call, b"", "Content-Length: 65537")
            bodies.ask(call, b"", f"Content-Length: {'9' * 19}")
            bodies.ask(
                call, b"11000\r\n" + b" " * 0x11000 + b"\r\n", "Transfer-Encoding: chunked", "X-Content-Length: none"
            )
        bodies.ask("PUT /leases/x", b"", "Content-Length: x")
        bodies.ask(
            "PUT /leases/x",
            b'8\r\n{"gpus":\r\n2\r\n0}\r\n0\r\n\r\n',
            "Transfer-Encoding: chunked",
            "X-Content-Length: none",
        )
        bodies.ask("PUT /leases/x", b'{"gpus":0}', "Content-Encoding: identity", "Content-Type: text/plain")
        # None of them was taken.
        bodies.ask("GET /leases")
        play_draining(book, server)


def test_a_lease_from_asking_to_its_end() -> None:
    here = {json.dumps(socket.gethostname()): '"<host>"', f'"pid":{os.getpid()}': '"pid":<pid>'}
    with a_book("leases") as (book, server), ExitStack() as stack:
        scene = book.scene("life", server, here)
        stream = stack.enter_context(Stream(server, "/events", ELSEWHERE))
        stream.until(b"connected")
        paced = stack.enter_context(Stream(server, "/events?pace_s=60"))
        paced.until(b"connected")
        for body in CALLS["granted"]:
            scene.ask(f"PUT /leases/{json.loads(body)['worker_id']}", body)
        paced.until(b"event: changed")
        local = json.dumps(
            {"among": ["3"], "owner": "carl", "worker_id": "local", "host": socket.gethostname(), "pid": os.getpid()},
            separators=(",", ":"),
        )
        scene.ask("PUT /leases/local?devices=uuid", local)
        scene.ask("PUT /leases/gone", json.dumps({"host": socket.gethostname(), "pid": 2**23}, separators=(",", ":")))
        scene.note("all GPUs are taken")
        for body in CALLS["queued"]:
            scene.ask(f"PUT /leases/{json.loads(body)['worker_id']}", body)
        scene.ask("PUT /leases/one", '{"among":[3]}')
        scene.ask("PUT /leases/one", CALLS["granted"][0])
        for call in CALLS["looks"]:
            scene.ask(call)
        scene.ask("POST /leases/renew", '{"ids":["one","waits","never","one"]}')
        scene.note("they are given back, and who waits gets them")
        play_end(scene, stream)
        scene.note("what the stream told")
        scene.stream(stream)
        scene.stream(paced)


def test_who_may_do_what() -> None:
    with a_book("access") as (book, server):
        scene = book.scene("without-tokens", server)
        for headers in CALLS["strangers"]:
            scene.ask("PUT /leases/a", b"{", *headers)
        for headers in CALLS["strangers"][:6]:
            for call in (
                "DELETE /leases/a",
                "POST /leases/renew",
                "POST /admin/gpus/0/drain",
                "PUT /admin/ignored-processes/x",
            ):
                scene.ask(call, b"", *headers)
        for headers in CALLS["friends"]:
            scene.ask("PUT /leases/a", b"{", *headers)
    with a_book("tokens", TOKENS) as (book, server):
        scene = book.scene("answers", server)
        for call, headers, body in CALLS["tokens"]:
            known = {"ada": [ADA], "bob": [BOB], "admin": [ADMIN], "": []}
            scene.ask(call, body, *known.get(headers, [headers]))
    with a_book("broken-tokens", {"GPU_POOL_TOKENS": "nonsense"}) as (book, server):
        scene = book.scene("answers", server)
        scene.ask("PUT /leases/a", '{"among":[0],"owner":"ada"}')
        scene.ask("PUT /leases/a", '{"among":[0]}')
        scene.ask("PUT /leases/a", '{"among":[0]}', ADA)
        scene.ask("POST /admin/leases/a/revoke")
        scene.ask("POST /leases/renew", '{"ids":["a"]}')
        scene.ask("GET /ui/data/me", b"", ADA)
        scene.ask("DELETE /leases/a")


def test_what_a_server_answers_below_a_prefix() -> None:
    settings = {
        "API_PREFIX": "/gpu-pool/v1/", "DOCS_URL": "/reference/try", "REDOC_URL": "/reference/read", "TITLE": "<Our> GPUs",
        "VERSION": "7", "GPU_POOL_DCGM_METRICS": "true", "MAX_HISTORY": "3",
        "GPU_MEMORY_THRESHOLD_PERCENT": "70",
    }  # fmt: skip
    with a_book("prefix", settings) as (book, server):
        scene = book.scene("answers", server)
        for path in (*CALLS["read"], "/reference/try", "/reference/read", "/ui/", "/ui/data/pool"):
            body = scene.ask(f"GET /gpu-pool/v1{path}")
            scene.ask(f"GET /gpu-pool/v1{path}", b"", ELSEWHERE, like=body) if path != "/ui/data/pool" else None
            scene.ask(f"POST /gpu-pool/v1{path}")
            scene.ask(f"OPTIONS /gpu-pool/v1{path}")
            scene.ask(f"GET {path}")
        for path in ("/gpu-pool/v1", "/gpu-pool", "/gpu-pool/", "/gpu-pool/v1/nowhere", "/"):
            for headers in ((), (HTML,), (ELSEWHERE,)):
                scene.ask(f"GET {path}", b"", *headers)
            scene.ask(f"HEAD {path}", b"", HTML)
            scene.ask(f"POST {path}")
        scene.file("GET /gpu-pool/v1/openapi.json")
        scene.file("GET /gpu-pool/v1/ui")
        scene.file("GET /gpu-pool/v1/docs-assets/favicon.png")
        for call in CALLS["prefixed"]:
            scene.ask(call, b'{"among":[0]}' if call.startswith("PUT /gpu-pool/v1/leases") else b"")


def test_what_a_closed_server_answers() -> None:
    settings = {"ENABLE_CORS": "false", "DOCS_URL": "", "REDOC_URL": "", "CUDA_VISIBLE_DEVICES": "1,3"}
    with a_book("closed", settings) as (book, server):
        scene = book.scene("answers", server)
        for path in CALLS["read"]:
            body = scene.ask(f"GET {path}")
            scene.ask(f"GET {path}", b"", ELSEWHERE, like=body)
            scene.ask(f"OPTIONS {path}", b"", ELSEWHERE, "Access-Control-Request-Method: GET")
            scene.ask(f"POST {path}")
        for path in (
            "/docs-assets/favicon.png",
            "/nowhere",
            "/leases/none",
            "/events?pace_s=x",
            "/ui/data/pool",
            "/ui/none",
        ):
            scene.ask(f"GET {path}", b"", ELSEWHERE)
        scene.ask("HEAD /events")
        scene.ask("OPTIONS /events")
        scene.file("GET /openapi.json", ELSEWHERE)
        for call, body in (("/leases/x", '{"among":[0]}'), ("/leases/x", '{"gpus":3}'), ("/leases/y", '{"among":[3]}')):
            scene.ask(f"PUT {call}", body)


def test_limits() -> None:
    settings = {"GPU_POOL_MAX_QUEUED": "3", "GPU_POOL_MAX_QUEUED_PER_OWNER": "2", "GPU_POOL_MAX_WAITING": "1"}
    with a_book("limits", settings) as (book, server), ExitStack() as stack:
        scene = book.scene("queue", server)
        scene.ask("PUT /leases/all", '{"gpus":4}')
        for lease_id, owner in (("q1", "ada"), ("q2", "ada"), ("q3", "ada"), ("q4", "bob"), ("q5", "eve")):
            scene.ask(f"PUT /leases/{lease_id}", json.dumps({"owner": owner}))
        for lease_id in ("q4", "q2", "q1"):
            scene.ask(f"DELETE /leases/{lease_id}")
        for lease_id in ("n1", "n2", "n3"):
            scene.ask(f"PUT /leases/{lease_id}", "{}")
        scene.ask("DELETE /leases/n2")
        waiting = stack.enter_context(Connection(server))
        waiting.socket.sendall(make_request("PUT /leases/w", b'{"wait_s":100}', ()))
        quiet = Scene(server)
        while b"gpupool_waiting_connections 1.0" not in quiet.file("GET /metrics"):
            pass
        scene.ask("GET /leases/n1?wait_s=10")
        scene.ask("PUT /leases/n1", '{"wait_s":10}')
        streams = book.scene("streams", server)
        for _ in range(64):
            stack.enter_context(Stream(server, "/events?pace_s=60")).until(b"connected")
        streams.ask("GET /events", b"", ELSEWHERE)


def test_many_ask_for_usage_at_once() -> None:
    with a_book("crowd") as (book, server):
        request = make_request("GET /usage", b"", ())
        for _ in range(20):
            scene = book.scene("usage", server)
            with ExitStack() as stack:
                crowd = [stack.enter_context(Connection(server)) for _ in range(100)]
                for connection in crowd:
                    connection.socket.sendall(request)
                for connection in crowd:
                    scene.text = ""
                    scene.receive(connection, request)
                    if "HTTP/1.1 503" in scene.text:
                        return


def test_gpus_that_nobody_has_looked_at_yet(tmp_path: Path) -> None:
    """The driver hangs: a program in its place waits for somebody to write into a pipe, and no library is there."""
    pipe, program = tmp_path / "pipe", tmp_path / "nvidia-smi"
    os.mkfifo(pipe)
    program.write_text(f"#!/bin/sh\nread line < {pipe}\n", encoding="utf-8")
    program.chmod(0o700)
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library")
    libraries = ":".join(filter(None, (str(tmp_path), os.environ.get("LD_LIBRARY_PATH"))))
    settings = {"SIMULATED_GPUS": "", "PATH": str(tmp_path), "LD_LIBRARY_PATH": libraries}
    try:
        with a_book("unseen", settings) as (book, server):
            scene = book.scene("answers", server)
            for call, body in CALLS["unseen"]:
                scene.ask(call, body)
    finally:
        os.close(os.open(pipe, os.O_RDWR))  # lets go of the program that waits


def test_a_journal_in_trouble() -> None:
    calls = CALLS["in_trouble"]
    with Server() as server:
        state = server.state_dir
        book = Book("unopened")
        with Server({"GPU_POOL_STATE_DIR": str(server.folder / "log" / "state")}) as troubled:
            scene = book.scene("answers", troubled, {str(server.folder): "<home>"})
            for call, body in calls:
                scene.ask(call, body)
        book.close()
        book = Book("unwritten")
        scene = book.scene("answers", server)
        scene.ask("PUT /leases/held", '{"among":[1],"owner":"ada"}')
        journal = state / "simulated-box1.sqlite3"
        journal.rename(state / "moved")
        scene.ask("GET /usage")
        scene.ask("GET /timeline")
        for call, body in calls:
            scene.ask(call, body)
        book.close()


def test_a_body_that_does_not_arrive(slow_body: tuple[Server, Connection]) -> None:
    server, connection = slow_body
    book = Book("slow")
    book.scene("body", server).receive(connection, make_request("PUT /leases/slow", b"{", ("Content-Length: 2",)))
    book.close()


def test_what_the_openapi_document_describes_it_still_describes() -> None:
    with Server() as server:
        live = json.loads(json.dumps(describe(json.loads(Scene(server).file("GET /openapi.json")))))
    path = RECORDINGS / "openapi.json"
    if IS_RECORDING:
        path.write_text(as_json(live), encoding="utf-8")
    faults = check_still_described(json.loads(path.read_text(encoding="utf-8")), live)
    assert not faults, "\n".join(faults)
