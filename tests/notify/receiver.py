"""Real servers that receive notices, by HTTP and by mail, and misbehave as they are told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from socketserver import BaseServer, StreamRequestHandler, ThreadingTCPServer
from typing import Any, NamedTuple


class Received(NamedTuple):
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def title(self) -> str:
        return str(self.json["title"])

    @property
    def details(self) -> dict[str, str]:
        """The text, line by line."""
        return dict(line.split(": ", 1) for line in self.json["message"].splitlines())


class Receiver:
    """`answers` are the statuses of the next answers, then 200; None hangs until the receiver is closed."""

    def __init__(self, port: int, answers: list[int | None]) -> None:
        self.port = port
        self.url = f"json://127.0.0.1:{port}/hook"
        self.answers = answers
        self.received: Queue[Received] = Queue()
        self.closing = threading.Event()

    def next(self) -> Received:
        """The next call, which comes soon."""
        return self.received.get(timeout=60)


@contextmanager
def receiver(*answers: int | None) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = found.answers.pop(0) if found.answers else 200
            found.received.put(Received(dict(self.headers.items()), body))
            if status is None:
                found.closing.wait(60)
                return
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Receiver(server.server_address[1], list(answers))
    with _serving(server):
        try:
            yield found
        finally:
            found.closing.set()


class Mail(NamedTuple):
    recipients: list[str]
    message: EmailMessage


@contextmanager
def mail_server() -> Iterator[tuple[int, Queue[Mail]]]:
    """The port of a server that takes every mail, and what it took."""
    received: Queue[Mail] = Queue()

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            recipients: list[str] = []
            for line in self.rfile:
                verb = line[:4].upper()
                if verb == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    lines = iter(self.rfile.readline, b".\r\n")
                    message = message_from_bytes(b"".join(lines), _class=EmailMessage, policy=policy.default)
                    received.put(Mail(recipients, message))
                elif verb == b"RCPT":
                    recipients.append(line.partition(b"<")[2].partition(b">")[0].decode())
                self.wfile.write(b"221 bye\r\n" if verb == b"QUIT" else b"250 well\r\n")
                if verb == b"QUIT":
                    return

    server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
    with _serving(server):
        yield server.server_address[1], received


@contextmanager
def _serving(server: BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
