"""Events are numbered by the journal, and no number is used twice. Before version 5 SQLite numbered them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.ledger.sqlite.migrations import known_migrations
from tests.ledger.examples import note, numbers


def positions(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as connection:
        return [position for (position,) in connection.execute("SELECT position FROM event ORDER BY position")]


def write_old(path: Path) -> None:
    """Four events in a journal of version 4, as that version wrote them."""
    SqliteJournal(path, migrations=known_migrations()[:4]).close()
    with closing(SqliteJournal(path, migrations=known_migrations()[:4])) as journal:
        journal.append([note(number) for number in range(4)], ())


def compact_to_nothing(path: Path) -> None:
    """As version 4 did: only SQLite's sequence knows how far it was written."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM event")
        connection.execute("UPDATE compaction SET compacted_to = 0")


def test_an_old_journal_keeps_its_events_and_goes_on(path: Path) -> None:
    write_old(path)

    with closing(SqliteJournal(path)) as journal:
        journal.append([note(4)], ())
    with closing(SqliteJournal(path)) as journal:
        assert numbers(journal.load(9).events) == [0, 1, 2, 3, 4]

    assert positions(path) == [1, 2, 3, 4, 5]
    assert positions(Path(f"{path}.version-4")) == [1, 2, 3, 4]


def test_an_old_journal_that_was_compacted_to_nothing_goes_on_behind_its_last_event(path: Path) -> None:
    write_old(path)
    compact_to_nothing(path)

    with closing(SqliteJournal(path)) as journal:
        journal.append([note(7)], ())

    assert positions(path) == [5]


def test_no_page_is_written_only_to_count(path: Path) -> None:
    write_old(path)
    SqliteJournal(path).close()

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_sequence").fetchall() == []


@pytest.mark.parametrize("left", [0, 1, 2])
def test_positions_go_on_after_a_compaction(path: Path, left: int) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(number) for number in range(3)], ())
        journal.compact([note(number) for number in range(left)])
    with closing(SqliteJournal(path)) as journal:
        assert journal.events_since_compaction == 0
        journal.append([note(8)], ())
        assert journal.events_since_compaction == 1

    assert positions(path) == list(range(4, 4 + left + 1))
