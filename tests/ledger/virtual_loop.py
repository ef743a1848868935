"""An event loop whose time passes at once: nobody waits for a timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

OutcomeT = TypeVar("OutcomeT")


class _Selector(selectors.SelectSelector):
    """Does not wait, and says that it did. Each turn of the loop takes a moment: timers ring a little too early."""

    now = 100.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        self.now += 1e-6 if ready else max(timeout or 0.0, 1e-6)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`stand_still` is a time in which the process does not run."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def stand_still(self, seconds: float) -> None:
        self._virtual.now += seconds


def run(work: Coroutine[Any, Any, OutcomeT]) -> OutcomeT:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
