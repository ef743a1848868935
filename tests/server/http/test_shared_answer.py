"""One making for all who ask at about the same time."""

from __future__ import annotations

import asyncio

import pytest

from gpu_worker_pool.server.http.response import Refusal
from gpu_worker_pool.server.http.shared_answer import MOST_QUERIES, SharedAnswers
from tests.server.settling import settled

NEVER_S = 1000.0


class Bench:
    """Answers whose making ends when it is told to."""

    def __init__(self, pace_s: float = 0.0, *, may_be_old: bool = False) -> None:
        self.answers = SharedAnswers()
        self.making: list[asyncio.Future[bytes]] = []
        self._begun = asyncio.Event()
        self._pace_s, self._may_be_old = pace_s, may_be_old

    async def ask(self, query: object = "pool") -> asyncio.Task[bytes]:
        async def make() -> bytes:
            self.making.append(asyncio.get_running_loop().create_future())
            self._begun.set()
            return await self.making[-1]

        asked = asyncio.create_task(self.answers.get(query, make, self._pace_s, may_be_old=self._may_be_old))
        await settled()
        return asked

    async def has_begun(self, number: int) -> None:
        while len(self.making) < number:
            self._begun.clear()
            await self._begun.wait()


async def test_a_call_gets_what_was_begun_after_it_and_calls_share_that() -> None:
    bench = Bench()
    first, *late = [await bench.ask() for _ in range(3)]
    assert len(bench.making) == 1
    bench.making[0].set_result(b"first")
    assert await first == b"first"
    await bench.has_begun(2)  # after a rest of four times the work
    late[0].cancel()
    bench.making[1].set_result(b"second")
    assert await late[1] == b"second"
    assert len(bench.making) == 2


async def test_an_error_goes_to_the_calls_that_waited_and_the_next_tries_again() -> None:
    bench = Bench()
    failed = await bench.ask()
    bench.making[0].set_exception(OSError("no"))
    with pytest.raises(OSError, match="no"):
        await failed
    again = await bench.ask()
    await bench.has_begun(2)
    bench.making[1].set_result(b"yes")
    assert await again == b"yes"


async def test_between_two_makings_the_last_answer_does_where_it_may_be_old() -> None:
    bench = Bench(NEVER_S, may_be_old=True)
    asked = [await bench.ask() for _ in range(2)]
    bench.making[0].set_result(b"old")
    assert [await each for each in asked] == [b"old", b"old"], "a call while it is made shares it"
    assert await (await bench.ask()) == b"old"
    assert len(bench.making) == 1


async def test_a_server_that_stops_answers_the_calls_that_wait() -> None:
    bench = Bench(NEVER_S)
    made, rests = await bench.ask(), await bench.ask()
    bench.answers.stop()
    for asked in (made, rests, await bench.ask()):
        with pytest.raises(Refusal, match="stopping"):
            await asked


async def test_queries_without_number_are_answered_and_few_are_kept() -> None:
    bench = Bench()
    asked = [await bench.ask(number) for number in range(MOST_QUERIES + 2)]
    assert len(bench.making) == MOST_QUERIES + 2
    for each in bench.making:
        each.set_result(b"{}")
    await asyncio.gather(*asked)
