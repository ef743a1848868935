"""A database with the statements of the fleet, in memory: a primary, and a standby that may be promoted while it is behind.

Each call is one statement: all of it happens at one moment, or nothing. `now` is the true time. The database's own clock
may be set back and forth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpu_worker_pool.core.fleet.leadership import (
    BEGINNING,
    LEADERSHIP_S,
    JournalEnd,
    JournalSnapshot,
    LeaderRow,
    StoredEvent,
)
from gpu_worker_pool.core.model.events import DurableEvent

# The database's clock when the true time is 0.
BEGAN_AT = 1.7e9


class Row(NamedTuple):
    epoch: int = 0
    term: str | None = None
    holder: str | None = None
    end: JournalEnd = BEGINNING
    batch: str | None = None
    expires_at: float = BEGAN_AT


@dataclass
class SimulatedDatabase:
    checks_epoch: bool = True
    checks_term: bool = True
    checks_head: bool = True
    checks_snapshot: bool = True
    checks_past: bool = True
    row: Row = field(default_factory=Row)
    events: list[StoredEvent] = field(default_factory=list)
    snapshots: list[JournalSnapshot] = field(default_factory=list)
    is_up: bool = True
    clock_offset_s: float = 0.0
    # Whether a failover lost events.
    is_history_lost: bool = False
    # What stands for the checksum of an event: no two are the same.
    crc: int = 0
    # The terms of appends and renewals that were written although another one had the leadership.
    foreign_writes: list[str] = field(default_factory=list)
    # The snapshots that say something of a future that the journal did not have.
    snapshots_ahead: list[int] = field(default_factory=list)
    claimed_at: float = 0.0
    _versions: list[tuple[float, Row, tuple[JournalSnapshot, ...]]] = field(default_factory=list)

    def wall(self, now: float) -> float:
        return BEGAN_AT + now + self.clock_offset_s

    def _commit(self, now: float, **changed: Any) -> None:
        self._versions.append((now, self.row, tuple(self.snapshots)))
        self.row = self.row._replace(**changed)

    def _told(self, now: float) -> LeaderRow:
        row, wall = self.row, self.wall(now)
        left_s = row.expires_at - wall
        # A leadership that lasts for longer than any can was written before the clock was set back.
        left_s = 0.0 if left_s > 2 * LEADERSHIP_S else left_s
        return LeaderRow(row.epoch, row.term, row.holder, None, row.end, row.batch, left_s, wall)

    # The statements

    def read_leader(self, now: float) -> LeaderRow:
        return self._told(now)

    def claim(self, now: float, term: str, holder: str, seen_epoch: int) -> LeaderRow | None:
        wall = self.wall(now)
        if wall <= self.row.expires_at <= wall + 2 * LEADERSHIP_S:
            return None
        epoch = max(self.row.epoch, seen_epoch) + 1
        self._commit(now, epoch=epoch, term=term, holder=holder, expires_at=wall + LEADERSHIP_S)
        self.claimed_at = now
        return self._told(now)

    def renew(self, now: float, epoch: int, term: str) -> LeaderRow | None:
        row, wall = self.row, self.wall(now)
        if row.epoch != epoch or (self.checks_term and row.term != term) or row.expires_at < wall:
            return None
        if row.term != term:
            self.foreign_writes.append(term)
        self._commit(now, expires_at=wall + LEADERSHIP_S)
        return self._told(now)

    def hand_over(self, now: float, epoch: int, term: str) -> None:
        if (self.row.epoch, self.row.term) == (epoch, term):
            self._commit(now, expires_at=self.wall(now) - 0.001)

    def append(
        self, now: float, epoch: int, term: str, end: JournalEnd, batch: str, events: Sequence[DurableEvent]
    ) -> JournalEnd | None:
        row = self.row
        if self.checks_epoch and (row.epoch != epoch or (self.checks_term and row.term != term)):
            return None
        if self.checks_head and row.end != end:
            return None
        if row.term != term:
            self.foreign_writes.append(term)
        new_end = row.end
        for event in events:
            self.crc += 1
            new_end = JournalEnd(new_end.position + 1, self.crc)
            self.events.append(StoredEvent(new_end, epoch, event))
        self._commit(now, end=new_end, batch=batch, expires_at=self.wall(now) + LEADERSHIP_S)
        return new_end

    def read_events(self, now: float, after: JournalEnd, most: int) -> list[StoredEvent] | None:
        """None if the journal does not go on from there."""
        pruned = self.snapshots[0].end.position if len(self.snapshots) > 1 else 0
        if after.position < pruned or (self.checks_past and not self._has(after)):
            return None
        return self.events[after.position : after.position + most]

    def _has(self, end: JournalEnd) -> bool:
        return end == BEGINNING or (end.position <= self.row.end.position and self.events[end.position - 1].end == end)

    def load_snapshot(self, now: float) -> JournalSnapshot | None:
        return self.snapshots[-1] if self.snapshots else None

    def write_snapshot(self, now: float, end: JournalEnd, events: Sequence[DurableEvent]) -> None:
        """A snapshot at an end that the journal has had, and no other one."""
        if not self._has(end):
            if self.checks_snapshot:
                return
            self.snapshots_ahead.append(end.position)
        if self.snapshots and self.snapshots[-1].end.position >= end.position:
            return
        self._versions.append((now, self.row, tuple(self.snapshots)))
        self.snapshots = [*self.snapshots[-1:], JournalSnapshot(end, tuple(events))]

    # What happens to it

    def fail_over(self, now: float, behind_s: float) -> int:
        """Promote the standby, which is so far behind; return how many events are lost."""
        while self._versions and self._versions[-1][0] > now - behind_s:
            _, self.row, snapshots = self._versions.pop()
            self.snapshots = list(snapshots)
        gone = len(self.events) - self.row.end.position
        del self.events[self.row.end.position :]
        self.is_history_lost = self.is_history_lost or gone > 0
        return gone
