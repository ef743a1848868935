"""Killed at every boundary: what was acknowledged is there, what was not is there as a whole or not at all."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.host.state_dir import FAILPOINTS
from gpu_worker_pool.ledger.journal import History
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from tests.ledger import children
from tests.ledger.child import BATCH, COMPACTED
from tests.ledger.examples import note

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
    elsewhere = {"in_backup", "in_replacement"}  # tests/cli/commands/test_backup.py
    tried = {name.split(":")[0] for name, *_ in WRITING} | {"in_creation", "after_creation"}
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


@pytest.mark.parametrize("failpoint", ["in_creation", "after_creation"])
def test_killed_while_a_new_journal_is_made(tmp_path: Path, failpoint: str) -> None:
    path = tmp_path / "journal"

    status, said = children.run("write", path, failpoint)

    assert (status, said) == (-signal.SIGKILL, [])
    assert not path.exists()  # nobody takes half a journal for a whole one
    assert history(path) == History()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["journal", "journal.lock"]
