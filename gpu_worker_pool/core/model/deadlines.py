"""When each lease is due. Leases that are due are found without a scan of all. A lease need not have a deadline."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Deadlines:
    """Most deadlines are put off many times before they are reached. One that is put off keeps its place in the list, and gets
    its later place when its old time comes.
    """

    def __init__(self) -> None:
        self._due_at: dict[str, float] = {}
        # The time in the list, which is not later than the time at which it is due.
        self._listed_at: dict[str, float] = {}
        self._sorted: list[tuple[float, str]] = []

    def set(self, id_: str, due_at: float) -> None:
        self._due_at[id_] = due_at
        listed_at = self._listed_at.get(id_)
        if listed_at is None or due_at < listed_at:
            self._unlist(id_)
            self._list(id_, due_at)

    def drop(self, id_: str) -> None:
        if self._due_at.pop(id_, None) is not None:
            self._unlist(id_)

    def _list(self, id_: str, due_at: float) -> None:
        self._listed_at[id_] = due_at
        insort(self._sorted, (due_at, id_))

    def _unlist(self, id_: str) -> None:
        listed_at = self._listed_at.pop(id_, None)
        if listed_at is not None:
            del self._sorted[bisect_left(self._sorted, (listed_at, id_))]

    def due_at(self, id_: str) -> float | None:
        """The due time; None if there is none."""
        return self._due_at.get(id_)

    def due(self, now: float) -> Iterator[str]:
        """Ids that are due, longest overdue first."""
        for due_at, id_ in self._in_order():
            if due_at > now:
                return
            yield id_

    def next_due_at(self) -> float | None:
        """The earliest due time; None if there are no ids."""
        return next((due_at for due_at, _ in self._in_order()), None)

    def _in_order(self) -> Iterator[tuple[float, str]]:
        """All, the earliest first. Those that were put off get their later places when they are come to."""
        place = 0
        while place < len(self._sorted):
            listed_at, id_ = self._sorted[place]
            due_at = self._due_at[id_]
            if due_at == listed_at:
                yield listed_at, id_
                place += 1
            else:
                del self._sorted[place]
                self._list(id_, due_at)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deadlines) and self._due_at == other._due_at

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"<Deadlines: {len(self._due_at)} noted, next at {self.next_due_at()}>"
