"""How a candidate follows the journal: in order, without gaps, and sure that it is still the same journal.

A database may fail over to a standby that was behind. Then the journal ends earlier than what a candidate knows, and
another leader may write other events at the same positions. The checksum of the journal's end tells. The candidate then reads
the journal again from its snapshot: the journal is the truth, and the boxes bring back the leases that they keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .leadership import BEGINNING, JournalEnd, JournalSnapshot, StoredEvent

MOST_AT_ONCE = 1_000
# A follower writes a snapshot after this many events. The leader does only if that is twice overdue.
SNAPSHOT_EVERY = 5_000


@dataclass(slots=True)
class Following:
    """Where a candidate is in the journal. Its pool is what the events up to `end` add up to."""

    snapshot_every: int = SNAPSHOT_EVERY
    end: JournalEnd = BEGINNING
    epoch: int = 0
    # The position of the newest snapshot that is known.
    snapshot: int = 0
    reload_because: str | None = "this candidate has just started"

    def reload(self, reason: str) -> None:
        """Note that the pool in memory is not the journal's."""
        self.reload_because = reason

    def is_behind(self, end: JournalEnd) -> bool:
        """Whether there is something to read to be at this end, or beyond it."""
        return self.reload_because is not None or self.end.position < end.position

    def misses(self, end: JournalEnd) -> bool:
        """Whether a journal that ends here lacks events that this candidate knows."""
        is_behind = end.position < self.end.position
        return self.reload_because is None and (is_behind or (end.position == self.end.position and end != self.end))

    def loaded(self, snapshot: JournalSnapshot | None) -> None:
        """Begin again: the pool is empty, or as this snapshot says."""
        self.end = BEGINNING if snapshot is None else snapshot.end
        self.snapshot = self.end.position
        self.epoch = 0
        self.reload_because = None

    def take(self, stored: Sequence[StoredEvent]) -> None:
        """Note events that were read after `end`, or written by this candidate. They go to the pool."""
        if stored:
            self.end, self.epoch = stored[-1].end, stored[-1].epoch

    def written(self, end: JournalEnd, epoch: int) -> None:
        """Note where the journal ends after this candidate itself has written; its pool has that already."""
        self.end, self.epoch = end, epoch

    def is_snapshot_due(self, *, is_leader: bool) -> bool:
        """Whether to write a snapshot of the pool at `end`."""
        if self.reload_because is not None:
            return False
        return self.end.position - self.snapshot >= self.snapshot_every * (2 if is_leader else 1)

    def snapshot_known(self, position: int) -> None:
        self.snapshot = max(self.snapshot, position)
