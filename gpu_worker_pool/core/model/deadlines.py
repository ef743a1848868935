"""When each lease is due. A lease need not have a deadline."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from math import inf


@dataclass(slots=True)
class Deadlines:
    _due_at: dict[str, float] = field(default_factory=dict)
    # The same in order.
    _order: list[tuple[float, str]] = field(default_factory=list, compare=False)

    def set(self, id_: str, due_at: float) -> None:
        self.drop(id_)
        self._due_at[id_] = due_at
        insort(self._order, (due_at, id_))

    def drop(self, id_: str) -> None:
        due_at = self._due_at.pop(id_, None)
        if due_at is not None:
            del self._order[bisect_left(self._order, (due_at, id_))]

    def due_at(self, id_: str) -> float | None:
        """The due time; None if there is none."""
        return self._due_at.get(id_)

    def due(self, now: float) -> list[str]:
        """Ids that are due, longest overdue first."""
        return [id_ for _, id_ in self._order[: bisect_right(self._order, now, key=lambda entry: entry[0])]]

    def next_due_at(self) -> float:
        """The earliest due time; infinite if there are no ids."""
        return self._order[0][0] if self._order else inf

    def __repr__(self) -> str:
        return f"<Deadlines: {len(self._due_at)} noted, next at {self.next_due_at()}>"
