"""A journal in memory, which is written in the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.journal import History, Journal, JournalError
from gpu_worker_pool.ledger.outbox import Done, WriteBatch, is_long, write


class MemoryJournal:
    """After `close`, `load` opens it again."""

    pool_id = "0123456789abcdef"
    bytes_since_compaction = 0

    def __init__(self) -> None:
        self._events: list[DurableEvent] = []
        self._ended: dict[tuple[str, float], EndedLease] = {}
        self._since_compaction = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<MemoryJournal: {len(self._events)} events>"

    @property
    def events_since_compaction(self) -> int:
        return self._since_compaction

    def load(self, most_ended: int) -> History:
        self._is_closed = False
        ended = tuple(self._ended.values())
        return History(tuple(self._events), ended[max(len(ended) - most_ended, 0) :])

    def append(self, events: Sequence[DurableEvent], ended: Sequence[EndedLease]) -> None:
        self._check(events)
        self._events += events
        self._since_compaction += len(events)
        for lease in ended:
            key = (lease.id, lease.requested_at)
            self._ended.pop(key, None)  # moves to the end, as the latest
            self._ended[key] = lease

    def compact(self, events: Sequence[DurableEvent]) -> None:
        self._check(events)
        self._events = list(events)
        self._since_compaction = 0

    def replace_damaged(self, events: Sequence[DurableEvent]) -> None:
        self.compact(events)
        self._ended.clear()

    def close(self) -> None:
        self._is_closed = True

    def _check(self, events: Sequence[DurableEvent]) -> None:
        """Raise before anything has changed."""
        if self._is_closed:
            raise JournalError("this journal is closed; load it again to go on")
        for event in events:
            if not isinstance(event, DurableEvent):
                raise ValueError(f"{type(event).__name__} is not a durable event")  # noqa: TRY004


class InlineWriter:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def write(self, batch: WriteBatch, done: Done) -> None:
        done(batch, write(self._journal, batch))

    def is_compaction_due(self, live: int) -> bool:
        return is_long(self._journal, live)

    def close(self) -> None:
        self._journal.close()
