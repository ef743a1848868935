"""The file of a box's leases: what was written is there after a restart, and a damaged file does not stop the box."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpu_worker_pool.ledger.journal import JournalError, JournalInUse
from gpu_worker_pool.ledger.sqlite.custody import CustodyFile

ROWS = {("lease", "one"): "1", ("lease", "two"): "2", ("over", "three"): "3"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "custody.sqlite3"


def reopened(path: Path) -> dict[tuple[str, str], str]:
    file = CustodyFile(path)
    file.close()
    return file.rows


def test_what_was_written_is_there_after_a_restart(path: Path) -> None:
    file = CustodyFile(path)
    file.write(dict(ROWS))
    file.write({("lease", "one"): "1b", ("lease", "two"): None})
    file.close()
    assert reopened(path) == {("lease", "one"): "1b", ("over", "three"): "3"}


def test_a_second_server_is_refused(path: Path) -> None:
    with closing(CustodyFile(path)), pytest.raises(JournalInUse, match="in use by the process with pid"):
        CustodyFile(path)


def damage_pages(path: Path) -> None:
    path.write_bytes(b"not a database" * 400)


def alter_row(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE kept SET body = '7' WHERE id = 'one'")


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_pages, alter_row, empty])
def test_a_damaged_file_is_kept_aside_and_the_box_starts_empty(
    path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    file = CustodyFile(path)
    file.write(dict(ROWS))
    file.close()
    assert callable(damage)
    damage(path)
    with caplog.at_level(logging.ERROR):
        assert reopened(path) == {}
    assert "The leader tells this box which leases it has" in caplog.text
    assert len(list(path.parent.glob("custody.sqlite3.damaged-*"))) == 1


def test_a_file_that_was_deleted_is_written_again(path: Path) -> None:
    with closing(CustodyFile(path)) as file:
        file.write(dict(ROWS))
        path.unlink()
        file.write({("lease", "one"): None})
    assert reopened(path) == {key: body for key, body in ROWS.items() if key != ("lease", "one")}


def test_a_file_of_a_newer_version_is_left_alone(path: Path) -> None:
    CustodyFile(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 9")
    with pytest.raises(JournalError, match="newer version of this program"):
        CustodyFile(path)
    assert not list(path.parent.glob("*.damaged-*"))
