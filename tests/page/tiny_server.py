"""A server that says what a test wants it to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class TinyServer(ThreadingHTTPServer):
    """Has a few answers, by path, and remembers what it was asked for."""

    request_queue_size = 64
    answers: dict[str, bytes]
    headers: Mapping[str, str]
    asked: list[str]

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"


class TinyHandler(BaseHTTPRequestHandler):
    server: TinyServer

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        answer = self.server.answers.get(self.path.partition("?")[0])
        self.send_response(404 if answer is None else 200)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer or b"")

    def log_message(self, *_: object) -> None: ...


@contextmanager
def tiny_server(answers: dict[str, bytes], headers: Mapping[str, str], host: str = "127.0.0.1") -> Iterator[TinyServer]:
    with TinyServer((host, 0), TinyHandler) as server:
        server.answers, server.headers, server.asked = answers, headers, []
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
