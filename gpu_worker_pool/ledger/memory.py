"""A journal that lives as long as the process: for a client's own pool, and for tests."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease

from .journal import History, JournalError


class MemoryJournal:
    """Keeps what every journal keeps, but not beyond the process. Of the ended leases it keeps `most_ended`.

    It is itself the place it writes to: after `close` it is opened again by `load`, as another journal would be by
    opening its file anew.
    """

    def __init__(self, most_ended: int = 10_000) -> None:
        self._events: list[DurableEvent] = []
        self._ended: dict[str, EndedLease] = {}
        self._most_ended = most_ended
        self._since_compaction = 0
        self._is_closed = False

    def load(self, most_ended: int) -> History:
        """All events, and at most so many ended leases; opens it again where it was closed."""
        self._is_closed = False
        ended = tuple(self._ended.values())
        return History(tuple(self._events), ended[max(len(ended) - most_ended, 0) :])

    def append(self, events: Sequence[DurableEvent], ended: Sequence[EndedLease]) -> None:
        """Write these, all or none."""
        checked = self._checked(events)
        self._events += checked
        self._since_compaction += len(checked)
        for lease in ended:
            self._ended.pop(lease.id, None)  # what is written anew is the latest
            self._ended[lease.id] = lease
        while len(self._ended) > self._most_ended:
            del self._ended[next(iter(self._ended))]

    def compact(self, events: Sequence[DurableEvent]) -> None:
        """Put these in the place of all events."""
        self._events = self._checked(events)
        self._since_compaction = 0

    def replace_damaged(self, events: Sequence[DurableEvent]) -> None:
        """Begin anew with these events; there is nothing here that could be damaged."""
        checked = self._checked(events)
        self._ended.clear()
        self._events = checked
        self._since_compaction = 0

    @property
    def events_since_compaction(self) -> int:
        """How many events were appended since the last compaction."""
        return self._since_compaction

    def close(self) -> None:
        """Let go of it; nothing can be written until it is loaded again."""
        self._is_closed = True

    def _checked(self, events: Sequence[DurableEvent]) -> list[DurableEvent]:
        """A copy, so that nothing has changed where one of them does not belong here."""
        if self._is_closed:
            raise JournalError("this journal is closed; load it again to go on")
        for event in events:
            if not isinstance(event, DurableEvent):
                raise ValueError(f"{type(event).__name__} is no durable event; it does not belong into a journal")  # noqa: TRY004
        return list(events)

    def __repr__(self) -> str:
        return f"<MemoryJournal: {len(self._events)} events, {len(self._ended)} ended leases>"
