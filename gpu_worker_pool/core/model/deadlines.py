"""When each lease is due. A lease need not have a deadline."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf


class Deadlines:
    """Most deadlines are put off many times before they are reached. So an entry of the heap is never moved: an id that is put
    off gets a later one when its old time comes, and one that was dropped, none.
    """

    def __init__(self) -> None:
        self._due_at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        # The first entry of each id in the heap, which is not later than the time at which it is due.
        self._listed_at: dict[str, float] = {}

    def set(self, id_: str, due_at: float) -> None:
        self._due_at[id_] = due_at
        if due_at < self._listed_at.get(id_, inf):
            self._listed_at[id_] = due_at
            heappush(self._heap, (due_at, id_))

    def drop(self, id_: str) -> None:
        self._due_at.pop(id_, None)
        if len(self._heap) > 2 * len(self._due_at) + 100:  # most of it is over
            self._listed_at = dict(self._due_at)
            self._heap = [(due_at, id_) for id_, due_at in self._due_at.items()]
            heapify(self._heap)

    def due_at(self, id_: str) -> float | None:
        """The due time; None if there is none."""
        return self._due_at.get(id_)

    def due(self, now: float) -> list[str]:
        """Ids that are due, longest overdue first."""
        first = self.next_due_at()
        if first is None or first > now:
            return []
        return [id_ for _, id_ in sorted((due_at, id_) for id_, due_at in self._due_at.items() if due_at <= now)]

    def next_due_at(self) -> float | None:
        """The earliest due time; None if there are no ids."""
        while self._heap:
            listed_at, id_ = self._heap[0]
            due_at = self._due_at.get(id_)
            if due_at == listed_at:
                return due_at
            heappop(self._heap)
            if self._listed_at.get(id_) == listed_at:
                del self._listed_at[id_]
                if due_at is not None:
                    self.set(id_, due_at)
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deadlines) and self._due_at == other._due_at

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"<Deadlines: {len(self._due_at)} noted, next at {self.next_due_at()}>"
