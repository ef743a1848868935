"""How long the others are waited for when one server has answered. The loop's time is virtual: no test waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Sequence
from typing import Any

import pytest

from gpu_worker_pool.client.http.grace import PAUSE_S, gather_with_grace

GRACE_S = 0.1
NEVER = float("inf")
DOWN, UP = False, True


class VirtualLoop(asyncio.SelectorEventLoop):
    """Goes on to the next timer at once, when there is nothing to do until then."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(JumpingSelector(self))

    def time(self) -> float:
        return self.now


class JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is left to wait for"
        self._loop.now += timeout
        return super().select(0)


def waited(answers: Sequence[tuple[float, bool]], *, can_miss: Sequence[bool]) -> tuple[float, list[int]]:
    """Return how long these answers, each after so many seconds, are waited for, and which were late."""

    async def answer(after_s: float, is_up: bool) -> bool:
        await (asyncio.Event().wait() if after_s == NEVER else asyncio.sleep(after_s))
        return is_up

    async def wait() -> tuple[float, list[int]]:
        asked = [asyncio.create_task(answer(*each), name=str(number)) for number, each in enumerate(answers)]
        late = await gather_with_grace(asked, bool, GRACE_S, lambda task: can_miss[int(task.get_name())])
        took_s = round(asyncio.get_running_loop().time(), 6)
        for task in late:
            task.cancel()
        return took_s, sorted(int(task.get_name()) for task in late)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(wait())


@pytest.mark.parametrize(
    ("answers", "took_s", "late"),
    [
        pytest.param([(0.01, UP), (0.02, UP)], 0.02, [], id="all answer"),
        pytest.param([(0.01, UP), (NEVER, UP)], 0.01 + PAUSE_S, [1], id="one is silent"),
        pytest.param([(0.01, UP), (0.03, UP), (0.05, UP), (NEVER, UP)], 0.05 + PAUSE_S, [3], id="answers keep coming"),
        pytest.param([(0.01 * n, UP) for n in range(1, 20)], 0.01 + GRACE_S, list(range(11, 19)), id="for too long"),
        pytest.param([(0.05, UP), (0.14, UP), (NEVER, UP)], 0.15, [2], id="all are slow"),
        pytest.param([(0.2, UP), (0.25, UP), (0.35, UP)], 0.2 + GRACE_S, [2], id="all are slower still"),
        pytest.param([(0.001, DOWN), (0.03, UP), (NEVER, UP)], 0.03 + 0.06, [2], id="an error is not an answer"),
        pytest.param([(0.01, DOWN), (0.5, DOWN)], 0.5, [], id="none is up"),
    ],
)
def test_servers_that_can_be_missed_are_waited_for_while_others_answer(
    answers: list[tuple[float, bool]], took_s: float, late: list[int]
) -> None:
    assert waited(answers, can_miss=[True] * len(answers)) == (round(took_s, 6), late)


def test_servers_that_cannot_be_missed_have_all_of_the_time() -> None:
    answers = [(0.01, UP), (0.06, UP), (NEVER, UP)]
    assert waited(answers, can_miss=[False] * 3) == (0.11, [2])
    assert waited([(0.2, UP), (0.35, UP), (NEVER, UP)], can_miss=[False] * 3) == (0.6, [2])
    # The silent one can be missed, and the other one has answered.
    assert waited(answers, can_miss=[False, False, True]) == (0.085, [2])
