"""What the database of a fleet says about the leadership and about the journal, and what follows for an append and for the clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.state import PoolState

# How long a claim, a renewal or an append keeps the leadership, by the database's clock.
LEADERSHIP_S = 3.0


class JournalEnd(NamedTuple):
    """Where a journal ends, or a reader is in it: the position of the last event, and the checksum of all events up to it.

    Two journals with the same end are the same. A database that lost commits and was written again has another checksum at
    the same position.
    """

    position: int
    crc: int


BEGINNING = JournalEnd(0, 0)


@dataclass(frozen=True, slots=True)
class LeaderRow:
    """The leadership at one moment, by the database's own clock.

    `end` is where the journal ends, and `batch` the id of the last append. `term` is random and made by the candidate for
    each claim. Nobody leads if `expires_in_s` is 0 or less. `wall_now` is in seconds since 1970.
    """

    epoch: int
    term: str | None
    holder: str | None
    url: str | None
    end: JournalEnd
    batch: str | None
    expires_in_s: float
    wall_now: float


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event, the epoch of the leader that wrote it, and where the journal ended with it. The first position is 1."""

    end: JournalEnd
    epoch: int
    event: DurableEvent


@dataclass(frozen=True, slots=True)
class JournalSnapshot:
    """What all events up to this end add up to."""

    end: JournalEnd
    events: tuple[DurableEvent, ...]


# --- what became of an append ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append:
    """An append as it was sent: `count` events after `end`, under an id of its own."""

    epoch: int
    term: str
    end: JournalEnd
    batch: str
    count: int


@dataclass(frozen=True, slots=True)
class Deposed:
    """This leader may write nothing more. It steps down; `reason` says why."""

    reason: str


def judge_append(append: Append, row: LeaderRow) -> JournalEnd | Deposed | None:
    """Tell from the leader's row, read after the append was refused or its answer was lost, what became of it: the end of
    the journal with it, or None if nothing of it is there. Then it may be tried again, with the same id after the same end.

    While the outcome is unknown, the append may still be carried out later. That is harmless: it can be written only once,
    because it moves the end that it is compared with.
    """
    if row.epoch < append.epoch:
        return Deposed(f"the database lost the claim of epoch {append.epoch}; it is at epoch {row.epoch} again")
    if (row.epoch, row.term) != (append.epoch, append.term):
        return Deposed(f"{row.holder or 'another candidate'} leads in epoch {row.epoch}")
    if row.batch == append.batch and row.end.position == append.end.position + append.count:
        return row.end
    if row.end == append.end:
        return None
    if row.end.position > append.end.position:
        was = f"the journal ends at event {row.end.position} instead of {append.end.position}"
        return Deposed(f"{was}, and this leader did not write that")
    return Deposed(why_lost(row.end, append.end))


def why_lost(end: JournalEnd, written: JournalEnd) -> str:
    """What a candidate says that finds another end than the one that it knows."""
    return (
        f"the database lost commits: its journal ends at event {end.position}, and event {written.position} was written. The "
        "boxes bring back the leases that they keep; requests that waited must be made again. A synchronous standby "
        "loses nothing"
    )


def has_lost_commits(row: LeaderRow, epoch: int, term: str, written: JournalEnd) -> bool:
    """Whether the database lost commits of this leader. `written` is the end that the leader knew when it *asked* for
    this row: answers may overtake each other.
    """
    return (row.epoch, row.term) == (epoch, term) and row.end.position < written.position


def clock_base(state: PoolState, *, boot_id: str, boot_now: float, wall_now: float) -> float:
    """The base with which a driver takes over: the pool's clock is the boot clock of the driver's machine, plus a base. It never
    goes back, and goes on when another boot or another machine takes over. `boot_now` is its boot clock, `wall_now` the time of day.

    A new boot goes on where the clock was, plus the time that has passed since by the time of day. A time of day that
    was set back counts as no time.
    """
    if state.boot_id is None:
        return 0.0
    if state.boot_id == boot_id:
        return state.clock_base
    return max(state.clock, wall_now - state.wall_offset_s) - boot_now
