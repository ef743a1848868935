"""The journal of a server in a SQLite file. See `Journal` for the contract."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.host.state_dir import reach
from gpu_worker_pool.ledger.codec import Row, checked_crc, decode_ended, decode_event, ended_row, event_rows
from gpu_worker_pool.ledger.journal import History, JournalDamaged, JournalError
from gpu_worker_pool.ledger.sql import load_queries, load_schema

from .file import Durability, SqliteFile, isolate, isolated

# Enough for years of accounting; bounds the growth.
MOST_ENDED = 1_000_000
# The file is kept to about this size by forgetting the oldest ended leases.
MOST_BYTES = 1024 * 1024 * 1024
# The oldest ended leases are forgotten in small steps, each a commit of its own: clients wait meanwhile.
PRUNED_AT_ONCE = 500
APPENDS_PER_STEP = 8

SCHEMA, SQL = load_schema(__package__), load_queries(__package__)


class SqliteJournal:
    """Opening it raises JournalInUse, JournalDamaged (the damaged file has been set aside then) or JournalError.

    A start reads the events and the last ended leases, and checks what it reads. A backup checks all of the file.
    With a `node`, the events of a journal of one box are read as events of this node, which may have had other names.
    """

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability = "full",
        node: str | None = None,
        most_ended: int = MOST_ENDED,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._durability = durability
        self._node = node
        self._most_ended = most_ended
        self._most_bytes = most_bytes
        self.pool_id = ""
        self.bytes_since_compaction = 0
        self._crc = 0
        self._compacted_to = 0
        self._appends = 0
        self._file = SqliteFile(path, SCHEMA, durability=durability, position_query=SQL["last_position"])
        try:
            with self._file.errors():
                if not self._file.path.exists():
                    self._create()
                self._open()
        except BaseException:
            self.close()
            raise

    def load(self, most_ended: int) -> History:
        """Return all events and at most this many ended leases. A damaged file is set aside; one with events that this
        version does not know is left as it is (JournalTooNew).
        """
        connection = self._file.connection()
        with self._quarantine():
            last_ended = connection.execute(SQL["read_last_ended"], (most_ended,))
            return History(read_events(connection, self._node), tuple(read_ended(last_ended)))

    def all_ended(self) -> Iterator[EndedLease]:
        """All ended leases that are recorded, oldest first."""
        with self._file.errors(is_read=True):
            yield from read_ended(self._file.connection().execute(SQL["read_all_ended"]))

    @property
    def complete_since(self) -> float | None:
        """The ended leases are complete for all that ended after this."""
        with self._file.errors(is_read=True):
            found: float | None = self._file.connection().execute(SQL["complete_since"]).fetchone()[0]
            return found

    @property
    def position(self) -> int:
        """That of the last event."""
        return self._file.position

    def append(self, events: Sequence[DurableEvent], ended: Sequence[EndedLease]) -> None:
        rows, ended_rows = event_rows(events, self._crc), [ended_row(lease) for lease in ended]
        if not rows and not ended_rows:
            return
        reach("before_append")
        with self._file.transaction(len(rows)) as connection:
            insert_events(connection, rows, self._file.position)
            connection.executemany(SQL["keep_ended"], ended_rows)
            reach("in_append")
        if rows:
            self._crc = rows[-1][1]
        self.bytes_since_compaction += sum(len(body) for body, _ in rows)
        self._appends += 1
        if self._appends % APPENDS_PER_STEP == 0:
            self._prune()
        reach("after_append")

    def compact(self, events: Sequence[DurableEvent]) -> None:
        rows = event_rows(events, 0)
        with self._file.transaction(len(rows)) as connection:
            connection.execute(SQL["delete_events"])
            insert_events(connection, rows, self._file.position)
            reach("in_compaction")
            connection.execute(SQL["note_compaction"], (self._file.position + len(rows),))
        self._crc = rows[-1][1] if rows else 0
        self._compacted_to, self.bytes_since_compaction = self._file.position, 0
        reach("after_compaction")
        self._prune()

    def replace_damaged(self, events: Sequence[DurableEvent]) -> None:
        """Set the damaged file aside and start a new one with these events; the ended leases stay in the damaged file."""
        if self._file.is_closed:
            self._file.connection()  # raises
        with self._file.errors():
            self._file.replace(lambda connection: begin(connection, events, self.pool_id, time()))
            self._open()

    @property
    def events_since_compaction(self) -> int:
        return self._file.position - self._compacted_to

    def close(self) -> None:
        self._file.close()

    def __repr__(self) -> str:
        state = "closed" if self._file.is_closed else f"{self.events_since_compaction} events since the last compaction"
        return f"<SqliteJournal {self._file.path}: {self._durability}, {state}>"

    def _create(self) -> None:
        """Create the journal at the first start; refuse after damage that no operator has dealt with yet."""
        path = self._file.path
        # A log without its database would be taken for the new database's log, and ruin it.
        if Path(f"{path}-wal").exists():
            isolate(path)
        if isolated(path):
            raise JournalDamaged(self._advice())
        self._file.replace(lambda _: None)

    def _open(self) -> None:
        with self._quarantine():
            connection = self._file.open()
            found = connection.execute(SQL["read_pool"]).fetchone()
            self.pool_id, self._compacted_to, self.bytes_since_compaction, self._crc = found

    @contextmanager
    def _quarantine(self) -> Iterator[None]:
        """While the file is opened or read: set it aside if it is damaged, so that the next start notices."""
        try:
            with self._file.errors(is_read=True):
                yield
        except JournalDamaged as error:
            with self._file.errors():
                self._file.set_aside()
            self.close()
            raise JournalDamaged(f"{error}. {self._advice()}") from error

    def _advice(self) -> str:
        path = self._file.path
        return (
            f"The damaged journal was set aside as {', '.join(map(str, isolated(path)))}. Its leases are no longer known: make "
            f"sure that no process still uses the GPUs, then move that file out of {path.parent} and restart."
        )

    def _prune(self) -> None:
        """Forget some of the oldest ended leases, if there are too many, or a quarter of them if the file is too large. What
        fails here is tried again later.
        """
        with suppress(JournalError), self._file.errors():
            used, first, last = self._file.connection().execute(SQL["size_of_ended"]).fetchone()
            count = last - first + 1
            surplus = count - self._most_ended if used <= self._most_bytes else count // 4
            if surplus > 0:
                up_to = (first + min(surplus, PRUNED_AT_ONCE) - 1,)
                with self._file.transaction() as connection:
                    connection.execute(SQL["note_pruned"], up_to)
                    connection.execute(SQL["prune_ended"], up_to)


def begin(
    connection: sqlite3.Connection, events: Sequence[DurableEvent], pool_id: str | None, complete_since: float | None
) -> None:
    """Fill a new journal with these events. Without a `pool_id` it is that of a new pool."""
    rows = event_rows(events, 0)
    insert_events(connection, rows, 0)
    connection.execute(SQL["begin_again"], (pool_id, len(rows), complete_since))


def insert_events(connection: sqlite3.Connection, rows: Sequence[Row], after: int) -> None:
    numbered = ((position, *row) for position, row in enumerate(rows, after + 1))
    connection.executemany(SQL["append_event"], numbered)


def read_events(connection: sqlite3.Connection, node: str | None = None) -> tuple[DurableEvent, ...]:
    """All events; a ValueError if one was altered, lost or moved, and NotUnderstood if one is not known here."""
    if node is not None and (last := connection.execute(SQL["last_epoch"]).fetchone()) and last[0]:
        node = None
    events, crc = [], 0
    for body, noted_crc in connection.execute(SQL["read_events"]):
        crc = checked_crc(body, noted_crc, crc)
        events.append(decode_event(body, node))
    return tuple(events)


def read_ended(rows: Iterable[Row]) -> Iterator[EndedLease]:
    """The ended leases in these rows; the errors are those of `read_events`."""
    for body, crc in rows:
        checked_crc(body, crc)
        yield decode_ended(body)
