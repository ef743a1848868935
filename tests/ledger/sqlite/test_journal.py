"""The journal on disk: its files, its lock, its versions, and what happens when it cannot be written."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from zlib import crc32

import pytest

from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.ledger.accounts import SqliteAccounts
from gpu_worker_pool.ledger.journal import History, JournalDamaged, JournalError, JournalInUse, JournalTooNew
from gpu_worker_pool.ledger.sqlite.backup import back_up
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from tests.ledger import children
from tests.ledger.child import COMPACTED
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
    assert names == dict.fromkeys([base, f"{base}-wal", f"{base}-shm", f"{base}.lock"], 0o600)


@pytest.mark.parametrize(("durability", "synchronous"), [("full", 2), ("normal", 1)])
def test_durability_is_what_was_asked_for(path: Path, durability: str, synchronous: int) -> None:
    with closing(SqliteJournal(path, durability=durability)) as journal:  # type: ignore[arg-type]
        connection = journal._file.connection()
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


def test_the_file_and_its_log_stop_growing_with_compaction(path: Path) -> None:
    sizes = []
    with closing(SqliteJournal(path, durability="normal")) as journal:
        for _ in range(20):
            for _ in range(20):
                journal.append([note(number) for number in range(100)], ())
            journal.compact([note(1)])
            sizes.append(path.stat().st_size + Path(f"{path}-wal").stat().st_size)
    assert sizes[-1] < 1.05 * sizes[6] < 4 * sizes[1], "written were twenty times what a round writes"


def test_the_oldest_ended_leases_are_pruned_by_compaction(path: Path) -> None:
    with closing(SqliteJournal(path, most_ended=3)) as journal:
        journal.append((), [ended(f"lease{number}") for number in range(10)])
        assert len(journal.load(100).ended) == 10
        journal.compact(())
        assert [lease.id for lease in journal.load(100).ended] == ["lease7", "lease8", "lease9"]


def test_every_named_query_is_one_statement_that_fits_the_tables(path: Path) -> None:
    SqliteJournal(path).close()
    with closing(sqlite3.connect(path)) as connection:
        for sql in SqliteAccounts.queries.values():
            count = max((number for number in range(1, 7) if f"?{number}" in sql), default=sql.count("?"))
            connection.execute(f"EXPLAIN {sql}", [None] * count)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_no_position_is_used_twice(path: Path, left: int) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(number) for number in range(3)], ())
        journal.compact([note(number) for number in range(left)])
    with closing(SqliteJournal(path)) as journal:
        assert journal.events_since_compaction == 0
        journal.append([note(8)], ())
        assert journal.events_since_compaction == 1
    positions = [position for (position,) in query(path, "SELECT position FROM event ORDER BY position")]
    assert positions == list(range(4, 4 + left + 1))


def test_a_start_reads_what_it_needs_and_not_the_whole_file(path: Path) -> None:
    """A page of old accounting is not read, so a large file starts as fast as a small one. A backup finds what is wrong."""
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(1)], [ended(f"lease{number}") for number in range(500)])
    whole = bytearray(path.read_bytes())
    page = whole.index(b'{"id":"lease3"') // 4096
    whole[page * 4096 : page * 4096 + 8] = b"\xff" * 8
    path.write_bytes(whole)

    with closing(SqliteJournal(path)) as journal:
        assert journal.load(10).ended[-1].id == "lease499"
    with pytest.raises(JournalDamaged):
        back_up(path, path.with_name("backup"), PoolSettings())


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


def test_sigkill_frees_the_lock(path: Path) -> None:
    with children.running("hold", path) as (child, _):
        child.kill()
        child.wait()
        assert Path(f"{path}.lock").read_text().split()[0] == str(child.pid)  # left behind, and locks nobody out
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


def names(path: Path) -> set[str]:
    return {file.name for file in path.parent.iterdir()}


def test_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(1)], ())
    query(path, "PRAGMA user_version = 2")
    before, files = path.read_bytes(), names(path)
    with pytest.raises(JournalTooNew, match=r"version 2, this one knows 1.*install the newer one"):
        SqliteJournal(path)
    assert (path.read_bytes(), names(path)) == (before, files)


@pytest.mark.parametrize("version", [1, 5, 9])
def test_an_unreleased_version_is_refused_with_what_to_do_and_left_alone(path: Path, version: int) -> None:
    """Those had numbers up to 5, and no application id."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "CREATE TABLE event (position INTEGER PRIMARY KEY, at REAL, kind TEXT, body TEXT, crc INTEGER)"
        )
        connection.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"unreleased version.*left as it is: .*then move the file away") as caught:
        SqliteJournal(path)
    assert not isinstance(caught.value, JournalDamaged)
    assert (path.read_bytes(), names(path)) == (before, {path.name, f"{path.name}.lock"})


