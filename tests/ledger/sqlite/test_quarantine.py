"""Damage is noticed, set aside, and never begun anew over in silence."""

from __future__ import annotations

import random
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gpu_worker_pool.ledger.journal import History, JournalDamaged, JournalError
from gpu_worker_pool.ledger.sqlite.file import isolate
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from tests.ledger.examples import EVENTS, ended, note

PAGE = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal with a few pages of events, closed."""
    path = tmp_path / "journal.sqlite"
    write(path)
    return path


def write(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        for number in range(0, 300, 10):
            journal.append([note(number + offset) for offset in range(10)], [ended(f"lease{number}")])
        journal.append(EVENTS, ())


def load(path: Path) -> History:
    with closing(SqliteJournal(path)) as journal:
        return journal.load(1000)


def damaged(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.damaged-*"))


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def flip_in_an_event(path: Path) -> None:
    offset = path.read_bytes().index(b'"owner":"program 123"') + 12
    overwrite(path, offset, b"q")


def flip_in_an_ended_lease(path: Path) -> None:
    offset = path.read_bytes().index(b'{"id":"lease120"') + 8
    overwrite(path, offset, b"q")


def break_a_page(path: Path) -> None:
    offset = path.read_bytes().index(b"program 123") // PAGE * PAGE
    overwrite(path, offset, b"\xff" * 8)


def lose_a_row(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM event WHERE position = 17")


def swap_two_rows(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE event SET position = -17 WHERE position = 17")
        connection.execute("UPDATE event SET position = 17 WHERE position = 18")
        connection.execute("UPDATE event SET position = 18 WHERE position = -17")


def write_what_cannot_be_read(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE event SET body = x'ff' || body WHERE position = 17")


def lose_a_table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE event")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped in an event": flip_in_an_event,
    "flipped in an ended lease": flip_in_an_ended_lease,
    "a broken page": break_a_page,
    "a lost row": lose_a_row,
    "rows swapped": swap_two_rows,
    "no text": write_what_cannot_be_read,
    "a lost table": lose_a_table,
    "zeros": lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    "text": lambda path: path.write_bytes(b"not a database, but long enough to be one" * 300),
    "three pages left": lambda path: path.write_bytes(path.read_bytes()[: 3 * PAGE]),
    "part of a page left": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "part of the header left": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "emptied": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed_set_aside_and_kept_in_sight_until_somebody_acts(path: Path, damage: str) -> None:
    DAMAGES[damage](path)
    content = path.read_bytes()

    with pytest.raises(JournalDamaged) as first:
        load(path)

    [file] = damaged(path)
    assert re.fullmatch(r"journal\.sqlite\.damaged-\d{8}T\d{6}Z", file.name)
    assert file.read_bytes() == content
    assert not path.exists()
    # Every further start says the same, as often as it is tried.
    for _ in range(2):
        with pytest.raises(JournalDamaged) as again:
            SqliteJournal(path)
        for message in (str(first.value), str(again.value)):
            assert str(file) in message
            assert "no longer known" in message
            assert f"make sure that no process still uses the GPUs, then move that file out of {path.parent}" in message
    assert damaged(path) == [file]
    # Done as advised, it begins anew.
    file.rename(path.parent.parent / file.name)
    assert load(path) == History()


def test_nothing_that_was_set_aside_is_overwritten(path: Path) -> None:
    path.write_bytes(b"one" * 1000)
    first, second = isolate(path), None
    path.write_bytes(b"two" * 1000)
    Path(f"{path}-wal").write_bytes(b"log")
    second = isolate(path)

    assert first is not None
    assert second is not None
    assert first.read_bytes() == b"one" * 1000
    assert second.read_bytes() == b"two" * 1000
    assert Path(f"{second}-wal").read_bytes() == b"log"
    assert isolate(path) is None


def test_the_log_goes_with_its_file(path: Path, tmp_path: Path) -> None:
    """Killed with a log beside the file, and damaged after: both are kept, as they are."""
    copy = tmp_path / "copy" / "journal.sqlite"
    copy.parent.mkdir()
    with closing(SqliteJournal(path)) as journal:
        journal.append([note(1000)], ())
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    assert load(path).events[-1] == note(1000)
    flip_in_an_event(copy)
    log = Path(f"{copy}-wal").read_bytes()

    with pytest.raises(JournalDamaged):
        load(copy)

    file, its_log = damaged(copy)
    assert its_log.name == f"{file.name}-wal"
    assert its_log.read_bytes() == log
    assert {entry.name for entry in copy.parent.iterdir()} == {file.name, its_log.name, "journal.sqlite.lock"}


def test_a_log_without_its_file_is_no_beginning(tmp_path: Path) -> None:
    """As left by somebody who was killed while setting aside: a new file would be ruined by it."""
    path = tmp_path / "journal.sqlite"
    Path(f"{path}-wal").write_bytes(b"of another")
    with pytest.raises(JournalDamaged):
        SqliteJournal(path)
    [file] = damaged(path)
    assert file.read_bytes() == b"of another"


def test_whatever_byte_is_flipped_no_other_history_is_told(path: Path, tmp_path: Path) -> None:
    """Either what was written, or an error: of every page the beginning, and bytes here and there."""
    whole = path.read_bytes()
    truth = load(path)
    rng = random.Random(5)
    offsets = [page + byte for page in range(0, len(whole), PAGE) for byte in (0, 3, 5, 8, 9)]
    offsets += [rng.randrange(len(whole)) for _ in range(150)] + list(range(0, 100, 3))
    noticed = 0
    for number, offset in enumerate(offsets):
        copy = tmp_path / str(number) / "journal.sqlite"
        copy.parent.mkdir()
        copy.write_bytes(whole[:offset] + bytes([whole[offset] ^ (1 << rng.randrange(8))]) + whole[offset + 1 :])
        try:
            found = load(copy)
            assert found.events == truth.events, offset
            assert set(found.ended) <= set(truth.ended), offset
        except JournalError:
            noticed += 1
    assert noticed > 100


# While it is in use


def break_every_page(path: Path, journal: SqliteJournal) -> None:
    """All but the first, and what SQLite still has of them in memory is forgotten."""
    journal._file.connection().execute("PRAGMA shrink_memory")
    for page in range(1, path.stat().st_size // PAGE):
        overwrite(path, page * PAGE, b"\xff" * 200)


@pytest.mark.parametrize("how", ["append", "compact"])
def test_damage_while_in_use_is_told_and_replaced(path: Path, how: str) -> None:
    with closing(SqliteJournal(path)) as journal:
        break_every_page(path, journal)
        for _ in range(2):
            with pytest.raises(JournalDamaged, match="is damaged"):
                journal.append([note(1)], ()) if how == "append" else journal.compact([note(1)])
        content = path.read_bytes()

        journal.replace_damaged([note(7)])

        [file] = (file for file in damaged(path) if not file.name.endswith("-wal"))
        assert file.read_bytes() == content
        journal.append([note(8)], [ended("z")])
        assert journal.load(10) == History((note(7), note(8)), (ended("z"),))
    # There is a journal, so what was set aside does not keep it from starting.
    assert load(path) == History((note(7), note(8)), (ended("z"),))


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_that_is_gone_is_not_written_to_any_more(path: Path, how: str) -> None:
    """SQLite would go on writing to where nobody ever finds it."""
    with closing(SqliteJournal(path)) as journal:
        if how == "replaced":
            shutil.copy(path, f"{path}.copy")
            Path(f"{path}.copy").rename(path)
        else:
            path.unlink()
        for attempt in (lambda: journal.append([note(1)], ()), lambda: journal.compact(()), lambda: journal.load(0)):
            with pytest.raises(JournalDamaged, match="deleted, moved or replaced"):
                attempt()
        journal.replace_damaged([note(7)])
        journal.append([note(8)], ())
    assert load(path).events == (note(7), note(8))
