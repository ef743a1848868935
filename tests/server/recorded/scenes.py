"""What is asked in more than one recording, or is long to tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.server.recorded.recorder import Book, Connection, Scene, Server, Stream, make_request

ELSEWHERE = "Origin: http://elsewhere.example"
HTML = "Accept: text/html,application/xhtml+xml,*/*;q=0.8"
CALLS = json.loads((Path(__file__).parent / "calls.json").read_text(encoding="utf-8"))


@contextmanager
def a_book(name: str, settings: dict[str, str] | None = None) -> Iterator[tuple[Book, Server]]:
    """A server, and the recordings of what it answers."""
    book = Book(name)
    with Server(settings) as server:
        yield book, server
    book.close()


def walk(scene: Scene, path: str, wrong: tuple[str, ...] = ("POST", "PUT", "DELETE", "PATCH")) -> None:
    """All that can be done with an address that is there to be read."""
    body = scene.ask(f"GET {path}")
    scene.ask(f"GET {path}", b"", ELSEWHERE, like=body)
    scene.ask(f"HEAD {path}")
    ask_around(scene, path, wrong)


def ask_around(scene: Scene, path: str, wrong: tuple[str, ...]) -> None:
    """What a browser asks beforehand, methods that are not possible, and a slash too many."""
    scene.ask(f"OPTIONS {path}")
    for method in ("GET", "PUT"):
        scene.ask(f"OPTIONS {path}", b"", ELSEWHERE, f"Access-Control-Request-Method: {method}")
    for method in wrong:
        scene.ask(f"{method} {path}")
    (scene.file if path in CALLS["files"] else scene.ask)(f"GET {path}/")


def play_http(scene: Scene) -> None:
    """What is not as HTTP should be, or not as it is mostly written."""
    host = b"Host: 127.0.0.1:8000\r\n"
    scene.send(b"GET /livez HTTP/1.0\r\n\r\n")
    scene.send(b"GET /livez HTTP/1.1\r\n\r\n")
    scene.send(b"GET /livez HTTP/1.1\r\n" + host + b"Connection: close\r\n\r\n")
    scene.send(b"GET /pool HTTP/1.1\r\n" + host + b"Connection: close\r\n\r\n")
    scene.send(b"GET http://other.example/livez HTTP/1.1\r\n" + host + b"\r\n")
    scene.send(b"OPTIONS * HTTP/1.1\r\n" + host + b"\r\n")
    scene.send(b"GET /livez HTTP/1.1\r\n" + host + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n")
    scene.send(b"GET /livez#part HTTP/1.1\r\n" + host + b"\r\n")
    scene.send(b"PROPFIND /pool HTTP/1.1\r\n" + host + b"\r\n")
    scene.send(b"get /pool HTTP/1.1\r\n" + host + b"\r\n")
    scene.send(b"no request at all\r\n\r\n")
    scene.send(b"GET /livez HTTP/1.1\r\n" + host + b"X: " + b"x" * 70_000)
    expecting = ("Expect: 100-continue", "Content-Length: 2")
    with Connection(scene.server) as connection:
        head = make_request("POST /leases/renew", b"", expecting)
        connection.socket.sendall(head)
        scene.receive(connection, head)
        connection.socket.sendall(b"{}")
        scene.receive(connection, b"{}")
    with Connection(scene.server) as connection:
        both = [make_request("GET /livez", b"", ()), make_request("GET /gpu/count", b"", ())]
        connection.socket.sendall(b"".join(both))
        for request in both:
            scene.receive(connection, request)


def play_draining(book: Book, server: Server) -> None:
    """A GPU that was just given back is looked at a tenth of a second later. What is asked in the same breath is mostly
    answered before that; where it was not, once more.
    """
    for number in range(20):
        scene = book.scene(
            "draining", server, {f"drains-{number}": "drains", f'"fence":{number + 1},': '"fence":<fence>,'}
        )
        scene.ask(f"PUT /leases/drains-{number}", '{"among":[1],"owner":"ada"}')
        calls = (f"DELETE /leases/drains-{number}", f"GET /leases/drains-{number}", "GET /pool", "GET /leases")
        requests = [make_request(call, b"", ()) for call in calls]
        with Connection(server) as connection:
            connection.socket.sendall(b"".join(requests))
            answers = [scene.receive(connection, request) for request in requests]
        if all('"state":"draining"' in answer for answer in answers[1:]):
            return
    raise AssertionError("no GPU was seen while it drained")


def play_end(scene: Scene, stream: Stream) -> None:
    """The leases end, one after the other; after each its GPU has been looked at again."""
    scene.ask("DELETE /leases/one")
    scene.ask("GET /leases/waits?wait_s=20")
    stream.until(b'"kind":"granted","lease_id":"waits"')
    scene.ask("DELETE /leases/one")
    scene.ask("GET /leases/one")
    scene.ask("PUT /leases/one", CALLS["granted"][0])
    scene.ask("POST /leases/renew", '{"ids":["one","waits"]}')
    scene.ask("DELETE /leases/asks")
    scene.ask("GET /leases/asks?devices=uuid")
    scene.ask("POST /admin/leases/waits/revoke")
    stream.until(b"event: gpu_drained")
    scene.ask("POST /admin/leases/waits/revoke")
    scene.ask("POST /leases/renew", '{"ids":["waits"]}')
    scene.ask("POST /admin/gpus/0/drain", '{"reason":"bad fan"}')
    scene.ask("POST /admin/gpus/1/drain")
    scene.ask("POST /admin/gpus/GPU-566665aa-90f9-59af-ba37-c5686db9212f/undrain")
    scene.ask("PUT /admin/ignored-processes/Xorg")
    scene.ask("PUT /admin/ignored-processes/a%2Fb%20c")
    scene.ask("PUT /admin/ignored-processes/%FF")
    scene.ask("DELETE /admin/ignored-processes/Xorg")
    scene.ask("DELETE /admin/ignored-processes/Xorg")
    for call in CALLS["looks"]:
        scene.ask(call)
    scene.ask("GET /ui/data/pool")
    scene.ask("POST /admin/gpus/0/undrain", "{}")
    scene.ask("DELETE /leases/shared-1")
    stream.until(b"event: gpu_drained")
