"""Much short work in turns of the event loop."""

from __future__ import annotations

import asyncio

from gpu_worker_pool.server.http.loop_share import TurnShare


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
