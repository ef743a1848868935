"""Long work in turns of the event loop."""

from __future__ import annotations

import asyncio

from gpu_worker_pool.host.pauses import OTHERS_TURNS, SLICE_S, LoopShare


async def test_others_have_turns_between_the_pieces_of_long_work() -> None:
    clock, turn, worked = [0.0], [0], list[int]()
    share = LoopShare(clock=lambda: clock[0])

    async def work() -> None:
        for _ in range(8):
            clock[0] += 0.6 * SLICE_S
            worked.append(turn[0])
            await share.yield_if_due()

    task = asyncio.ensure_future(work())
    while not task.done():
        turn[0] += 1
        await asyncio.sleep(0)
    assert worked == [1 + piece // 2 * OTHERS_TURNS for piece in range(8)]
