"""A checked copy of a journal in one file, made while a server writes the journal or while none does."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gpu_worker_pool.core.model.lease import ActiveLease, QueuedLease
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.ledger.codec import decode_event
from gpu_worker_pool.ledger.driver import restored
from gpu_worker_pool.ledger.failpoints import reach
from gpu_worker_pool.ledger.faults import journal_errors
from gpu_worker_pool.ledger.journal import History, JournalDamaged, JournalError, JournalTooNew
from gpu_worker_pool.ledger.rows import check_ended, checked_event
from gpu_worker_pool.ledger.sql_files import load_queries

from .high_water_mark import HighWaterMark
from .migrations import create_private, known_migrations, version_of
from .quarantine import sync_folder

# A server that starts, or compacts, may lock the file for a moment.
BUSY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class JournalFacts:
    """What a journal has in it. `changed_at` and `complete_since` are seconds since 1970; None if there is nothing to say."""

    active: int
    waiting: int
    ended: int
    changed_at: float | None
    complete_since: float | None


def back_up(journal: Path, copy: Path, settings: PoolSettings) -> JournalFacts:
    """Copy the journal to a new private file, and check the copy. JournalError says what is wrong; no file is left then.

    The file gets its name when it is whole and checked. No other file is overwritten. If the process is killed, it leaves at
    most a hidden file, whose name ends in `.part`.
    """
    journal, copy = journal.absolute(), copy.absolute()
    if not journal.exists():
        raise JournalError(f"there is no journal {journal}: no server has run with these settings")
    if os.path.lexists(copy):
        raise _is_there(copy)
    with journal_errors(journal), closing(_read_only(journal)) as connection:
        _check_version(connection, journal, "journal")
    try:
        descriptor, name = tempfile.mkstemp(".part", f".{copy.name}.", copy.parent)
        os.close(descriptor)
    except OSError as error:
        raise JournalError(f"{copy} cannot be made: {error.strerror or error}; name a file in another folder") from None
    part = Path(name)
    try:
        with journal_errors(copy, "backup"):
            # Read before the copy is made: a server may go on writing.
            written = HighWaterMark(journal, is_durable=False).missing_after(0)
            copy_rows(journal, part)
            facts = check(part, settings, journal, "journal")
            _must_reach(part, written, journal)
            reach("in_backup")
            give_name(part, copy)
            sync_folder(copy.parent)
    finally:
        part.unlink(missing_ok=True)
    return facts


def give_name(part: Path, copy: Path) -> None:
    """Give a whole file its name. JournalError, and nothing is changed, if there is a file with that name."""
    try:
        try:
            os.link(part, copy)
        except FileExistsError:
            raise
        except OSError:
            # Some file systems have no links, as those of memory sticks.
            create_private(copy)
            part.rename(copy)
    except FileExistsError:
        raise _is_there(copy) from None


def _is_there(copy: Path) -> JournalError:
    return JournalError(f"{copy} is there already, and a backup overwrites nothing; name another file")


def _must_reach(part: Path, position: int, journal: Path) -> None:
    with closing(_read_only(part)) as connection:
        (found,) = connection.execute(load_queries(__package__)["last_position"]).fetchone()
    if found < position:
        raise JournalDamaged(
            f"the journal {journal} is damaged: its last {position - found} events, which were written, are missing; restart "
            "its server, which says what to do"
        )


def copy_rows(source: Path, target: Path) -> None:
    """Copy all of a database as of one moment into an empty file, which needs no log beside it."""
    with closing(_read_only(source)) as own, closing(sqlite3.connect(target, isolation_level=None)) as other:
        # Nothing is there yet that a crash could damage. The file is synced once, when it is whole.
        other.execute("PRAGMA journal_mode = OFF")
        other.execute("PRAGMA synchronous = OFF")
        own.backup(other)
        other.execute("PRAGMA journal_mode = DELETE")
    descriptor = os.open(target, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check(path: Path, settings: PoolSettings, shown: Path | None = None, what: str = "backup") -> JournalFacts:
    """Read all of a copy: its pages, the checksum and the columns of each row, and what the events add up to. JournalError if
    anything is wrong. `shown` is its name in messages, and `what` it is there.
    """
    name = shown or path
    with journal_errors(name, what), closing(_read_only(path)) as connection:
        _check_version(connection, name, what)
        try:
            ended = _check_pages_and_ended(connection)
            events = list(_checked_events(connection))
            if version_of(connection) < known_migrations()[-1].version:
                return JournalFacts(0, 0, ended, None, None)  # what its events mean is known after its migration
            state = restored(History(tuple(map(decode_event, events))), settings)
        except (JournalDamaged, ValueError, KeyError, TypeError) as error:
            raise JournalDamaged(f"the {what} {name} is damaged ({error}); {_ADVICE[what]}") from None
        return facts_of(state, connection)


_ADVICE = {
    "backup": "use another one",
    "journal": "restart its server, which says whether it can go on with it. An older backup can be put in its place by "
    "gpu-pool restore --force",
}


def _check_version(connection: sqlite3.Connection, path: Path, what: str) -> None:
    version, known = version_of(connection), known_migrations()[-1].version
    if version > known:
        raise JournalTooNew(
            f"the {what} {path} was made by a newer version of this program (its tables are of version {version}, this one "
            f"knows {known}): install the newer one"
        )
    if version == 0:
        raise JournalDamaged(f"{path} is not a {what} of a pool: it has no tables of one")


def facts_of(state: PoolState, connection: sqlite3.Connection) -> JournalFacts:
    sql = load_queries(__package__)
    (ended,) = connection.execute(sql["count_ended"]).fetchone()
    (complete_since,) = connection.execute(sql["complete_since"]).fetchone()
    active = sum(isinstance(lease, ActiveLease) for lease in state.leases.values())
    changed_at = None if state.boot_id is None else state.clock + state.wall_offset_s
    waiting = sum(isinstance(lease, QueuedLease) for lease in state.leases.values())
    return JournalFacts(active, waiting, ended, changed_at, complete_since)


def _check_pages_and_ended(connection: sqlite3.Connection) -> int:
    """The number of ended leases; ValueError if one, or a page, is not what was written."""
    findings = [finding for (finding,) in connection.execute("PRAGMA integrity_check(3)")]
    if findings != ["ok"]:
        raise ValueError("; ".join(map(str, findings)))
    ended = 0
    for row in connection.execute(load_queries(__package__)["read_whole_ended"]):
        check_ended(row)
        ended += 1
    return ended


def _checked_events(connection: sqlite3.Connection) -> Iterator[str]:
    sql, crc, last = load_queries(__package__), 0, None
    for position, *row in connection.execute(sql["read_whole_events"]):
        body, crc = checked_event(tuple(row), crc)
        if last not in (None, position - 1):
            raise ValueError(f"event {position} follows event {last}")
        last = position
        yield body
    (compacted_to,) = connection.execute(sql["compacted_to"]).fetchone()
    if last is not None and compacted_to > last:
        raise ValueError(f"it was compacted to event {compacted_to}, and has none after event {last}")


def _read_only(path: Path) -> sqlite3.Connection:
    # mode=ro: it must not create a file, and closing must not fold the writer's log into it.
    return sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
