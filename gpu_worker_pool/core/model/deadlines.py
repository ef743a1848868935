"""When each lease is due. Leases that are due are found without a scan of all. A lease need not have a deadline."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Deadlines:
    def __init__(self) -> None:
        self._due_at: dict[str, float] = {}
        self._sorted: list[tuple[float, str]] = []

    def set(self, id_: str, due_at: float) -> None:
        if id_ in self._due_at:
            self.drop(id_)
        self._due_at[id_] = due_at
        insort(self._sorted, (due_at, id_))

    def drop(self, id_: str) -> None:
        due_at = self._due_at.pop(id_, None)
        if due_at is not None:
            del self._sorted[bisect_left(self._sorted, (due_at, id_))]

    def due_at(self, id_: str) -> float | None:
        """The due time; None if there is none."""
        return self._due_at.get(id_)

    def due(self, now: float) -> Iterator[str]:
        """Ids that are due, longest overdue first."""
        for due_at, id_ in self._sorted:
            if due_at > now:
                return
            yield id_

    def next_due_at(self) -> float | None:
        """The earliest due time; None if there are no ids."""
        return self._sorted[0][0] if self._sorted else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deadlines) and self._due_at == other._due_at

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"<Deadlines: {len(self._sorted)} noted, next at {self.next_due_at()}>"
