"""A backup is whole, private and checked; what is not is refused, and leaves nothing behind."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.ledger.journal import JournalDamaged, JournalError, JournalInUse, JournalTooNew
from gpu_worker_pool.ledger.sqlite.backup import JournalFacts, back_up, give_name, restore
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from tests.ledger.examples import ended, note

SETTINGS = PoolSettings()


@pytest.fixture
def copy(path: Path) -> Path:
    """A backup that was made while the journal was in use."""
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(number) for number in range(100)], [ended(f"lease{number}") for number in range(100)])
        back_up(path, path.with_name("backup"), SETTINGS)
    return path.with_name("backup")


def test_a_backup_is_one_private_file_with_all_that_was_written(path: Path, copy: Path) -> None:
    assert (copy.stat().st_mode & 0o777, sorted(copy.parent.glob("*backup*"))) == (0o600, [copy])
    assert back_up(copy, path.with_name("second"), SETTINGS) == JournalFacts(0, 0, 100, None, None)
    with closing(SqliteJournal(copy)) as made, closing(SqliteJournal(path)) as journal:
        assert made.load(1000) == journal.load(1000)


def test_no_file_is_overwritten(path: Path, copy: Path) -> None:
    before = copy.read_bytes()

    with pytest.raises(JournalError, match="is there already"):
        back_up(path, copy, SETTINGS)

    assert copy.read_bytes() == before
    assert not list(copy.parent.glob("*.part"))


def test_a_file_that_appears_while_a_backup_is_made_is_not_overwritten(copy: Path) -> None:
    part, before = copy.with_name(".backup.part"), copy.read_bytes()
    part.write_bytes(b"another")

    with pytest.raises(JournalError, match="is there already"):
        give_name(part, copy)

    assert (part.read_bytes(), copy.read_bytes()) == (b"another", before)


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


EVERY_EVENT = "AFTER INSERT ON event BEGIN DELETE FROM ended_lease; END"


def break_an_index(copy: Path) -> None:
    """Which no start reads."""
    with closing(sqlite3.connect(copy)) as connection:
        sql = "SELECT rootpage FROM sqlite_master WHERE name = 'ended_lease_by_ended_at'"
        (page,) = connection.execute(sql).fetchone()
    content = bytearray(copy.read_bytes())
    content[(page - 1) * 4096 : (page - 1) * 4096 + 8] = b"\xff" * 8
    copy.write_bytes(content)


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
    (lambda copy: copy.write_bytes(b""), JournalDamaged, "it has no tables"),
    (break_an_index, JournalDamaged, "damaged"),
    (lambda copy: execute(copy, "DELETE FROM event WHERE position = 50"), JournalDamaged, "or what came before it"),
    (
        lambda copy: execute(copy, f"CREATE TRIGGER more {EVERY_EVENT}"),
        JournalDamaged,
        "not those of a pool: trigger more",
    ),
    (lambda copy: execute(copy, "CREATE VIEW more AS SELECT 1"), JournalDamaged, "not those of a pool: view more"),
    (lambda copy: execute(copy, "CREATE TABLE more (a)"), JournalDamaged, "not those of a pool: table more"),
    (lambda copy: execute(copy, "CREATE INDEX more ON event (crc)"), JournalDamaged, "not those of a pool: index more"),
    (lambda copy: execute(copy, "DROP INDEX ended_lease_by_ended_at"), JournalDamaged, "not those of a pool: index"),
    (
        lambda copy: execute(copy, "ALTER TABLE event ADD COLUMN more"),
        JournalDamaged,
        "not those of a pool: table event",
    ),
    (lambda copy: execute(copy, "PRAGMA application_id = 0"), JournalError, "unreleased version"),
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


def test_a_journal_that_is_there_is_replaced_only_on_request_and_never_in_use(path: Path, copy: Path) -> None:
    with pytest.raises(JournalError, match="--force"):
        restore(copy, path, SETTINGS)
    with closing(SqliteJournal(path)) as journal:
        old_id = journal.pool_id
        with pytest.raises(JournalInUse):
            restore(copy, path, SETTINGS, replace=True)
        journal.append([note(number) for number in range(500)], ())  # the mark is far ahead of the backup

    _, replaced = restore(copy, path, SETTINGS, replace=True)

    assert replaced is not None
    with closing(SqliteJournal(replaced)) as kept, closing(SqliteJournal(path)) as journal:
        assert (kept.pool_id, journal.pool_id != old_id) == (old_id, True)
        assert len(journal.load(1000).ended) == 100


def make_link_to_a_pipe(file: Path) -> None:
    os.mkfifo(f"{file}.pipe")
    file.symlink_to(f"{file}.pipe")


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a link to a pipe": make_link_to_a_pipe,
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_regular_file_is_restored_and_the_refusal_does_not_wait(path: Path, kind: str) -> None:
    file = path.with_name("odd")
    KINDS[kind](file)
    with pytest.raises(JournalError, match="is not a regular file"):
        restore(file, path, SETTINGS)
    with pytest.raises(JournalError, match="is not a regular file"):
        back_up(file, path.with_name("copy"), SETTINGS)
    assert not path.exists()


def test_a_link_to_a_backup_is_the_backup(path: Path, copy: Path) -> None:
    path.unlink()
    path.with_name("link").symlink_to(copy)
    assert restore(path.with_name("link"), path, SETTINGS)[0].ended == 100
