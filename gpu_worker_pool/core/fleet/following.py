"""How a candidate follows the journal: in order, without gaps, and sure that it is still the same journal.

A database may fail over to a standby that was behind. Then the journal ends earlier than what a candidate knows, and
another leader may write other events at the same positions. So a candidate remembers its last events, compares what it
reads with them, and can write them again if they are missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .leadership import JournalSnapshot, StoredEvent

# So many of the last events are remembered. A standby that is further behind than this cannot be repaired from memory.
MOST_REMEMBERED = 10_000
MOST_AT_ONCE = 1_000
# A follower writes a snapshot after so many events. The leader does only if that is twice overdue.
SNAPSHOT_EVERY = 5_000


class JournalTail:
    """The last events that are known to have been written, at positions without gaps."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._events: deque[StoredEvent] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def last(self) -> int | None:
        return self._events[-1].position if self._events else None

    def at(self, position: int) -> StoredEvent | None:
        if not self._events:
            return None
        index = position - self._events[0].position
        return self._events[index] if 0 <= index < len(self._events) else None

    def note(self, stored: StoredEvent) -> int:
        """Remember an event of the journal. If another one was known at its position, what was known from there on is
        forgotten, because the journal went on without it. Return how many events that are.
        """
        known, gone = self.at(stored.position), 0
        if known is not None:
            if known.event == stored.event:
                self._events[stored.position - self._events[0].position] = stored
                return 0
            while self._events and self._events[-1].position >= stored.position:
                self._events.pop()
                gone += 1
        elif self.last is not None and stored.position != self.last + 1:
            self._events.clear()
        self._events.append(stored)
        return gone

    def after(self, head: int) -> tuple[StoredEvent, ...] | None:
        """All known events after this position; None if the first of them is forgotten."""
        last = self.last
        if last is None or last <= head:
            return ()
        if self._events[0].position > head + 1:
            return None
        return tuple(stored for stored in self._events if stored.position > head)

    def clear(self) -> None:
        self._events.clear()


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Begin again with an empty pool, the newest snapshot, and what the journal has after it."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReadEvents:
    after: int
    most: int


@dataclass(slots=True)
class Following:
    """Where a candidate is in the journal. Its pool is what the events up to `position` add up to."""

    recent: JournalTail = field(default_factory=JournalTail)
    snapshot_every: int = SNAPSHOT_EVERY
    position: int = 0
    epoch: int = 0
    # The position of the newest snapshot that is known.
    snapshot: int = 0
    reload_because: str | None = "this candidate has just started"
    # The last position at which the journal was seen to have what this candidate has.
    matched: int = 0
    # How many events that this candidate had seen in the journal are gone for good: another leader went on without them.
    gone: int = 0

    @property
    def known_head(self) -> int:
        """The last event that was seen in the journal, whatever the pool in memory has."""
        return max(self.position, self.recent.last or 0)

    def reload(self, reason: str) -> None:
        """Note that the pool in memory is not the journal's. What is remembered of the journal stays."""
        self.reload_because = reason

    def question(self, head: int, *, must_match: bool = False) -> LoadSnapshot | ReadEvents | None:
        """What to ask next to be where the journal ends; None if there is nothing to ask.

        With `must_match` it is also made sure that the event at the head is the one that this candidate knows. That is
        asked for before a take-over.
        """
        if self.reload_because is not None:
            return LoadSnapshot(self.reload_because)
        if self.position < head or (self.position > 0 and self.recent.at(self.position) is None):
            # The last event is read again, to see that it is still there; after a snapshot, to know it from then on.
            return ReadEvents(max(self.position - 1, 0), MOST_AT_ONCE)
        if must_match and self.matched < head:
            return ReadEvents(head - 1, 1)
        return None

    def loaded(self, snapshot: JournalSnapshot | None) -> None:
        """Begin again: the pool is empty, or as this snapshot says."""
        self.position = self.snapshot = self.matched = 0 if snapshot is None else snapshot.position
        if self.recent.last is not None and self.recent.last > self.position:
            self.matched = 0  # what is remembered beyond it must be compared before it is written again
        self.epoch = 0
        self.reload_because = None

    def take(self, question: ReadEvents, stored: Sequence[StoredEvent], head: int) -> tuple[StoredEvent, ...]:
        """The events to apply to the pool, in order. If the journal does not fit, none are, and the next question is
        for a snapshot. `head` is where the journal was told to end before it was read.
        """
        expected, fresh, epoch = question.after + 1, [], self.epoch
        for each in stored:
            if each.position != expected:
                break
            expected += 1
            if each.position <= self.position:
                if not self._compare(each):
                    self.gone += self.recent.note(each)
                    self.reload(f"the journal has another event at position {each.position}: commits were lost")
                    return ()
                self.matched = max(self.matched, each.position)
            elif each.epoch < epoch:
                self.reload(f"epoch {each.epoch} follows epoch {epoch} at position {each.position}")
                return ()
            else:
                epoch = each.epoch
                fresh.append(each)
        if expected == question.after + 1 and head > question.after:
            self.recent.clear()
            self.reload(f"the event at position {expected} is not there any more; a snapshot covers it")
            return ()
        for each in fresh:
            self.gone += self.recent.note(each)
        self.epoch = epoch
        self.position = max(self.position, expected - 1)
        self.matched = max(self.matched, expected - 1)
        return tuple(fresh)

    def written(self, head: int, epoch: int, events: Sequence[StoredEvent]) -> None:
        """Note what this candidate itself wrote as the leader; its pool has it already."""
        for each in events:
            self.recent.note(each)
        self.position = self.matched = head
        self.epoch = epoch

    def missing(self, head: int) -> tuple[StoredEvent, ...] | None:
        """What the database lost after `head`, to be written again; None if not all of it is remembered."""
        return self.recent.after(head)

    def rewind(self, head: int) -> None:
        """Note that the journal ends here, and that what came after is being written again. The pool has it already."""
        self.position = head

    def forget(self, reason: str) -> None:
        """Give up what the database lost: the journal is the truth."""
        self.recent.clear()
        self.reload(reason)

    def doubt(self) -> None:
        """Compare again before the next take-over or snapshot: the journal may have gone on differently meanwhile."""
        self.matched = 0

    def is_snapshot_due(self, head: int, *, is_leader: bool) -> bool:
        """Whether to write a snapshot of the pool at `position`. Never of a pool that the journal does not have: the
        journal may go on differently from there.
        """
        if self.reload_because is not None or self.position > head or self.matched < self.position:
            return False
        return self.position - self.snapshot >= self.snapshot_every * (2 if is_leader else 1)

    def snapshot_known(self, position: int) -> None:
        self.snapshot = max(self.snapshot, position)

    def _compare(self, stored: StoredEvent) -> bool:
        known = self.recent.at(stored.position)
        if known is None and stored.position == self.position:
            self.recent.note(stored)
            return True
        return known is not None and known.event == stored.event
