"""Whose turn it is in a pass over the queue.

A waiter needs a turn if it may be served, if leases may make room for it, or if GPUs may be reserved for it. While no lease is
preemptible, and no waiter is due for the reservation or one has it, only the first of these counts: then a pass goes only to
waiters for whom the indexes have a GPU to propose. A turn of another waiter would change nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import inf, nextafter
from typing import NamedTuple

from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState

from .order import Order, Place
from .placement import Survey
from .waiting import Line, QueueKey, WishFamily


class WaiterTurn(NamedTuple):
    """A waiter, and where it is among those of its line. Turns sort as the waiters are served. `family` is None if all lines
    of a family have turns.
    """

    place: Place
    line: Line
    keys: Sequence[QueueKey]
    position: int
    family: WishFamily | None

    @property
    def lease_id(self) -> str:
        return self.place[-1]


class Turns(ABC):
    """Waiters in the order in which they are served. After each of them it must be told how its turn ended."""

    def __init__(self, state: PoolState, order: Order) -> None:
        self._state = state
        self._order = order
        self._later: list[WaiterTurn] = []

    def next(self) -> WaiterTurn | None:
        return heappop(self._later) if self._later else None

    def was_served(self, turn: WaiterTurn) -> None:
        """Let the next one of the same line have its turn."""
        self._push(turn.line, turn.keys, turn.position + 1, turn.family)

    @abstractmethod
    def was_not_served(self, turn: WaiterTurn, can_serve: Callable[[Wishes], bool]) -> None:
        """Leave out the waiters that cannot be served either. `can_serve` tells what else could be, in its place."""

    def _push(self, line: Line, keys: Sequence[QueueKey], index: int, family: WishFamily | None = None) -> None:
        if index < len(keys):
            heappush(self._later, WaiterTurn(self._order.place(line, keys[index]), line, keys, index, family))


class EveryTurn(Turns):
    """The turns of all lines: of each line, those that may be served or have GPUs reserved."""

    def __init__(self, state: PoolState, order: Order) -> None:
        super().__init__(state, order)
        self._firsts: Iterator[QueueKey] = iter(())
        if state.queue.splits_owners:
            # What owners use decides, and that changes with the time.
            for line, keys in state.queue.lines.items():
                self._push(line, keys, 0)
        else:
            self._firsts = iter(state.queue.firsts)
            self._push_next_first()

    def next(self) -> WaiterTurn | None:
        turn = super().next()
        if turn is not None and turn.position == 0:
            self._push_next_first()
        return turn

    def _push_next_first(self) -> None:
        """Let the next line begin. The first waiters are in order, so one of them at a time is enough."""
        queue_key = next(self._firsts, None)
        if queue_key is not None:
            line = self._state.queue.line_of(self._state.queued(queue_key[-1]))
            self._push(line, self._state.queue.lines[line], 0)

    def was_not_served(self, turn: WaiterTurn, can_serve: Callable[[Wishes], bool]) -> None:  # noqa: ARG002 - all have turns
        """Of the others in the line, only those of a lower priority can have waited for longer; and one of them may have the
        reservation, which it keeps for a while, though no date can be told.
        """
        keys = turn.keys
        lower = bisect_left(keys, (turn.place[0], turn.place[2] + 1, 0, ""))
        self._push(turn.line, keys, min(lower, self._index_of_reserved(keys, turn.position + 1)))

    def _index_of_reserved(self, keys: Sequence[QueueKey], first: int) -> int:
        """Where in the rest of a line the waiter with the reservation is; after the last, if it is not there."""
        if self._state.reservation is None:
            return len(keys)
        lease = self._state.queued(self._state.reservation.lease_id)
        index = bisect_left(keys, (*lease.order, lease.id), first)
        return index if index < len(keys) and keys[index][-1] == lease.id else len(keys)


class HopefulTurns(Turns):
    """The turns of those for whom the indexes have a GPU to propose. `served` is how many of a line were served before."""

    def __init__(self, survey: Survey, order: Order, served: Mapping[Line, int]) -> None:
        super().__init__(survey.state, order)
        queue = survey.state.queue
        for family in queue.families:
            most_mb = survey.most_room_mb(family.lines[0].wishes)
            if queue.splits_owners:
                for line in family.within(most_mb):
                    self._push(line, queue.lines[line], served.get(line, 0))
            else:
                self._push_first(family, most_mb, served)

    def _push_first(self, family: WishFamily, most_mb: float, served: Mapping[Line, int]) -> None:
        line = family.first_within(most_mb)
        if line is not None:
            # Most often none was served before, and then a line need not be found.
            self._push(line, self._state.queue.lines[line], served.get(line, 0) if served else 0, family)

    def was_not_served(self, turn: WaiterTurn, can_serve: Callable[[Wishes], bool]) -> None:
        """Go on with those of its family that need less, if the least can be served. Where owners are not treated alike, each line
        has turns of its own.
        """
        family, memory_mb = turn.family, turn.line.wishes.memory_mb
        if family is None or memory_mb is None or family.lines[0] == turn.line:
            return
        if can_serve(family.lines[0].wishes):
            self._push_first(family, nextafter(memory_mb, -inf), {})
