"""A checked copy of a journal in one file, made while a server writes it or while none does, and put back in its place."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp

from gpu_worker_pool.core.decider.condense import put_back
from gpu_worker_pool.core.model.lease import ActiveLease, QueuedLease
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.host.state_dir import create_private, reach, sync_folder
from gpu_worker_pool.ledger.driver import restored
from gpu_worker_pool.ledger.journal import History, JournalDamaged, JournalError

from .file import SqliteFile, check_version, connect, journal_errors
from .journal import SCHEMA, SQL, begin, read_ended, read_events
from .lock import read_mark

# A server that starts, or compacts, may lock the file for a moment.
BUSY_TIMEOUT_S = 10.0
REASON = "restored from a backup: make sure that no program from before uses this GPU, then gpu-pool undrain"
_ADVICE = {
    "backup": "use another one",
    "journal": "restart its server, which says whether it can go on with it. An older backup can be put in its place by "
    "gpu-pool restore --force",
}


@dataclass(frozen=True, slots=True)
class JournalFacts:
    """What a journal has in it. `changed_at` and `complete_since` are seconds since 1970; None if there is nothing to say.
    It accepts the tokens of `token_names`.
    """

    active: int
    waiting: int
    ended: int
    changed_at: float | None
    complete_since: float | None
    token_names: tuple[str, ...] = ()
    is_of_fleet: bool = False


def back_up(journal: Path, copy: Path, settings: PoolSettings) -> JournalFacts:
    """Copy the journal to a new private file, and check the copy. JournalError says what is wrong; no file is left then.

    The file gets its name when it is whole and checked. No other file is overwritten. If the process is killed, it leaves at
    most a hidden file, whose name ends in `.part`.
    """
    journal, copy = journal.absolute(), copy.absolute()
    _must_be_regular(journal, f"there is no journal {journal}: no server has run with these settings")
    if os.path.lexists(copy):
        raise _is_there(copy)
    with journal_errors(copy, "backup"):
        descriptor, name = mkstemp(".part", f".{copy.name}.", copy.parent)
        os.close(descriptor)
        part = Path(name)
        try:
            # Read before the copy is made: a server may go on writing.
            written = read_mark(journal)
            _copy(journal, part)
            with closing(connect(part, "ro")) as connection:
                _, facts = _check(connection, settings, journal, "journal", written)
            reach("in_backup")
            give_name(part, copy)
            sync_folder(copy.parent)
        finally:
            part.unlink(missing_ok=True)
    return facts


def restore(
    copy: Path, journal: Path, settings: PoolSettings, *, replace: bool = False
) -> tuple[JournalFacts, Path | None]:
    """Put what a copy has in the place of the journal; return that, and where the journal is now that was there before.

    JournalError, and nothing is changed, if the copy is damaged, a server has the journal (JournalInUse), or a journal is there
    and `replace` was not asked for; then it is kept under another name.

    The leases and the queue are those of the copy. All GPUs are out of service, also those that the copy does not know; fences
    go on far ahead, and the pool has a new identity: holders of leases that the copy does not know take it for another pool,
    and keep their GPUs from it.
    """
    copy, journal = copy.absolute(), journal.absolute()
    _must_be_regular(copy, f"there is no file {copy}")
    with (
        journal_errors(copy, "backup"),
        closing(connect(copy, "ro", BUSY_TIMEOUT_S)) as source,
        journal_errors(journal),
        closing(_place_of(journal)) as place,
    ):
        if not replace and any(os.path.lexists(f"{journal}{end}") for end in ("", "-wal")):
            raise JournalError(
                f"there is a journal {journal}, which may know of later leases; --force keeps it under another name, "
                "and puts the backup in its place"
            )
        source.execute("BEGIN")
        state, facts = _check(source, settings, copy, "backup")

        def fill(connection: sqlite3.Connection) -> None:
            begin(connection, put_back(state, REASON), None, facts.complete_since)
            connection.executemany(SQL["keep_ended"], source.execute(SQL["read_all_ended"]))

        aside = place.replace(fill)
        return facts, None if aside is None else _kept(aside)


def _place_of(journal: Path) -> SqliteFile:
    """The place of the journal, kept from every server. JournalInUse if one has it."""
    if journal.parent.exists() and (owner := journal.parent.stat().st_uid) != os.geteuid():
        raise JournalError(
            f"{journal.parent} belongs to the user with uid {owner}, whose server could not write a journal of another "
            f"user; restore it as that user: sudo -u '#{owner}' gpu-pool restore"
        )
    return SqliteFile(journal, SCHEMA)


def _check(
    connection: sqlite3.Connection, settings: PoolSettings, path: Path, what: str, least_position: int = 0
) -> tuple[PoolState, JournalFacts]:
    """Read all of a journal: its tables, its pages, the checksum of each row, and what the events add up to. JournalError if
    anything is wrong, or if it ends before `least_position`. `path` and `what` are its name in messages.
    """
    try:
        with journal_errors(path, what, is_read=True):
            check_version(connection, path, what)
            _check_tables(connection)
            ended = sum(1 for _ in read_ended(connection.execute(SQL["read_all_ended"])))
            events = read_events(connection)
            (position,) = connection.execute(SQL["last_position"]).fetchone()
            if (missing := least_position - position) > 0:
                raise ValueError(f"its last {missing} events, which were written, are missing")
            state = restored(History(events), settings)
            (complete_since,) = connection.execute(SQL["complete_since"]).fetchone()
    except JournalDamaged as error:
        raise JournalDamaged(f"{error}; {_ADVICE[what]}") from None
    active = sum(isinstance(lease, ActiveLease) for lease in state.leases.values())
    waiting = sum(isinstance(lease, QueuedLease) for lease in state.leases.values())
    changed_at = None if state.boot_id is None else state.clock + state.wall_offset_s
    token_names = tuple(sorted({token.name for token in state.tokens.values()}))
    return state, JournalFacts(active, waiting, ended, changed_at, complete_since, token_names, state.epoch > 0)


def give_name(part: Path, copy: Path) -> None:
    """Give a whole file its name. JournalError, and nothing is changed, if there is a file with that name."""
    try:
        create_private(copy)
    except FileExistsError:
        raise _is_there(copy) from None
    part.rename(copy)


def _is_there(copy: Path) -> JournalError:
    return JournalError(f"{copy} is there already, and a backup overwrites nothing; name another file")


def _must_be_regular(path: Path, missing: str) -> None:
    """Opening a pipe would wait for a writer, and a device may have no end."""
    with journal_errors(path, "file"):
        if not path.exists():
            raise JournalError(missing)
        if not path.is_file():
            raise JournalError(
                f"{path} is not a regular file, so it is not what gpu-pool backup wrote; name another file"
            )


def _copy(journal: Path, part: Path) -> None:
    """Copy all of a database as of one moment into an empty file, which needs no log beside it."""
    with journal_errors(journal), closing(connect(journal, "ro", BUSY_TIMEOUT_S)) as connection:
        try:
            connection.execute("VACUUM INTO ?", (str(part),))
        except sqlite3.OperationalError as error:
            with journal_errors(part if error.sqlite_errorcode == sqlite3.SQLITE_FULL else journal):
                raise


def _check_tables(connection: sqlite3.Connection) -> None:
    """A ValueError unless the tables are exactly ours, and their pages whole. A trigger or a view would be a program of
    another hand.
    """
    with closing(sqlite3.connect(":memory:")) as own:
        own.executescript(SCHEMA)
        expected = set(own.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))
    found = set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))
    if found != expected:
        names = sorted({f"{kind} {name}" for kind, name, *_ in found ^ expected})
        raise ValueError(f"its tables are not those of a pool: {', '.join(names)}")
    findings = [str(finding) for (finding,) in connection.execute("PRAGMA integrity_check(3)")]
    if findings != ["ok"]:
        raise ValueError("; ".join(findings))


def _kept(aside: Path) -> Path:
    """Rename what was set aside, log and all: it is not damaged."""
    kept = aside.with_name(aside.name.replace(".damaged-", ".replaced-"))
    for end in ("-wal", ""):
        if (file := Path(f"{aside}{end}")).exists():
            file.rename(f"{kept}{end}")
    return kept
