"""How many `GET /gpu/summary` a second our server answers, beside a bare ASGI handler under uvicorn that sends the same bytes.

The load comes from this process: 64 keep-alive connections, each of which asks again when it was answered.
"""

from __future__ import annotations

import selectors
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.figures import Results, compare, in_turn, parser
from benchmarks.processes import pool_server, running, wait_until

CONNECTIONS = 64
ASK = b"GET /gpu/summary HTTP/1.1\r\nHost: localhost\r\n\r\n"
GPUS = 8
BARE = """
BODY = {body!r}
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(BODY)).encode())]
async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({{"type": message["type"] + ".complete"}})
            if message["type"] == "lifespan.shutdown":
                return
    await send({{"type": "http.response.start", "status": 200, "headers": HEADERS}})
    await send({{"type": "http.response.body", "body": BODY}})
"""


def answers_a_second(port: int, seconds: float) -> float:
    """Return how many requests were answered a second, by as many connections at once."""
    with ExitStack() as held, selectors.DefaultSelector() as ready:
        received: dict[socket.socket, bytes] = {}
        for _ in range(CONNECTIONS):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            received[connection] = b""
            ready.register(connection, selectors.EVENT_READ)
            connection.sendall(ASK)
        answered = 0
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            for key, _ in ready.select(began + seconds - now):
                connection = key.fileobj  # type: ignore[assignment]
                received[connection] += connection.recv(65536)
                if is_whole(received[connection]):
                    answered += 1
                    received[connection] = b""
                    connection.sendall(ASK)
        return answered / (time.monotonic() - began)


def is_whole(received: bytes) -> bool:
    """Return whether this is a whole answer. RuntimeError if it is not a 200."""
    head, separator, body = received.partition(b"\r\n\r\n")
    if not separator:
        return False
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the server answered: {head.decode(errors='replace')}")
    length = head.lower().split(b"content-length:")[1].split(b"\r\n")[0]
    return len(body) >= int(length)


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def main() -> None:
    options = parser(__doc__).parse_args()
    seconds, rounds = (0.2, 1) if options.quick else (1.5, 6)
    results = Results("serving")
    with tempfile.TemporaryDirectory() as name, pool_server(Path(name) / "ours", str(GPUS)) as ours:
        folder = Path(name)
        (folder / "bare.py").write_text(BARE.format(body=ours.ask("/gpu/summary").body), encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = int(taken.getsockname()[1])
        command = [sys.executable, "-m", "uvicorn", "bare:app", "--app-dir", name, "--port", str(port)]
        with running([*command, "--no-access-log", "--log-level", "warning"], folder / "log"):
            wait_until(lambda: is_listening(port), "uvicorn listens")
            found = in_turn(
                {
                    "ours": lambda: answers_a_second(ours.port, seconds),
                    "bare ASGI": lambda: answers_a_second(port, seconds),
                },
                rounds,
            )
    if len(found) == 2:
        results.add("summary_bare", compare(found["ours"], found["bare ASGI"], "a second", "bare ASGI"))
    else:
        results.leave_out("summary_bare", "a server failed; the error is in the output of the run")
    results.finish(options)


if __name__ == "__main__":
    main()
