"""A server that says what a test wants it to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import NamedTuple


class Told(NamedTuple):
    """What to say."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = {}


class ToldServer(ThreadingHTTPServer):
    """Has a few answers, by path, and remembers what it was asked for."""

    request_queue_size = 64
    answers: dict[str, Told]
    asked: list[tuple[str, dict[str, str]]]

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ToldServer

    def do_GET(self) -> None:
        self.server.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        body, status, headers = self.server.answers.get(self.path.partition("?")[0], Told(b"{}", 404))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True  # it was too much

    def log_message(self, *_: object) -> None: ...


@contextmanager
def told_server(answers: Mapping[str, Told], host: str = "127.0.0.1") -> Iterator[ToldServer]:
    with ToldServer((host, 0), _Handler) as server:
        server.answers, server.asked = dict(answers), []
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
