"""Two loads on a server: as many requests as it takes, and a fixed number of requests a second.

The first measures how many it answers. It says little about a server that stops for a moment: a client that asks only
after it was answered does not ask during the stop. The second asks at times fixed in advance, and counts from those.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.leases.locks import size_of_answer

LATE_S = 60.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Answered:
    """One request: when it was due, counted from the start of the load, and how long after that the answer came."""

    path: str
    due_s: float
    latency_s: float


class Line(asyncio.Protocol):
    """One keep-alive connection. Requests that are made while it waits for an answer are sent in turn."""

    def __init__(self, on_answer: Callable[[str, float], None]) -> None:
        self._on_answer = on_answer
        self._waiting: deque[tuple[str, float]] = deque()
        self._received = b""
        self.failure: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        if self._waiting and self.failure is None:
            self.failure = ConnectionError("the server closed the connection")

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            if not _is_whole(self._received):
                return
        except AssertionError as error:
            self.failure = error
            self.close()
            return
        self._received = b""
        path, due = self._waiting.popleft()
        if self._waiting:
            self._send()
        self._on_answer(path, due)

    def ask(self, path: str, due: float) -> None:
        """Send a request now, or as soon as those before it are answered."""
        self._waiting.append((path, due))
        if len(self._waiting) == 1:
            self._send()

    def close(self) -> None:
        self._transport.abort()

    def _send(self) -> None:
        self._transport.write(_request(self._waiting[0][0]))


def as_many_as_it_takes(port: int, path: str, connections: int, seconds: float) -> tuple[int, float]:
    """Return how many requests were answered and in how long. Each connection asks again as soon as it is answered.

    It does without asyncio, which takes as much of the processor as a good server, and so would be measured itself.
    """
    request = _request(path)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(connections):
            made = stack.enter_context(socket.create_connection(("127.0.0.1", port), LATE_S))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(made, selectors.EVENT_READ, made)
        received = {key.data: b"" for key in selector.get_map().values()}
        answered, busy = 0, connections
        began = time.perf_counter()
        until = began + seconds
        for made in received:
            made.sendall(request)
        while busy:
            ready = selector.select(LATE_S)
            if not ready:
                raise TimeoutError(f"no answer within {LATE_S:g} s")
            is_over = time.perf_counter() >= until
            for key, _ in ready:
                made = key.data
                data = made.recv(65536)
                if not data:
                    raise ConnectionError("the server closed the connection")
                data = received[made] + data
                received[made] = b"" if _is_whole(data) else data
                if received[made]:
                    continue
                answered += 1
                if is_over:
                    busy -= 1
                else:
                    made.sendall(request)
        return answered, time.perf_counter() - began


async def at_a_steady_rate(
    ports: Mapping[str, int], paths: Sequence[str], rate: float, seconds: float, connections: int
) -> dict[str, list[Answered]]:
    """Send `rate` requests a second to each server, at the same time but at different moments; the paths take turns.

    A request is counted from when it was due, whether or not the server, or this program, was ready for it then.
    """
    found: dict[str, list[Answered]] = {name: [] for name in ports}
    total = round(rate * seconds) * len(ports)
    missing = total
    all_here = asyncio.Event()

    def collector(name: str) -> Callable[[str, float], None]:
        def collect(path: str, due: float) -> None:
            nonlocal missing
            found[name].append(Answered(path, due - began, time.perf_counter() - due))
            missing -= 1
            if not missing:
                all_here.set()

        return collect

    lines = {name: await _connect(port, connections, collector(name)) for name, port in ports.items()}
    every = [line for some in lines.values() for line in some]
    names = list(ports)
    try:
        began = time.perf_counter()
        for number in range(total):
            due = began + number / (rate * len(names))
            delay_s = due - time.perf_counter()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            turn, place = divmod(number, len(names))
            lines[names[place]][turn % connections].ask(paths[turn % len(paths)], due)
        await _wait_for(all_here, every)
    finally:
        for line in every:
            line.close()
        await asyncio.sleep(0)  # the loop closes them in its next turn
    return found


def run_on_time(main: Coroutine[Any, Any, _T]) -> _T:
    """Run like asyncio.run, but with select(), which wakes up within microseconds; epoll counts whole milliseconds."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(main)


def _request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def _is_whole(received: bytes) -> bool:
    """Whether the whole answer has come. An answer other than 200 is an error."""
    size = size_of_answer(received)
    if size is None or len(received) < size:
        return False
    assert received.startswith(b"HTTP/1.1 200"), received
    return True


async def _connect(port: int, connections: int, on_answer: Callable[[str, float], None]) -> list[Line]:
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Line(on_answer), "127.0.0.1", port) for _ in range(connections)]
    return [line for _, line in made]


async def _wait_for(done: asyncio.Event, lines: Sequence[Line]) -> None:
    """Wait for the event, but no longer than until a connection fails."""
    deadline = time.perf_counter() + LATE_S
    while not done.is_set():
        for line in lines:
            if line.failure is not None:
                raise line.failure
        if time.perf_counter() > deadline:
            raise TimeoutError(f"no answer within {LATE_S:g} s")
        try:
            await asyncio.wait_for(done.wait(), 0.5)
        except TimeoutError:
            continue
