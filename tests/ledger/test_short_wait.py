"""A call that has no task goes on as soon as its wait ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.ledger.hearing import Hearing
from gpu_worker_pool.ledger.journal import NotWritten
from gpu_worker_pool.ledger.memory import MemoryJournal
from gpu_worker_pool.ledger.short_wait import ShortWait, goes_on_at_once, wake
from gpu_worker_pool.ledger.turn import MOST_ANSWERED, TURN_S, Turn

from .test_driver import SOON_S, Clock, SlowWriter, ask, kinds, look, opened, turns


def go_on(call: Coroutine[Any, Any, None]) -> None:
    """As the server goes on with a call that has no task."""
    try:
        waiting = call.send(None)
    except StopIteration:
        return
    assert isinstance(waiting, ShortWait)
    waiting.go_on = partial(go_on, call)


async def test_a_call_without_a_task_goes_on_at_once() -> None:
    waiting, went_on = ShortWait(), []
    waiting.go_on = lambda: went_on.append(waiting.done())
    assert goes_on_at_once(waiting)

    wake(waiting)
    wake(waiting)  # it has ended

    assert went_on == [True]


async def test_it_gets_the_error() -> None:
    waiting, went_on = ShortWait(), []
    waiting.go_on = lambda: went_on.append(waiting.exception())

    wake(waiting, NotWritten("the disk is full"))

    assert [str(error) for error in went_on] == ["the disk is full"]


async def test_a_task_goes_on_after_the_turn_of_the_event_loop() -> None:
    waiting, went_on = ShortWait(), []

    async def call() -> None:
        await waiting
        went_on.append("went on")

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    assert not goes_on_at_once(waiting)
    wake(waiting)
    assert went_on == []
    await task
    assert went_on == ["went on"]


async def test_a_caller_that_has_left_is_not_woken() -> None:
    waiting = ShortWait()
    waiting.go_on = lambda: pytest.fail("it has left")
    waiting.cancel()

    wake(waiting)
    wake(waiting, NotWritten("the disk is full"))


async def test_calls_without_a_task_keep_their_order_though_each_takes_a_whole_turn() -> None:
    clock, done = Clock(), []
    turn = Turn(Hearing(clock), work_clock=clock)

    async def call(name: str) -> None:
        await turn.admit(1)
        turn.begin_work()
        clock.now += 2 * TURN_S
        turn.end_work()
        done.append(name)

    names = list("abcdefg")
    for name in names:
        go_on(call(name))
    assert done == ["a"]
    await turns(len(names))

    assert done == names


async def test_a_call_that_fails_keeps_no_other_from_its_answer() -> None:
    turn = Turn(Hearing(Clock()))
    answered: list[int] = []
    waits = [ShortWait() for _ in range(2 * MOST_ANSWERED)]
    for number, waiting in enumerate(waits):
        waiting.go_on = partial(answered.append, number)

    def fail() -> None:
        raise ZeroDivisionError

    waits[1].go_on = fail
    with pytest.raises(ZeroDivisionError):
        turn.answer(waits)
    turn.answer([])
    await turns()

    assert answered == [0, *range(2, len(waits))]


async def test_a_waiter_is_answered_before_the_call_that_released_its_gpu() -> None:
    writer, told = SlowWriter(MemoryJournal()), []
    driver = await opened(writer)
    driver.note(ask("held"))
    driver.note(ask("next"))
    await turns()
    writer.finish()
    driver.early_listeners.append(lambda _: driver.hold_writes(SOON_S))

    async def tell(name: str, work: Coroutine[Any, Any, object]) -> None:
        await work
        told.append(name)

    waiting = asyncio.create_task(tell("granted", driver.wait_while_queued("next", SOON_S)))
    await turns()
    go_on(tell("released", driver.do(cmd.Release("held"))))
    driver.note(look(at=100.0))
    driver.let_writes_go()
    writer.finish()
    await waiting
    await turns()

    assert told == ["granted", "released"]


async def test_a_listener_that_fails_keeps_nothing_from_being_written() -> None:
    writer = SlowWriter(MemoryJournal())
    driver = await opened(writer)

    def fail(_: Sequence[ev.Event]) -> None:
        raise ZeroDivisionError

    driver.late_listeners.append(fail)
    driver.note(ask("first"))
    await turns()
    second = asyncio.ensure_future(driver.do(ask("second")))
    await turns()
    with suppress(ZeroDivisionError):
        writer.finish()
    await turns()
    driver.late_listeners.clear()
    writer.finish()  # of the second, which was sent meanwhile

    assert kinds(await second) == ["LeaseQueued"]
