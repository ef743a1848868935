"""The journal on disk: its files, its lock, its versions, and what happens when it cannot be written."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_worker_pool.ledger.journal import History, JournalDamaged, JournalError, JournalInUse
from gpu_worker_pool.ledger.sql_files import Migration, load_queries
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.ledger.sqlite.migrations import known_migrations
from tests.ledger import children
from tests.ledger.child import COMPACTED, NEXT
from tests.ledger.examples import ENDED, EVENTS, ended, note, numbers
from tests.ledger.journal_contract import Opens, ReplacementContract


class TestSqliteJournalContract(ReplacementContract):
    @pytest.fixture(params=["full", "normal"])
    def opens(self, tmp_path: Path, request: pytest.FixtureRequest) -> Opens:
        return lambda: SqliteJournal(tmp_path / "state" / "journal.sqlite", durability=request.param)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def query(path: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


# Files


def test_the_folder_and_the_files_are_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "journal.sqlite"
    with closing(SqliteJournal(path)) as journal:
        journal.append(EVENTS, ())
        assert mode(path.parent) == 0o700
        names = {file.name: mode(file) for file in path.parent.iterdir()}
    base = "journal.sqlite"
    assert names == dict.fromkeys([base, f"{base}-wal", f"{base}-shm", f"{base}.lock", f"{base}.mark"], 0o600)


@pytest.mark.parametrize(("durability", "synchronous"), [("full", 2), ("normal", 1)])
def test_durability_is_what_was_asked_for(path: Path, durability: str, synchronous: int) -> None:
    with closing(SqliteJournal(path, durability=durability)) as journal:  # type: ignore[arg-type]
        connection = journal._connection
        assert connection is not None
        assert connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_name_with_odd_characters_is_just_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a b%20?mode=ro#[x]*" / "journal[1].sqlite"
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(1)], ())
    with closing(SqliteJournal(path)) as journal:
        assert journal.load(0).events == (note(1),)


def test_accounting_can_be_asked_in_sql(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append((), [ENDED])
    [row] = query(
        path,
        "SELECT lease_id, owner, worker_id, host, gpu_count, memory_mb, fence, requested_at, granted_at, ended_at, "
        "reason, gpus FROM ended_lease",
    )
    assert row[:-1] == (
        *("a", "alice", "w1", "box", 2, 8000.0, 8, 1700000003.125, 1700000004.0, 1700000006.0, "holder_died"),
    )
    assert json.loads(str(row[-1])) == [["box", "GPU-0"], ["box", "GPU-1"]]
    [plan] = query(path, "EXPLAIN QUERY PLAN SELECT * FROM ended_lease WHERE ended_at > 5")
    assert "ended_lease_by_ended_at" in str(plan)


def test_events_can_be_looked_at_in_sql(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append(EVENTS, ())
    rows = query(path, "SELECT at, kind FROM event ORDER BY position")
    assert rows == [(event.at, type(event).__name__) for event in EVENTS]


def test_the_file_stops_growing_with_compaction(path: Path) -> None:
    sizes = []
    with closing(SqliteJournal(path)) as journal:
        for _ in range(4):
            for _ in range(20):
                journal.append([note(number) for number in range(100)], ())
            journal.compact([note(1)])
            assert Path(f"{path}-wal").stat().st_size == 0
            sizes.append(path.stat().st_size)
    assert sizes[-1] <= sizes[0]


def test_the_oldest_ended_leases_are_pruned_by_compaction(path: Path) -> None:
    with closing(SqliteJournal(path, most_ended=3)) as journal:
        journal.append((), [ended(f"lease{number}") for number in range(10)])
        assert len(journal.load(100).ended) == 10
        journal.compact(())
        assert [lease.id for lease in journal.load(100).ended] == ["lease7", "lease8", "lease9"]


def test_every_named_query_is_one_statement_that_fits_the_tables(path: Path) -> None:
    SqliteJournal(path).close()
    assert len(load_queries("gpu_worker_pool.ledger.sqlite")) == 28
    with closing(sqlite3.connect(path)) as connection:
        for sql in load_queries("gpu_worker_pool.ledger.sqlite").values():
            count = 2 if "?1" in sql else sql.count("?")
            connection.execute(f"EXPLAIN {sql}", [None] * count)


# The lock


def test_a_second_process_is_told_who_has_it(path: Path) -> None:
    with children.running("hold", path) as (child, said):
        assert said == {"pid": child.pid}
        with pytest.raises(JournalInUse, match=f"in use by the process with pid {child.pid}; use that") as caught:
            SqliteJournal(path)
        assert caught.value.pid == child.pid
        assert str(path) in str(caught.value)
        assert "GPU_POOL_STATE_DIR" not in str(caught.value), "two servers for the same GPUs are no way out"
    SqliteJournal(path).close()


def test_one_process_cannot_open_it_twice(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        with pytest.raises(JournalInUse) as caught:
            SqliteJournal(path)
        assert caught.value.pid == os.getpid()
        journal.append([note(1)], ())  # the first is none the worse for it
        assert journal.load(0).events == (note(1),)


def test_a_lock_whose_holder_did_not_sign_is_a_lock(path: Path) -> None:
    with closing(SqliteJournal(path)):
        Path(f"{path}.lock").write_text("")
        with pytest.raises(JournalInUse, match="another process") as caught:
            SqliteJournal(path)
        assert caught.value.pid is None


def test_sigkill_frees_the_lock(path: Path) -> None:
    with children.running("hold", path) as (child, _):
        child.kill()
        child.wait()
        assert Path(f"{path}.lock").read_text() == f"{child.pid}\n"  # left behind, and locks nobody out
        SqliteJournal(path).close()


def test_neither_programs_nor_forks_inherit_the_lock(path: Path) -> None:
    with children.running("hold_with_children", path) as (child, said):
        with pytest.raises(JournalInUse):
            SqliteJournal(path)  # the fork has not let go of it for its parent
        child.kill()
        child.wait()
        for pid in (said["forked"], said["program"]):
            os.kill(pid, 0)  # still there
        SqliteJournal(path).close()


# Versions


def test_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    with closing(SqliteJournal(path, migrations=(*known_migrations(), NEXT))) as journal:
        journal.append([note(1)], ())
    before = path.read_bytes()
    with pytest.raises(JournalError, match=f"version {NEXT.version}, this one knows {NEXT.version - 1}") as caught:
        SqliteJournal(path)
    assert not isinstance(caught.value, JournalDamaged)
    assert path.read_bytes() == before
    assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.name}.lock", f"{path.name}.mark"}


def test_an_older_version_is_migrated_and_a_copy_kept(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append(EVENTS, [ended("a")])
    later = Migration(NEXT.version + 1, "INSERT INTO extra VALUES (7);")
    with closing(SqliteJournal(path, migrations=(*known_migrations(), NEXT, later))) as journal:
        assert journal.load(10) == History(EVENTS, (ended("a"),))
        assert journal.events_since_compaction == len(EVENTS)
    assert query(path, "PRAGMA user_version") == [(later.version,)]
    assert query(path, "SELECT a FROM extra") == [(7,)]
    copy = Path(f"{path}.version-{NEXT.version - 1}")
    assert mode(copy) == 0o600
    assert query(copy, "PRAGMA user_version") == [(NEXT.version - 1,)]
    copy.rename(path)  # and can be put back
    with closing(SqliteJournal(path)) as journal:
        assert journal.load(10) == History(EVENTS, (ended("a"),))


def test_a_current_file_is_not_copied(path: Path) -> None:
    SqliteJournal(path).close()
    SqliteJournal(path).close()
    assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.name}.lock", f"{path.name}.mark"}


def test_a_migration_that_fails_changes_nothing(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(1)], ())
    wrong = Migration(NEXT.version, "CREATE TABLE extra (a);\nINSERT INTO nowhere VALUES (1);")
    with pytest.raises(JournalError, match="nowhere") as caught:
        SqliteJournal(path, migrations=(*known_migrations(), wrong))
    assert not isinstance(caught.value, JournalDamaged)
    assert query(path, "SELECT count(*) FROM sqlite_master WHERE name = 'extra'") == [(0,)]
    with closing(SqliteJournal(path)) as journal:
        assert journal.load(0).events == (note(1),)


def test_migrations_are_numbered_without_gaps() -> None:
    assert [migration.version for migration in known_migrations()] == list(range(1, len(known_migrations()) + 1))


# When it cannot be written


def test_a_limit_on_the_disk_is_told_in_words_and_gets_over(path: Path) -> None:
    status, said = children.run("starve", path)

    assert status == 0
    *attempts, after = said
    assert len(attempts) == 4
    for attempt in attempts:
        assert attempt["kind"] == "JournalError", attempt
        assert str(path.parent) in attempt["failed"]
    assert after == {"events": [1.0], "since": 1}
    with closing(SqliteJournal(path)) as journal:
        assert journal.load(10) == History((note(1), note(2), note(3)), (ended("a"), ended("b")))
        assert journal.events_since_compaction == 3
    assert {file.name for file in path.parent.iterdir() if "damaged" in file.name} == set()


@pytest.mark.parametrize(
    "write",
    [
        lambda journal: journal.append([note(number) for number in range(2000)], [ended("b")]),
        lambda journal: journal.compact([note(number) for number in range(2000)]),
    ],
    ids=["append", "compact"],
)
def test_a_full_disk_is_told_in_words_and_gets_over(path: Path, write: Callable[[SqliteJournal], None]) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(1)], [ended("a")])
        assert journal._connection is not None
        # SQLite answers as it does when the disk is full.
        journal._connection.execute("PRAGMA max_page_count = 12")
        for _ in range(2):
            with pytest.raises(JournalError, match=f"the disk is full: free space in {path.parent}"):
                write(journal)
            assert journal.load(10) == History((note(1),), (ended("a"),))
            assert journal.events_since_compaction == 1
        journal._connection.execute("PRAGMA max_page_count = 1000000")
        write(journal)
        assert len(journal.load(10).events) >= 2000


def test_a_program_that_holds_it_locked_is_waited_out(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalError, match="another program holds it locked"):
            journal.append([note(1)], ())
        other.execute("ROLLBACK")
        journal.append([note(1)], ())
        assert journal.load(0).events == (note(1),)


def test_a_failure_in_the_middle_leaves_nothing_behind(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        with pytest.raises(OverflowError):
            journal.append([note(1)], [ended("a"), replace(ENDED, fence=2**63)])  # more than a column holds
        assert journal.load(10) == History()
        journal.append([note(2)], [ended("b")])
        assert journal.load(10) == History((note(2),), (ended("b"),))


def test_a_reader_does_not_keep_it_from_compacting(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal, closing(sqlite3.connect(path, isolation_level=None)) as reader:
        journal.append([note(1)], ())
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM event").fetchone() == (1,)
        journal.compact(COMPACTED)
        assert numbers(journal.load(0).events) == [int(event.at) for event in COMPACTED]


def test_a_folder_that_cannot_be_made_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="rights"):
        SqliteJournal(tmp_path / "file" / "journal.sqlite")


def test_a_folder_in_its_place_is_told_in_words(path: Path) -> None:
    path.mkdir()
    with pytest.raises(JournalError, match="cannot be opened") as caught:
        SqliteJournal(path)
    assert not isinstance(caught.value, JournalDamaged)
    assert path.is_dir()


def test_failing_to_open_leaves_it_unlocked(path: Path) -> None:
    path.mkdir()
    with pytest.raises(JournalError):
        SqliteJournal(path)
    path.rmdir()
    SqliteJournal(path).close()


def test_repr(path: Path) -> None:
    journal = SqliteJournal(path)
    journal.append([note(1)], ())
    assert repr(journal) == f"<SqliteJournal {path}: full, 1 events since the last compaction>"
    journal.close()
    assert repr(journal) == f"<SqliteJournal {path}: full, closed>"
