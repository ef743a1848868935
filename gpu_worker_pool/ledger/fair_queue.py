"""The calls that wait for a turn. Callers take turns: many calls of one caller do not come before the first of another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf

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
class _Line:
    """The calls of one caller, and the work done before it is the caller's turn again."""

    after: float
    heartbeats: deque[WaitingCall] = field(default_factory=deque)
    others: deque[WaitingCall] = field(default_factory=deque)


class FairQueue:
    """The next call is one of the caller for whom least was done. A caller that has no call waiting yet has its turn at once."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._done = 0.0

    def __len__(self) -> int:
        return sum(len(line.heartbeats) + len(line.others) for line in self._lines.values())

    def __bool__(self) -> bool:
        return bool(self._lines)

    def join(self, caller: Hashable, call: WaitingCall) -> None:
        """Put a call at the end of its caller's line; TooManyCalls if that is full."""
        line = self._lines.get(caller) or _Line(self._done)
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


class UnheardHeartbeats:
    """The heartbeats that arrived and are not carried out yet, in the order in which they arrived."""

    def __init__(self) -> None:
        self._arrived_at: dict[WaitingCall, float] = {}

    def add(self, call: WaitingCall) -> None:
        if call.arrived_at is not None:
            self._arrived_at[call] = call.arrived_at

    def discard(self, call: WaitingCall) -> None:
        self._arrived_at.pop(call, None)

    @property
    def since(self) -> float:
        """When the first of them arrived; infinity if there is none."""
        return next(iter(self._arrived_at.values()), inf)
