"""The calls that wait for a turn. Callers take turns: many calls of one caller do not come before the first of another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

# So many calls of one caller may wait for a turn, and so many of its light heartbeats beside them. No honest caller has
# as many; more would cost memory, and only wait for each other.
MOST_OF_ONE_CALLER = 1000
# A heartbeat up to this weight passes the other calls of its caller.
LIGHT = 1


class TooManyCalls(Exception):  # noqa: N818 - a state, not a mistake
    def __init__(self, most: int) -> None:
        super().__init__(
            f"{most} calls of this caller wait for their turn already, which is the limit; ask again later."
        )


@dataclass(eq=False, slots=True)
class WaitingCall:
    """`weight` is the work that it takes. `arrived_at` is the time at which a heartbeat arrived; None for other calls."""

    weight: int
    arrived_at: float | None
    turn: asyncio.Future[None]


@dataclass(slots=True)
class _CallerLine:
    """The calls of one caller, and the work done before it is the caller's turn again."""

    after: float
    heartbeats: deque[WaitingCall] = field(default_factory=deque)
    others: deque[WaitingCall] = field(default_factory=deque)


class FairQueue:
    """The next call is one of the caller for whom least was done. A caller that has no call waiting yet has its turn at once."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _CallerLine] = {}
        self._done = 0.0

    def __len__(self) -> int:
        return sum(len(line.heartbeats) + len(line.others) for line in self._lines.values())

    def __bool__(self) -> bool:
        return bool(self._lines)

    def join(self, caller: Hashable, call: WaitingCall) -> None:
        """Put a call at the end of its caller's line; TooManyCalls if that is full."""
        line = self._lines.get(caller) or _CallerLine(self._done)
        is_light = call.arrived_at is not None and call.weight <= LIGHT
        calls = line.heartbeats if is_light else line.others
        if len(calls) >= MOST_OF_ONE_CALLER:
            raise TooManyCalls(MOST_OF_ONE_CALLER)
        calls.append(call)
        self._lines[caller] = line

    def pop(self) -> WaitingCall:
        caller, line = min(self._lines.items(), key=lambda item: item[1].after)
        call = (line.heartbeats or line.others).popleft()
        self._done = line.after
        line.after += call.weight
        if not line.heartbeats and not line.others:
            del self._lines[caller]
        return call
