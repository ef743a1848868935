"""A journal in memory: for a client's own pool, and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease

from .journal import History, JournalError


class MemoryJournal:
    """Keeps events and `most_ended` ended leases for the life of the process. After `close`, `load` opens it again."""

    def __init__(self, most_ended: int = 10_000) -> None:
        self._events: list[DurableEvent] = []
        self._ended: dict[tuple[str, float], EndedLease] = {}
        self._most_ended = most_ended
        self._since_compaction = 0
        self._is_closed = False
        self.pool_id = token_hex(8)

    def load(self, most_ended: int) -> History:
        self._is_closed = False
        ended = tuple(self._ended.values())
        return History(tuple(self._events), ended[max(len(ended) - most_ended, 0) :])

    def append(self, events: Sequence[DurableEvent], ended: Sequence[EndedLease]) -> None:
        checked = self._checked(events)
        self._events += checked
        self._since_compaction += len(checked)
        for lease in ended:
            key = (lease.id, lease.requested_at)
            self._ended.pop(key, None)  # moves to the end, as the latest
            self._ended[key] = lease
        while len(self._ended) > self._most_ended:
            del self._ended[next(iter(self._ended))]

    def compact(self, events: Sequence[DurableEvent]) -> None:
        self._events = self._checked(events)
        self._since_compaction = 0

    def replace_damaged(self, events: Sequence[DurableEvent]) -> None:
        self.compact(events)
        self._ended.clear()

    @property
    def events_since_compaction(self) -> int:
        return self._since_compaction

    @property
    def bytes_since_compaction(self) -> int:
        return 0  # it keeps objects, not texts

    def close(self) -> None:
        self._is_closed = True

    def _checked(self, events: Sequence[DurableEvent]) -> list[DurableEvent]:
        """Return a copy; raises before anything has changed."""
        if self._is_closed:
            raise JournalError("this journal is closed; load it again to go on")
        for event in events:
            if not isinstance(event, DurableEvent):
                raise ValueError(f"{type(event).__name__} is not a durable event; it does not belong in a journal")  # noqa: TRY004
        return list(events)

    def __repr__(self) -> str:
        return f"<MemoryJournal: {len(self._events)} events, {len(self._ended)} ended leases>"
