"""One making for all who ask at about the same time, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import gzip
from typing import Any

import pytest

from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.shared_answer import SharedAnswer
from gpu_worker_pool.server.ui.data import SMALL_BYTES, Body
from tests.server.settling import settled

PACE_S = 2.0


class Bench:
    """A shared answer whose making ends when it is told to, on a clock that goes when it is told to."""

    def __init__(self, *, may_be_old: bool = False) -> None:
        self.now = 100.0
        self.worked_s = 0.0
        self.begun = 0
        self._making: list[asyncio.Future[bytes]] = []
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []
        self.answer = SharedAnswer(
            self._make,
            PACE_S,
            may_be_old=may_be_old,
            clock=lambda: self.now,
            work_clock=lambda: self.worked_s,
            sleep=self._sleep,
        )

    async def _make(self) -> bytes:
        self.begun += 1
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._making.append(future)
        return await future

    async def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.append((self.now + seconds, future))
        await future

    async def ask(self) -> asyncio.Task[bytes]:
        task = asyncio.create_task(self.answer.get())
        await settled()
        return task

    async def end(self, outcome: bytes | Exception = b"{}") -> None:
        """The making that runs ends like this."""
        self.finish(outcome)
        await settled()

    def finish(self, outcome: bytes | Exception) -> None:
        future = self._making.pop()
        if isinstance(outcome, bytes):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    async def work(self, seconds: float) -> None:
        """This process does something for so long."""
        self.worked_s += seconds
        await self.pass_time(seconds)

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for until, future in self._sleeping:
            if until <= self.now and not future.done():
                future.set_result(None)
        await settled()


async def test_who_asks_before_it_is_begun_shares_it_and_who_asks_later_waits_for_the_next() -> None:
    bench = Bench()
    early = [asyncio.create_task(bench.answer.get()) for _ in range(3)]
    await settled()
    late = [await bench.ask() for _ in range(3)]
    assert bench.begun == 1
    await bench.end(b"first")
    assert {task.result() for task in early} == {b"first"}
    assert not any(task.done() for task in late), "what they would get began before they asked"

    await bench.pass_time(PACE_S)
    assert bench.begun == 2
    await bench.end(b"second")
    assert {task.result() for task in late} == {b"second"}
    assert len({id(task.result()) for task in late}) == 1


async def test_one_that_left_keeps_none_waiting() -> None:
    bench = Bench()
    waiting = [asyncio.create_task(bench.answer.get()) for _ in range(3)]
    await settled()
    waiting[0].cancel()
    await bench.end(b"{}")
    assert {task.result() for task in waiting[1:]} == {b"{}"}


async def test_one_begins_so_long_after_the_other_and_the_first_after_quiet_at_once() -> None:
    bench = Bench()
    await bench.ask()
    await bench.end()
    waiting = await bench.ask()
    await bench.pass_time(PACE_S - 0.1)
    assert bench.begun == 1
    await bench.pass_time(0.1)
    assert bench.begun == 2
    await bench.end()
    assert waiting.done()

    await bench.pass_time(1000.0)
    assert bench.begun == 2, "nothing is made while nobody asks"
    await bench.ask()
    assert bench.begun == 3
    await bench.end()


async def test_what_takes_long_is_made_less_often() -> None:
    bench = Bench()
    await bench.ask()
    await bench.work(1.0)
    await bench.end()
    await bench.ask()
    await bench.pass_time(2.9)
    assert bench.begun == 1
    await bench.pass_time(0.1)
    assert bench.begun == 2, "four times as long as the last one took, from its beginning"
    await bench.end()


async def test_a_server_that_stood_still_meanwhile_does_not_make_up_for_it() -> None:
    bench = Bench()
    await bench.ask()
    await bench.pass_time(1000.0)  # stopped, or without a processor: no work was done
    await bench.end()
    await bench.ask()
    assert bench.begun == 2
    await bench.end()


async def test_who_goes_away_takes_nobody_with_him() -> None:
    bench = Bench()
    leaves, stays = await bench.ask(), await bench.ask()
    first = bench.begun
    leaves.cancel()
    await settled()
    await bench.end()
    await bench.pass_time(PACE_S)
    await bench.end(b"second")
    assert (first, bench.begun) == (1, 2)
    assert leaves.cancelled()
    assert stays.result() == b"second"


async def test_what_goes_wrong_is_told_to_those_who_wait_for_it_and_not_kept(loop_errors: list[Any]) -> None:
    bench = Bench()
    together = [asyncio.create_task(bench.answer.get()) for _ in range(2)]
    alone = asyncio.create_task(bench.answer.get())
    await settled()
    alone.cancel()
    await bench.end(Refusal(503, "no disk"))
    for task in together:
        with pytest.raises(Refusal, match="no disk"):
            task.result()

    later = await bench.ask()
    later_too = await bench.ask()
    await bench.pass_time(PACE_S)
    await bench.end(b"again")
    assert later.result() is later_too.result()
    del together, alone, task
    gc.collect()
    assert loop_errors == []


async def test_an_error_that_nobody_waits_for_any_more_is_no_fault(loop_errors: list[Any]) -> None:
    bench = Bench()
    (await bench.ask()).cancel()
    await settled()
    await bench.end(RuntimeError("unheard"))
    gc.collect()
    await settled()
    assert loop_errors == []


@pytest.fixture
async def loop_errors() -> list[Any]:
    found: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


async def test_closing_leaves_nobody_waiting_and_nothing_running() -> None:
    bench = Bench()
    making, resting = await bench.ask(), await bench.ask()
    bench.answer.stop()
    await settled()
    for task in (making, resting):
        with pytest.raises(Refusal, match="stopping"):
            task.result()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("size", [10, SMALL_BYTES, SMALL_BYTES + 1, 1_000_000])
async def test_it_is_there_as_it_is_and_compressed(size: int) -> None:
    body = await Body.of(b"x" * size)
    assert (body.plain, gzip.decompress(body.gzipped)) == (b"x" * size, b"x" * size)


async def test_where_it_may_be_old_nobody_waits_for_a_new_one_within_the_pace() -> None:
    bench = Bench(may_be_old=True)
    early = await bench.ask()
    during = await bench.ask()
    await bench.end(b"first")
    after = await bench.ask()
    assert [task.result() for task in (early, during, after)] == [b"first"] * 3

    await bench.pass_time(PACE_S)
    later = await bench.ask()
    assert bench.begun == 2
    assert not later.done()
    await bench.end(b"second")
    assert later.result() == b"second"


async def test_an_error_is_not_handed_out_again_though_it_may_be_old() -> None:
    bench = Bench(may_be_old=True)
    asked = await bench.ask()
    await bench.end(b"first")
    await bench.pass_time(PACE_S)
    asked = await bench.ask()
    await bench.end(ValueError("it broke"))
    assert isinstance(asked.exception(), ValueError)
    asked = await bench.ask()
    await bench.pass_time(PACE_S)
    await bench.end(b"second")
    assert asked.result() == b"second"
