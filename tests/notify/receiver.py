"""A real HTTP server that receives webhooks, and misbehaves as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any, NamedTuple


class Received(NamedTuple):
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Receiver:
    """`answers` are the statuses of the next answers, then 200; None hangs until the receiver is closed. A status of 302
    leads to `/elsewhere`.
    """

    def __init__(self, port: int, answers: list[int | None]) -> None:
        self.url = f"http://127.0.0.1:{port}/hook"
        self.answers = answers
        self.received: Queue[Received] = Queue()
        self.elsewhere = 0
        self.closing = threading.Event()

    def next(self) -> Received:
        """The next call, which comes soon."""
        return self.received.get(timeout=30)


@contextmanager
def receiver(*answers: int | None) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/elsewhere":
                found.elsewhere += 1
            status = found.answers.pop(0) if found.answers else 200
            found.received.put(Received(dict(self.headers.items()), body))
            if status is None:
                found.closing.wait(30)
                return
            self.send_response(status)
            if status == 302:
                self.send_header("Location", f"http://{self.headers['Host']}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST  # noqa: N815 - as the standard library names it

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Receiver(server.server_address[1], list(answers))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield found
    finally:
        found.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
