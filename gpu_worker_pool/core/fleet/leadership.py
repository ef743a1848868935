"""What the database of a fleet says about the leadership and about the history."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker_pool.core.model.events import DurableEvent

# How long a claim, a renewal or an append keeps the leadership, by the database's clock.
LEADERSHIP_S = 3.0


@dataclass(frozen=True, slots=True)
class LeaderRow:
    """The leadership at one moment, by the database's own clock.

    `head` is the position of the last event, and `batch` the id of the last append. `term` is random and made by the
    candidate for each claim. Nobody leads if `expires_in_s` is 0 or less. `wall_now` is in seconds since 1970. `has_moved`:
    the database failed over, or was restarted, since its leader last wrote; it may have lost commits.
    """

    epoch: int
    term: str | None
    holder: str | None
    url: str | None
    head: int
    batch: str | None
    expires_in_s: float
    wall_now: float
    has_moved: bool = False


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event, its position in the journal (the first is 1), and the epoch of the leader that wrote it."""

    position: int
    epoch: int
    event: DurableEvent


@dataclass(frozen=True, slots=True)
class JournalSnapshot:
    """What all events up to and including this position add up to."""

    position: int
    events: tuple[DurableEvent, ...]