NEWER = {
    "a new kind": {"kind": "SomethingNew", "at": 1.0, "x": 1},
    "a new field": {"kind": "NodeForgotten", "at": 1.0, "node": "box", "colour": "red"},
    "a new table": {"kind": "Configured", "at": 1.0, "table": "colours", "key": ["x"], "value": "red"},
}


@pytest.mark.parametrize("event", NEWER)
def test_an_event_of_a_newer_version_is_too_new_and_no_damage(path: Path, event: str) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(1)], [ended("a")])
    body = json.dumps(NEWER[event])
    [(crc,)] = query(path, "SELECT crc FROM event")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "INSERT INTO event (position, body, crc) VALUES (2, ?, ?)", (body, crc32(body.encode(), int(str(crc))))
        )

    for _ in range(2):
        with (
            closing(SqliteJournal(path)) as journal,
            pytest.raises(JournalTooNew, match="newer version of this program"),
        ):
            journal.load(10)
    with pytest.raises(JournalTooNew, match="newer version of this program"):
        back_up(path, path.with_name("backup"), PoolSettings())
    assert not [name for name in names(path) if "damaged" in name or "backup" in name]


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
        connection = journal._file.connection()
        # SQLite answers as it does when the disk is full.
        connection.execute("PRAGMA max_page_count = 12")
        for _ in range(2):
            with pytest.raises(JournalError, match=f"the disk is full: free space in {path.parent}"):
                write(journal)
            assert journal.load(10) == History((note(1),), (ended("a"),))
            assert journal.events_since_compaction == 1
        connection.execute("PRAGMA max_page_count = 1000000")
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
        query(path, "CREATE TRIGGER no BEFORE INSERT ON ended_lease BEGIN SELECT RAISE(ABORT, 'by another hand'); END")
        with pytest.raises(JournalError, match="by another hand"):
            journal.append([note(1)], [ended("a")])
        query(path, "DROP TRIGGER no")
        assert journal.load(10) == History()
        journal.append([note(2)], [ended("b")])
        assert journal.load(10) == History((note(2),), (ended("b"),))


def test_whatever_fails_while_it_is_compacted_is_told_as_a_trouble_of_the_journal(path: Path) -> None:
    with closing(SqliteJournal(path, most_ended=1)) as journal:
        journal.append([note(1)], [ended("a"), ended("b")])
        query(path, "CREATE TRIGGER no BEFORE DELETE ON event BEGIN SELECT RAISE(ABORT, 'by another hand'); END")
        with pytest.raises(JournalError, match="by another hand"):
            journal.compact([note(2)])
        query(path, "DROP TRIGGER no")
        query(path, "CREATE TRIGGER no BEFORE DELETE ON ended_lease BEGIN SELECT RAISE(ABORT, 'by another hand'); END")
        journal.compact([note(2)])  # what is pruned later must not fail a compaction that was made
        query(path, "DROP TRIGGER no")
        assert journal.load(10) == History((note(2),), (ended("a"), ended("b")))
        for number in range(8):
            journal.append([note(number)], ())
        assert [lease.id for lease in journal.load(10).ended] == ["b"]


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
