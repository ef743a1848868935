"""The loads that benchmarks/serving puts on a server: what stands still for a moment is seen."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from benchmarks.serving.load import Answered, as_many_as_it_takes, at_a_steady_rate, run_on_time
from benchmarks.shared.rounds import percentile

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
BROKEN = b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nno"
PATHS = ["/a", "/b", "/c"]


class Answering(asyncio.Protocol):
    """Gives the same answer to whatever comes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, _: bytes) -> None:
        self.transport.write(self._answer)


@contextmanager
def server(answer: bytes = OK, *, stalls_s: float = 0.0, every_s: float = 0.35) -> Iterator[int]:
    """Its port. It answers from an event loop of its own, which stands still for that long again and again."""
    port: Future[int] = Future()
    stop: Future[Callable[[], object]] = Future()

    async def serve() -> None:
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        made: list[Answering] = []

        def accept() -> Answering:
            made.append(Answering(answer))
            return made[-1]

        def stall() -> None:
            time.sleep(stalls_s)
            loop.call_later(every_s - stalls_s, stall)

        listening = await loop.create_server(accept, "127.0.0.1", 0)
        if stalls_s:
            stall()
        stop.set_result(lambda: loop.call_soon_threadsafe(end.set))
        port.set_result(listening.sockets[0].getsockname()[1])
        await end.wait()
        listening.close()
        for one in made:
            one.transport.abort()
        await asyncio.sleep(0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield port.result()
    finally:
        stop.result()()
        thread.join()


def late(answered: list[Answered]) -> int:
    return sum(one.latency_s > 0.02 for one in answered)


def test_a_server_that_stands_still_now_and_then_is_seen_at_a_steady_rate() -> None:
    with server() as smooth, server(stalls_s=0.05) as stalling:
        found = run_on_time(at_a_steady_rate({"smooth": smooth, "stalling": stalling}, PATHS, 200, 0.7, 1))

    # 50 ms of every 350: of what is due in them, the first 30 wait for 20 or more, and not only who was sent last.
    assert late(found["stalling"]) >= 0.05 * len(found["stalling"])
    assert late(found["stalling"]) > late(found["smooth"])
    assert percentile([one.latency_s for one in found["stalling"]], 99) > 0.035


def test_at_a_steady_rate_each_server_is_asked_for_each_path_equally_often_and_on_time() -> None:
    with server() as one, server() as other:
        found = run_on_time(at_a_steady_rate({"one": one, "other": other}, PATHS, 300, 0.1, 2))

    for number, name in enumerate(("one", "other")):
        due = sorted((one.due_s, one.path) for one in found[name])
        assert [path for _, path in due] == PATHS * 10
        assert [due_s for due_s, _ in due] == pytest.approx([(2 * turn + number) / 600 for turn in range(30)])


def test_as_many_as_it_takes_counts_what_was_answered() -> None:
    with server() as port:
        answered, seconds = as_many_as_it_takes(port, "/a", 4, 0.05)

    assert answered >= 4
    assert seconds >= 0.05


def test_an_answer_that_is_an_error_ends_the_load() -> None:
    with server(BROKEN) as port:
        with pytest.raises(AssertionError, match="500 Oh"):
            as_many_as_it_takes(port, "/a", 2, 0.05)
        with pytest.raises(AssertionError, match="500 Oh"):
            run_on_time(at_a_steady_rate({"broken": port}, PATHS, 100, 0.02, 1))
