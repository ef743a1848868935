"""What every journal promises, whatever it writes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease


class JournalError(Exception):
    """The journal cannot be written or read; the message says why and what to do."""


class JournalInUse(JournalError):  # noqa: N818 - a state of affairs, not a mistake
    """Another process writes this journal; `pid` is its, where it is known."""

    def __init__(self, message: str, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid


class JournalDamaged(JournalError):  # noqa: N818 - a state of affairs, not a mistake
    """What was written cannot be read any more."""


@dataclass(frozen=True, slots=True)
class History:
    """What a journal holds: the events in order, and of the leases that ended those that ended last, oldest first.

    The events of an ended lease may have been compacted away; what it came to is kept.
    """

    events: tuple[DurableEvent, ...] = ()
    ended: tuple[EndedLease, ...] = ()


class Journal(Protocol):
    """Keeps events in order. All calls block; none is made from two threads at once.

    A call that raises JournalError has changed nothing, and may be made again.
    """

    def load(self, most_ended: int) -> History:
        """All events, and at most so many ended leases."""
        ...

    def append(self, events: Sequence[DurableEvent], ended: Sequence[EndedLease]) -> None:
        """Write these, all or none: once this returns they are there after a crash of the process (and, at full
        durability, of the machine). `ended` are the leases that ended by these events, for the accounting; one that is there
        already is replaced.
        """
        ...

    def compact(self, events: Sequence[DurableEvent]) -> None:
        """Put these in the place of all events, all or none. What is known of ended leases stays."""
        ...

    def replace_damaged(self, events: Sequence[DurableEvent]) -> None:
        """Set what is damaged aside, where nobody will overwrite it, and begin anew with these events."""
        ...

    @property
    def events_since_compaction(self) -> int:
        """How many events were appended since the last compaction (or ever, where there was none)."""
        ...

    def close(self) -> None:
        """Let go of it, so that somebody else may open it. Closing twice is harmless."""
        ...
