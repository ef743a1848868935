"""The journal of a server in a SQLite file. See `Journal` for the contract."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import time
from typing import TypeVar

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.codec import Readers, decode_ended, decode_event
from gpu_worker_pool.ledger.failpoints import reach
from gpu_worker_pool.ledger.journal import History, JournalDamaged, JournalError, JournalTooNew
from gpu_worker_pool.ledger.sql_rows import Row, checked_crc, ended_row, event_rows, load_queries, load_schema

from .file import Durability, SqliteFile, isolate, isolated

# Enough for years of accounting; bounds the growth.
MOST_ENDED = 1_000_000
# The file is kept to about this size by forgetting the oldest ended leases.
MOST_BYTES = 1024 * 1024 * 1024
# The oldest ended leases are forgotten in small steps, each a commit of its own: clients wait meanwhile.
PRUNED_AT_ONCE = 500
APPENDS_PER_STEP = 8

T = TypeVar("T")


class SqliteJournal:
    """Opening it raises JournalInUse, JournalDamaged (the damaged file has been set aside then) or JournalError.

    A start reads the events and the last ended leases, and checks what it reads. A backup checks all of the file.
    With a `node`, all events are read as events of this node, which may have had other names.
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
        self._readers = Readers(is_tolerant=False, node=node)
        self._most_ended = most_ended
        self._most_bytes = most_bytes
        self._sql = load_queries(__package__)
        self.pool_id = ""
        self._crc = 0
        self._compacted_to = 0
        self._bytes_since_compaction = 0
        # Ended leases up to this position are to be forgotten.
        self._prune_to = 0
        self._appends = 0
        self._file = SqliteFile(
            path, load_schema(__package__), durability=durability, position_query=self._sql["last_position"]
        )
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
        with self._file.errors():
            connection = self._file.connection()
            with self._quarantine():
                events = read_events(connection)
                ended = connection.execute(self._sql["read_last_ended"], (most_ended,)).fetchall()
                for body, crc in ended:
                    checked_crc(body, crc)
        path = self._file.path
        return History(
            tuple(understood(partial(decode_event, readers=self._readers), body, path) for body in events),
            tuple(understood(decode_ended, body, path) for body, _ in ended),
        )

    def append(self, events: Sequence[DurableEvent], ended: Sequence[EndedLease]) -> None:
        rows, ended_rows = event_rows(events, self._crc), [ended_row(lease) for lease in ended]
        if not rows and not ended_rows:
            return
        reach("before_append")

        def change(connection: sqlite3.Connection) -> None:
            self._insert(connection, rows)
            connection.executemany(self._sql["keep_ended"], ended_rows)
            reach("in_append")

        self._file.transact(change, self._file.position + len(rows))
        if rows:
            self._crc = rows[-1][1]
        self._bytes_since_compaction += sum(len(body) for body, _ in rows)
        self._appends += 1
        if self._appends % APPENDS_PER_STEP == 0:
            self._prune()
        reach("after_append")

    def compact(self, events: Sequence[DurableEvent]) -> None:
        rows = event_rows(events, 0)
        position = self._file.position + len(rows)
        most = 0

        def change(connection: sqlite3.Connection) -> None:
            nonlocal most
            half = len(rows) // 2
            connection.execute(self._sql["delete_events"])
            self._insert(connection, rows[:half])
            reach("in_compaction")
            self._insert(connection, rows[half:], half)
            connection.execute(self._sql["note_compaction"], (position,))
            most = self._last_to_prune(connection)

        self._file.transact(change, position)
        self._crc = rows[-1][1] if rows else 0
        self._compacted_to, self._bytes_since_compaction, self._prune_to = position, 0, most
        reach("after_compaction")
        self._prune()
        self._file.fold_log()

    def replace_damaged(self, events: Sequence[DurableEvent]) -> None:
        """Set the damaged file aside and start a new one with these events; the ended leases stay in the damaged file."""
        if self._file.is_closed:
            self._file.connection()  # raises
        rows = event_rows(events, 0)

        def fill(connection: sqlite3.Connection) -> None:
            self._insert(connection, rows, -self._file.position)
            connection.execute(self._sql["begin_again"], (self.pool_id, len(rows), time()))

        with self._file.errors():
            self._file.replace(fill)
            self._open()

    @property
    def events_since_compaction(self) -> int:
        return self._file.position - self._compacted_to

    @property
    def bytes_since_compaction(self) -> int:
        return self._bytes_since_compaction

    def close(self) -> None:
        self._file.close()

    def __repr__(self) -> str:
        state = "closed" if self._file.is_closed else f"{self.events_since_compaction} events since the last compaction"
        return f"<SqliteJournal {self._file.path}: {self._durability}, {state}>"

    def _insert(self, connection: sqlite3.Connection, rows: Sequence[Row], after: int = 0) -> None:
        first = self._file.position + after + 1
        connection.executemany(self._sql["append_event"], [(first + number, *row) for number, row in enumerate(rows)])

    def _create(self) -> None:
        """Create the journal at the first start; refuse after damage that no operator has dealt with yet."""
        path = self._file.path
        # A log without its database would be taken for the new database's log, and ruin it.
        if Path(f"{path}-wal").exists():
            isolate(path)
        if isolated(path):
            raise JournalDamaged(self._advice())
        self._file.create(lambda _: None)

    def _open(self) -> None:
        with self._quarantine():
            connection = self._file.open()
            last = connection.execute(self._sql["last_crc"]).fetchone()
            self._crc = last[0] if last else 0
            self.pool_id, self._compacted_to, self._bytes_since_compaction = connection.execute(
                self._sql["read_pool"]
            ).fetchone()

    @contextmanager
    def _quarantine(self) -> Iterator[None]:
        """While the file is opened or read: set it aside if it is damaged, so that the next start notices."""
        try:
            with self._file.reading():
                yield
        except JournalDamaged as error:
            self._file.set_aside()
            self.close()
            raise JournalDamaged(f"{error}. {self._advice()}") from error

    def _advice(self) -> str:
        path = self._file.path
        return (
            f"The damaged journal was set aside as {', '.join(map(str, isolated(path)))}. Its leases are no longer known: make "
            f"sure that no process still uses the GPUs, then move that file out of {path.parent} and restart."
        )

    def _last_to_prune(self, connection: sqlite3.Connection) -> int:
        """The position of the last ended lease to forget. In a file that is too large, a quarter of them go."""
        used, first, last = connection.execute(self._sql["size_of_ended"]).fetchone()
        most = self._most_ended if used <= self._most_bytes else min(self._most_ended, (last - first + 1) * 3 // 4)
        return int(last - most)

    def _prune(self) -> None:
        """Forget some of the oldest ended leases, if there are too many. What fails here is tried again later."""
        if self._prune_to <= 0:
            return
        first = 0

        def change(connection: sqlite3.Connection) -> None:
            nonlocal first
            _, first, _ = connection.execute(self._sql["size_of_ended"]).fetchone()
            last = min(self._prune_to, first + PRUNED_AT_ONCE - 1)
            connection.execute(self._sql["note_pruned"], (last,))
            connection.execute(self._sql["prune_ended"], (last,))

        with suppress(JournalError):
            self._file.transact(change)
            if first + PRUNED_AT_ONCE > self._prune_to:
                self._prune_to = 0


def read_events(connection: sqlite3.Connection) -> list[str]:
    """The bodies of all events; a ValueError if one was altered, lost or moved."""
    bodies, crc = [], 0
    for body, noted_crc in connection.execute(load_queries(__package__)["read_events"]):
        crc = checked_crc(body, noted_crc, crc)
        bodies.append(body)
    return bodies


def understood(decode: Callable[[str], T], body: str, path: Path, what: str = "journal") -> T:
    """What this text says, which is as it was written."""
    try:
        return decode(body)
    except ValueError as error:
        raise JournalTooNew(
            f"the {what} {path} was written by a newer version of this program ({error}): install the newer one again, or "
            "give this server another GPU_POOL_STATE_DIR"
        ) from error
