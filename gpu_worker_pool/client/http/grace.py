"""Asking several servers at once: one that is silent keeps no caller waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final, TypeVar

T = TypeVar("T")

# The first answer shows how slow servers are now. The others may take this number of times as long.
_RATIO: Final = 2.0
# No answer for this time means that those that answer about as quickly as the first have done so.
PAUSE_S: Final = 0.025


async def gather_with_grace(
    asked: Collection[asyncio.Task[T]],
    is_answer: Callable[[T], bool],
    grace_s: float,
    can_miss: Callable[[asyncio.Task[T]], bool] = lambda _: False,
) -> set[asyncio.Task[T]]:
    """Wait for these tasks, and return the late ones. Once the result of one is an answer, the others have `grace_s` left, or
    twice as long as that one took. The wait ends sooner if the caller `can_miss` all that are left, because it gets along
    without them or hears of them later: after `grace_s`, and once none has answered for a moment.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    waiting = set(asked)
    while waiting and not any(task.done() and is_answer(task.result()) for task in asked):
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    answered = clock()
    twice_s = _RATIO * (answered - began)
    enough, until = answered + grace_s, answered + max(grace_s, twice_s)
    while waiting and (now := clock()) < until:
        left_s = (enough if now < enough else until) - now
        done, waiting = await asyncio.wait(
            waiting, timeout=min(max(PAUSE_S, twice_s), left_s), return_when=asyncio.FIRST_COMPLETED
        )
        if (not done or clock() >= enough) and all(map(can_miss, waiting)):
            break
    return waiting
