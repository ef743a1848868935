"""A pool for the views, over a box whose clock only the test moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.planner import FreeAt
from gpu_worker_pool.host.pauses import LoopShare
from tests.core.build import Box, expected_starts


class BoxPool:
    """Of the pool, what views need: all is written at once."""

    membership = None
    is_open = True
    trouble = None

    def __init__(self, box: Box) -> None:
        self._box = box
        self._listeners: list[Callable[[Sequence[ev.Event]], None]] = []

    @property
    def state(self) -> PoolState:
        return self._box.state

    def now(self) -> float:
        return self._box.now

    def follow(self, listener: Callable[[Sequence[ev.Event]], None]) -> None:
        self._listeners.append(listener)

    def is_written(self, _: str) -> bool:
        return True

    async def expected_starts(self, _: LoopShare) -> dict[str, FreeAt]:
        return expected_starts(self.state, self.now())

    def tell(self, events: Sequence[ev.Event]) -> None:
        for listener in self._listeners:
            listener(events)


def pool_of(box: Box) -> Any:
    return BoxPool(box)
