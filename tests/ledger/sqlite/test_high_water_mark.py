"""What a journal's own file cannot tell: that its end is missing, and that it is open under another name."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.ledger.journal import JournalDamaged, JournalInUse
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.ledger.sqlite.lock import LockFile, read_mark
from tests.ledger import children
from tests.ledger.examples import note


def killed_with_a_log(path: Path) -> None:
    """A journal as kill -9 leaves it: with what was written last in its log alone."""
    status, _ = children.run("write", path, failpoint="after_append:3")
    assert status == -9
    assert Path(f"{path}-wal").stat().st_size


def flip_a_bit(log: Path) -> None:
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(bytes(content))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit is flipped": flip_a_bit,
    "it is cut": lambda log: os.truncate(log, log.stat().st_size // 2),
    "it is empty": lambda log: os.truncate(log, 0),
    "it is gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_log_whose_end_is_missing_is_damage_and_not_a_short_history(path: Path, damage: str) -> None:
    killed_with_a_log(path)
    DAMAGES[damage](Path(f"{path}-wal"))
    with pytest.raises(JournalDamaged, match="events, which were written, are missing"):
        SqliteJournal(path)
    with pytest.raises(JournalDamaged, match="make sure that no process still uses the GPUs"):
        SqliteJournal(path)


@pytest.mark.parametrize("damage", ["it is cut", "it is empty", "it is gone"])
def test_a_log_that_is_lost_while_in_use_is_noticed_before_anything_more_is_promised(path: Path, damage: str) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(1), note(2)], ())
        DAMAGES[damage](Path(f"{path}-wal"))
        with pytest.raises(JournalDamaged, match="was deleted or cut while it was in use"):
            journal.append([note(3)], ())
        journal.replace_damaged([note(1), note(2), note(3)])
        journal.append([note(4)], ())
    with closing(SqliteJournal(path)) as journal:
        assert len(journal.load(0).events) == 4


def test_a_log_that_another_program_folded_into_the_file_is_no_damage(path: Path) -> None:
    """As an sqlite3 shell, a backup tool or Litestream does."""
    with closing(SqliteJournal(path)) as journal:
        for number in range(3):
            journal.append([note(number)], ())
            with closing(sqlite3.connect(path)) as other:
                assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
            assert Path(f"{path}-wal").stat().st_size == 0
        journal.append([note(3)], ())
    with closing(SqliteJournal(path)) as journal:
        assert len(journal.load(0).events) == 4
    assert not list(path.parent.glob("*.damaged-*"))


@pytest.mark.parametrize(("boot", "counts"), [("", 15), (boot_id(), 15), ("another boot", 0)])
def test_a_mark_from_before_a_power_cut_counts_only_where_everything_was_synced(
    path: Path, boot: str, counts: int
) -> None:
    with closing(LockFile(path, boot=boot)) as file:
        file.mark(15)

    assert read_mark(path) == counts


def test_a_mark_that_cannot_be_read_tells_nothing(path: Path) -> None:
    assert read_mark(path) == 0
    Path(f"{path}.lock").write_bytes(b"nonsense" * 20)
    assert read_mark(path) == 0
    with closing(LockFile(path)) as file:
        assert read_mark(path) == 0
        file.mark(7)
        assert read_mark(path) == 7


def test_a_journal_that_somebody_took_away_is_no_damage(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(1)], ())
    path.unlink()
    with closing(SqliteJournal(path)) as journal:
        assert journal.load(0).events == ()


def test_another_name_of_a_journal_is_the_same_journal(path: Path, tmp_path: Path) -> None:
    with children.running("hold", path):
        other = tmp_path / "other" / "journal.sqlite"
        other.parent.mkdir()
        os.link(path, other)
        with pytest.raises(JournalInUse, match="under this or another name"):
            SqliteJournal(other)


def test_without_its_lock_file_a_journal_is_locked_all_the_same(path: Path) -> None:
    with children.running("hold", path):
        Path(f"{path}.lock").unlink()
        with pytest.raises(JournalInUse):
            SqliteJournal(path)


def test_a_copy_is_another_journal(path: Path, tmp_path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(1)], ())
    shutil.copy(path, tmp_path / "copy.sqlite")
    with closing(SqliteJournal(path)), closing(SqliteJournal(tmp_path / "copy.sqlite")) as copy:
        assert len(copy.load(0).events) == 1
