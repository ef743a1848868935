"""A backup is whole, private and checked; what is not is refused, and leaves nothing behind."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.ledger.journal import JournalDamaged, JournalError, JournalInUse, JournalTooNew
from gpu_worker_pool.ledger.rows import check_ended, checked_event, ended_row, event_rows
from gpu_worker_pool.ledger.sql_files import load_queries
from gpu_worker_pool.ledger.sqlite.backup import JournalFacts, back_up, check, give_name
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal, insert, numbered
from gpu_worker_pool.ledger.sqlite.migrations import known_migrations, migrate
from gpu_worker_pool.ledger.sqlite.restore import restore
from tests.ledger.examples import ended, ended_leases, events, note

SETTINGS = PoolSettings()
QUERIES = load_queries("gpu_worker_pool.ledger.sqlite")


@pytest.fixture
def copy(path: Path) -> Path:
    """A backup that was made while the journal was in use."""
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(number) for number in range(100)], [ended(f"lease{number}") for number in range(100)])
        back_up(path, path.with_name("backup"), SETTINGS)
    return path.with_name("backup")


def test_a_backup_is_one_private_file_with_all_that_was_written(path: Path, copy: Path) -> None:
    assert (copy.stat().st_mode & 0o777, sorted(copy.parent.glob("*backup*"))) == (0o600, [copy])
    assert check(copy, SETTINGS) == JournalFacts(0, 0, 100, None, None)
    with closing(SqliteJournal(copy)) as made, closing(SqliteJournal(path)) as journal:
        assert made.load(1000) == journal.load(1000)


@given(st.lists(events, max_size=20), st.lists(ended_leases, max_size=20))
@settings(max_examples=20)
def test_every_row_that_a_journal_writes_passes(written: list[DurableEvent], leases: list[EndedLease]) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        migrate(connection, known_migrations())
        rows, _ = event_rows(written, 0)
        insert(connection, QUERIES["append_event"], numbered(rows, 0))
        insert(connection, QUERIES["keep_ended"], [ended_row(lease) for lease in leases])
        crc = 0
        for _, *row in connection.execute(QUERIES["read_whole_events"]):
            _, crc = checked_event(tuple(row), crc)
        for row in connection.execute(QUERIES["read_whole_ended"]):
            check_ended(row)


def test_the_spaces_that_older_versions_wrote_between_gpus_are_no_damage(copy: Path) -> None:
    execute(copy, """UPDATE ended_lease SET gpus = '[["box", "GPU-0"], ["box", "GPU-1"]]'""")

    assert check(copy, SETTINGS).ended == 100


def test_no_file_is_overwritten(path: Path, copy: Path) -> None:
    before = copy.read_bytes()

    with pytest.raises(JournalError, match="is there already"):
        back_up(path, copy, SETTINGS)

    assert copy.read_bytes() == before
    assert not list(copy.parent.glob("*.part"))


def test_a_file_that_appears_while_a_backup_is_made_is_not_overwritten(copy: Path) -> None:
    part = copy.with_name(".backup.part")
    part.write_bytes(b"another")

    with pytest.raises(JournalError, match="is there already"):
        give_name(part, copy)

    assert (part.read_bytes(), check(copy, SETTINGS).ended) == (b"another", 100)


def test_a_journal_whose_end_is_missing_is_not_backed_up(path: Path, copy: Path) -> None:
    copy.rename(path)  # the mark beside it is that of the journal
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(1)], ())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM event WHERE position = 101")
        connection.commit()

    with pytest.raises(JournalDamaged, match="its last 1 events"):
        back_up(path, copy, SETTINGS)

    assert not list(path.parent.glob("*backup*"))


def overwrite(copy: Path, before: bytes, after: bytes) -> None:
    copy.write_bytes(copy.read_bytes().replace(before, after, 1))


def execute(copy: Path, statement: str) -> None:
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute(statement)
        connection.commit()


DAMAGE: list[tuple[Callable[[Path], object], type[JournalError], str]] = [
    (lambda copy: overwrite(copy, b"program 50", b"program 5x"), JournalDamaged, "was altered"),
    (lambda copy: overwrite(copy, b'{"id":"lease50"', b'{"id":"lease5x"'), JournalDamaged, "was altered"),
    (lambda copy: copy.write_bytes(copy.read_bytes()[:-4096]), JournalDamaged, "damaged"),
    (lambda copy: copy.write_bytes(b"nothing of the kind" * 100), JournalDamaged, "not a database"),
    (lambda copy: copy.write_bytes(b""), JournalDamaged, "not a backup of a pool"),
    (lambda copy: execute(copy, "PRAGMA user_version = 99"), JournalTooNew, "newer version"),
    (lambda copy: copy.unlink(), JournalError, "there is no file"),
]


@pytest.mark.parametrize(("damage", "kind", "said"), DAMAGE)
def test_a_damaged_file_is_refused_by_its_name_and_nothing_is_changed(
    path: Path, copy: Path, damage: Callable[[Path], object], kind: type[JournalError], said: str
) -> None:
    damage(copy)
    before = path.read_bytes()

    with pytest.raises(kind, match=said):
        restore(copy, path, SETTINGS, replace=True)

    assert path.read_bytes() == before
    assert not [found for found in path.parent.iterdir() if "damaged" in found.name or "restoring" in found.name]

    # As a journal it is not backed up, and it is the journal that the message names.
    with pytest.raises(kind, match=said.replace("backup", "journal").replace("file", "journal")) as caught:
        back_up(copy, path.with_name("another"), SETTINGS)
    assert (str(copy) in str(caught.value), "the backup" in str(caught.value)) == (True, False)
    assert not list(path.parent.glob("*another*"))


COLUMNS = [
    "event SET at = 49.5",
    "event SET kind = 'ProcessCounted'",
    "ended_lease SET lease_id = 'lease5x'",
    "ended_lease SET owner = 'alicf'",
    "ended_lease SET worker_id = NULL",
    "ended_lease SET host = 'bax'",
    "ended_lease SET gpu_count = 3",
    "ended_lease SET memory_mb = 8001",
    "ended_lease SET fence = 9",
    "ended_lease SET requested_at = requested_at + 1",
    "ended_lease SET granted_at = NULL",
    "ended_lease SET ended_at = 1.5",
    "ended_lease SET reason = 'released'",
    """ended_lease SET gpus = '[["box","GPU-0"],["box","GPU-2"]]'""",
]


def test_a_column_that_says_something_else_than_the_record_is_damage(copy: Path) -> None:
    whole = copy.read_bytes()
    altered = {f"{change} WHERE position = 50": "was altered" for change in COLUMNS}
    altered["event SET position = 1000 WHERE position = 100"] = "event 1000"
    altered["compaction SET compacted_to = 1000"] = "compacted to event 1000"
    for change, said in altered.items():
        execute(copy, f"UPDATE {change}")
        with pytest.raises(JournalDamaged, match=said):
            check(copy, SETTINGS)
        copy.write_bytes(whole)


def test_a_journal_that_is_there_is_replaced_only_on_request_and_never_in_use(path: Path, copy: Path) -> None:
    with pytest.raises(JournalError, match="--force"):
        restore(copy, path, SETTINGS)
    with closing(SqliteJournal(path)) as journal:
        old_id = journal.pool_id
        with pytest.raises(JournalInUse):
            restore(copy, path, SETTINGS, replace=True)
        journal.append([note(number) for number in range(500)], ())  # the mark is far ahead of the backup

    done = restore(copy, path, SETTINGS, replace=True)

    assert done.replaced is not None
    with closing(SqliteJournal(done.replaced)) as kept, closing(SqliteJournal(path)) as journal:
        assert (kept.pool_id, journal.pool_id != old_id) == (old_id, True)
        assert len(journal.load(1000).ended) == 100


def test_a_backup_of_an_older_version_is_migrated(path: Path, copy: Path) -> None:
    execute(copy, "PRAGMA user_version = 3")
    path.unlink()

    restore(copy, path, SETTINGS)

    with closing(SqliteJournal(path)) as journal:
        assert len(journal.load(1000).ended) == 100
    assert not list(path.parent.glob("*.version-*"))
