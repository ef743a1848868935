"""Much short work in turns of the event loop."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from gpu_worker_pool.server.loop_share import (
    LOOP_SLICE_S,
    OTHERS_SHARE,
    BackgroundShare,
    LoopShare,
    TurnQueue,
    TurnShare,
    in_turns,
)


async def test_work_that_one_turn_has_no_time_for_is_done_in_the_next_ones_in_the_same_order() -> None:
    clock, turn = [0.0], [0]
    done: list[tuple[int, int]] = []
    share = TurnShare(1.0, lambda: clock[0])

    async def work(number: int) -> None:
        await share.turn()
        with share.work():
            clock[0] += 0.4
            done.append((turn[0], number))

    tasks = [asyncio.ensure_future(work(number)) for number in range(7)]
    for turn[0] in range(1, 5):
        await asyncio.sleep(0)

    assert [number for _, number in done] == list(range(7))
    assert [[turn for turn, _ in done].count(each) for each in (1, 2, 3)] == [3, 3, 1]
    assert all(task.done() for task in tasks)


@pytest.mark.parametrize(
    ("others_s", "turns_between", "pieces"),
    [
        (0.0, OTHERS_SHARE, 8),
        # One turn is as long as four pieces already; then a piece may be longer.
        (4 * LOOP_SLICE_S, 1, 8),
        (16 * LOOP_SLICE_S, 1, 5),
    ],
)
async def test_others_have_turns_between_the_pieces_of_long_work_and_a_busy_loop_does_not_hold_it_up(
    others_s: float, turns_between: int, pieces: int
) -> None:
    clock, turn, worked = [0.0], [0], list[int]()
    share = LoopShare(clock=lambda: clock[0])

    async def work() -> None:
        for _ in range(8):
            clock[0] += 1.2 * LOOP_SLICE_S
            worked.append(turn[0])
            await share.yield_if_due()

    task = asyncio.ensure_future(work())
    while not task.done():
        await asyncio.sleep(0)
        clock[0] += others_s
        turn[0] += 1
    begun = sorted(set(worked))
    assert {later - earlier for earlier, later in pairwise(begun)} == {turns_between}
    assert len(begun) == pieces


async def test_work_in_the_background_rests_after_each_piece_for_as_long_as_others_have() -> None:
    clock, rests = [0.0], list[float]()

    async def sleep(rest_s: float) -> None:
        rests.append(rest_s)
        clock[0] += 100.0  # what others do meanwhile is not work of its own

    share = BackgroundShare(lambda: clock[0], sleep)
    for piece in (0.4, 0.4, 0.4, 3.0, 0.9):
        clock[0] += piece * LOOP_SLICE_S
        await share.yield_if_due()
    assert rests == pytest.approx([1.2 * LOOP_SLICE_S * OTHERS_SHARE, 3.0 * LOOP_SLICE_S * OTHERS_SHARE])


async def test_many_calls_are_made_some_in_each_turn_and_in_order() -> None:
    turn, called = [0], list[tuple[int, str]]()
    in_turns(2, lambda item: called.append((turn[0], item)), "abcde")
    for turn[0] in range(1, 5):
        await asyncio.sleep(0)
    assert called == [(0, "a"), (0, "b"), (1, "c"), (1, "d"), (2, "e")]


async def test_a_queue_calls_so_many_in_each_turn_and_in_order() -> None:
    queue = TurnQueue(2)
    called: list[int] = []
    turns: list[list[int]] = []
    for number in range(5):
        queue.add(partial(called.append, number))
    for _ in range(4):
        await asyncio.sleep(0)
        turns.append(list(called))
    assert turns == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


async def test_a_queue_goes_on_after_an_error_and_with_what_is_added_meanwhile() -> None:
    queue = TurnQueue(2)
    called: list[Any] = []
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context["exception"])))

    def fail() -> None:
        queue.add(partial(called.append, "added"))
        raise ValueError("broken")

    queue.add(fail)
    queue.add(partial(called.append, "after"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert (called, told) == (["after", "added"], ["broken"])
