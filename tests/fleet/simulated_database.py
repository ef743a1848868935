"""A database with the statements of the fleet, in memory: a primary, and a standby that may be promoted while it is behind.

Each call is one statement: all of it happens at one moment, or nothing. `now` is the true time. The database's own clock
may be set back and forth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpu_worker_pool.core.fleet.leadership import LEADERSHIP_S, JournalSnapshot, LeaderRow, StoredEvent
from gpu_worker_pool.core.model.events import DurableEvent

# The database's clock when the true time is 0.
BEGAN_AT = 1.7e9


class Row(NamedTuple):
    epoch: int = 0
    term: str | None = None
    holder: str | None = None
    head: int = 0
    batch: str | None = None
    expires_at: float = BEGAN_AT
    instance: int = 0


@dataclass
class SimulatedDatabase:
    checks_epoch: bool = True
    checks_term: bool = True
    checks_head: bool = True
    checks_snapshot: bool = True
    row: Row = field(default_factory=Row)
    events: list[StoredEvent] = field(default_factory=list)
    snapshots: list[JournalSnapshot] = field(default_factory=list)
    is_up: bool = True
    # Another one after each failover and each restart.
    instance: int = 0
    clock_offset_s: float = 0.0
    # What a failover lost, by position, until it is written again.
    lost: dict[int, DurableEvent] = field(default_factory=dict)
    # Whether the journal went on without what was lost.
    is_history_lost: bool = False
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
        self.row = self.row._replace(instance=self.instance, **changed)

    def _told(self, now: float) -> LeaderRow:
        row, wall = self.row, self.wall(now)
        left_s, has_moved = row.expires_at - wall, row.instance != self.instance
        return LeaderRow(row.epoch, row.term, row.holder, None, row.head, row.batch, left_s, wall, has_moved)

    # The statements

    def read_leader(self, now: float) -> LeaderRow:
        return self._told(now)

    def claim(self, now: float, term: str, holder: str, seen_epoch: int) -> LeaderRow | None:
        wall = self.wall(now)
        # A leadership that lasts for longer than any can was written before the clock was set back.
        if wall <= self.row.expires_at <= wall + LEADERSHIP_S:
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
        self, now: float, epoch: int, term: str, head: int, batch: str, events: Sequence[DurableEvent]
    ) -> int | None:
        row = self.row
        if self.checks_epoch and (row.epoch != epoch or (self.checks_term and row.term != term)):
            return None
        if self.checks_head and row.head != head:
            return None
        if row.term != term:
            self.foreign_writes.append(term)
        new_head = row.head + len(events)
        self._commit(now, head=new_head, batch=batch, expires_at=self.wall(now) + LEADERSHIP_S)
        for position, event in enumerate(events, row.head + 1):
            self.events.append(StoredEvent(position, epoch, event))
            if self.lost and self.lost.pop(position, event) != event:
                self.is_history_lost = True
        return new_head

    def read_events(self, now: float, after: int, most: int) -> list[StoredEvent]:
        pruned = self.snapshots[0].position if len(self.snapshots) > 1 else 0
        return self.events[max(after, pruned) : after + most]

    def load_snapshot(self, now: float) -> JournalSnapshot | None:
        return self.snapshots[-1] if self.snapshots else None

    def write_snapshot(self, now: float, position: int, epoch: int, events: Sequence[DurableEvent]) -> None:
        """A snapshot at a position that the journal has with this epoch, and no other one."""
        if position > self.row.head or (position and self.events[position - 1].epoch != epoch):
            if self.checks_snapshot:
                return
            self.snapshots_ahead.append(position)
        if self.snapshots and self.snapshots[-1].position >= position:
            return
        self._versions.append((now, self.row, tuple(self.snapshots)))
        self.snapshots = [*self.snapshots[-1:], JournalSnapshot(position, tuple(events))]

    # What happens to it

    def restart(self) -> None:
        self.is_up = True
        self.instance += 1

    def fail_over(self, now: float, behind_s: float) -> int:
        """Promote the standby, which is so far behind; return how many events are lost."""
        self.instance += 1
        while self._versions and self._versions[-1][0] > now - behind_s:
            _, self.row, snapshots = self._versions.pop()
            self.snapshots = list(snapshots)
        gone = self.events[self.row.head :]
        del self.events[self.row.head :]
        for stored in gone:
            self.lost.setdefault(stored.position, stored.event)
        return len(gone)
