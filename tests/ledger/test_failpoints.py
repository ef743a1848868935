"""Killed at every boundary: what was acknowledged is there, what was not is there as a whole or not at all."""

from __future__ import annotations

import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.ledger.failpoints import FAILPOINTS
from gpu_worker_pool.ledger.journal import History
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.ledger.sqlite.migrations import known_migrations
from tests.ledger import children
from tests.ledger.child import BATCH, COMPACTED, NEXT
from tests.ledger.examples import EVENTS, ended, note

# Killed the n-th time that a point is passed in `child.write`, and what must be there then: batches, whether compacted.
WRITING = [
    ("before_append", 0, False),
    ("before_append:3", 2, False),
    ("before_append:6", 5, True),
    ("in_append", 0, False),
    ("in_append:3", 2, False),
    ("in_append:6", 5, True),
    ("after_append", 1, False),
    ("after_append:3", 3, False),
    ("after_append:6", 6, True),
    ("in_compaction", 4, False),
    ("after_compaction", 4, True),
]


def expected(batches: int, is_compacted: bool) -> list[DurableEvent]:
    notes: list[DurableEvent] = [note(number) for number in range(batches * BATCH)]
    return COMPACTED + notes[4 * BATCH :] if is_compacted else notes


def history(path: Path) -> History:
    with closing(SqliteJournal(path)) as journal:
        return journal.load(100)


def test_every_failpoint_is_tried_here() -> None:
    elsewhere = {"in_backup", "in_restore"}  # tests/cli/commands/test_backup.py
    tried = {name.split(":")[0] for name, *_ in WRITING} | {"in_migration", "after_migration"}
    assert tried | elsewhere == set(FAILPOINTS)


def test_without_a_failpoint_all_is_written(tmp_path: Path) -> None:
    status, said = children.run("write", tmp_path / "journal")

    assert status == 0
    assert said[-1] == {"closed": True}
    assert history(tmp_path / "journal").events == tuple(expected(8, True))


@pytest.mark.parametrize(("failpoint", "batches", "is_compacted"), WRITING)
def test_killed_while_writing(tmp_path: Path, failpoint: str, batches: int, is_compacted: bool) -> None:
    path = tmp_path / "journal"

    status, said = children.run("write", path, failpoint)

    assert status == -signal.SIGKILL
    acknowledged = sum("appended" in line for line in said)
    assert acknowledged == batches - failpoint.startswith("after_append")
    found = history(path)
    assert list(found.events) == expected(batches, is_compacted)
    assert [lease.id for lease in found.ended] == [f"lease{number}" for number in range(batches)]
    with closing(SqliteJournal(path)) as journal:
        since = (batches - 4) * BATCH if is_compacted else batches * BATCH
        assert journal.events_since_compaction == since
        journal.append([note(77)], ())
        assert list(journal.load(0).events) == [*expected(batches, is_compacted), note(77)]


@pytest.mark.parametrize("failpoint", ["in_migration", "after_migration"])
def test_killed_while_a_new_journal_is_made(tmp_path: Path, failpoint: str) -> None:
    path = tmp_path / "journal"

    status, said = children.run("write", path, failpoint)

    assert (status, said) == (-signal.SIGKILL, [])
    assert not path.exists()  # nobody takes half a journal for a whole one
    assert history(path) == History()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["journal", "journal.lock", "journal.mark"]


def tables(path: Path) -> tuple[int, set[str]]:
    with closing(sqlite3.connect(path)) as connection:
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        return version, {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}


@pytest.mark.parametrize(("failpoint", "is_migrated"), [("in_migration", False), ("after_migration", True)])
def test_killed_while_an_old_journal_is_migrated(tmp_path: Path, failpoint: str, is_migrated: bool) -> None:
    path = tmp_path / "journal"
    with closing(SqliteJournal(path)) as journal:
        journal.append(EVENTS, [ended("a")])

    status, said = children.run("upgrade", path, failpoint)

    assert (status, said) == (-signal.SIGKILL, [])
    version, names = tables(path)
    assert version == (NEXT.version if is_migrated else NEXT.version - 1)
    assert ("extra" in names) == is_migrated
    assert tables(Path(f"{path}.version-{NEXT.version - 1}"))[0] == NEXT.version - 1
    outcome: tuple[int, list[dict[str, Any]]] = children.run("upgrade", path)
    assert outcome == (0, [{"upgraded": True}])
    with closing(SqliteJournal(path, migrations=(*known_migrations(), NEXT))) as journal:
        assert journal.load(10) == History(EVENTS, (ended("a"),))


@pytest.mark.parametrize("setting", ["in_appendix", "in_append:x", "in_append:-1", ""])
def test_a_failpoint_that_does_not_exist_is_refused(
    tmp_path: Path, setting: str, capfd: pytest.CaptureFixture[str]
) -> None:
    status, _ = children.run("write", tmp_path / "journal", setting)

    assert status == 1
    assert "GPU_POOL_FAILPOINT is" in capfd.readouterr().err
