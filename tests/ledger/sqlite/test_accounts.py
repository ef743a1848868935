"""The journal tells the accounting all that belongs to a span of time."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.accounting.usage import LeaseTimes, UsageAccount, UsageTotals
from gpu_worker_pool.core.model.lease import EndedLease, EndReason
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.ledger.sql_files import load_queries
from gpu_worker_pool.ledger.sqlite.accounts import SqliteAccounts
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from tests.core.accounting.lease_times import ENDS, NOW, count, many, some_times
from tests.ledger.examples import GPU, OTHER, note

H = 3600.0


# The journal


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accounts") / "journal.sqlite"


@pytest.fixture(scope="module")
def shared_journal(shared_path: Path) -> Iterator[SqliteJournal]:
    with closing(SqliteJournal(shared_path, durability="normal")) as journal:
        yield journal


def ended_lease(lease_id: str, lease: LeaseTimes) -> EndedLease:
    wishes = Wishes(memory_mb=1000.0 if lease.is_shared else None)
    return EndedLease(
        lease_id,
        Request(wishes, Holder(owner=lease.owner)),
        (GPU, OTHER, GPU)[: lease.gpu_count],
        1,
        nan if lease.requested_at is None else lease.requested_at,
        lease.granted_at,
        nan if lease.ended_at is None else lease.ended_at,
        EndReason.RELEASED,
    )


def a_lease(lease_id: str, *, ended_at: float = 300.0) -> EndedLease:
    return ended_lease(lease_id, LeaseTimes("ada", 1, False, 100.0, 200.0, ended_at))


def total(path: Path, since: float = 0.0) -> UsageTotals:
    return SqliteAccounts(path).count(lambda: UsageAccount(since, None, NOW))[0].total()


def complete_since(path: Path) -> float | None:
    return SqliteAccounts(path).count(lambda: UsageAccount(0.0, None, NOW))[1]


@settings(max_examples=40, deadline=None)
@given(found=many, since=some_times, until=some_times | st.none())
def test_the_journal_tells_all_that_belongs_to_a_span(
    shared_journal: SqliteJournal, shared_path: Path, found: list[LeaseTimes], since: float, until: float | None
) -> None:
    if until is not None and until <= since:
        since, until = until, since + 1
    # A time is written where it is one, and NULL where it is no number; an infinite end nobody writes.
    over = [
        lease._replace(is_live=False, ended_at=lease.ended_at if lease.ended_at in ENDS else None) for lease in found
    ]
    with closing(sqlite3.connect(shared_path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM ended_lease")
    shared_journal.append((), [ended_lease(str(number), lease) for number, lease in enumerate(over)])
    account, lost_before = SqliteAccounts(shared_path).count(lambda: UsageAccount(since, until, NOW))
    assert lost_before is None
    assert account.by_owner == count(over, since, until).by_owner


def test_reading_a_span_goes_by_the_index(path: Path) -> None:
    SqliteJournal(path).close()
    with closing(sqlite3.connect(path)) as connection:
        plan = connection.execute(
            f"EXPLAIN QUERY PLAN {load_queries('gpu_worker_pool.ledger.sqlite')['read_ended_within']}", [0.0] * 2
        ).fetchall()
    steps = [step for *_, step in plan]
    assert any("ended_lease_by_ended_at (ended_at>?)" in step for step in steps), steps
    assert not any("SCAN" in step for step in steps), steps


class WritingMeanwhile:
    """Asked in the middle of reading which leases to leave out; has the journal written to just then."""

    def __init__(self, journal: SqliteJournal) -> None:
        self.journal = journal
        self.written = 0

    def __contains__(self, lease_id: object) -> bool:
        self.written += 1
        self.journal.append([note(self.written)], [a_lease(f"new-{self.written}")])
        self.journal.compact([note(self.written)])
        return lease_id == "a"


def test_the_writer_does_not_wait_for_the_reader_and_the_reader_sees_one_moment(path: Path) -> None:
    with closing(SqliteJournal(path, most_ended=2)) as journal:
        journal.append((), [a_lease("a"), a_lease("b"), a_lease("c")])
        meanwhile = WritingMeanwhile(journal)

        def begin() -> UsageAccount:
            journal.append((), [a_lease("too late")])
            return UsageAccount(0.0, None, NOW)

        account, lost_before = SqliteAccounts(path).count(begin, but_for=meanwhile)
        assert (meanwhile.written, lost_before) == (3, None)
        assert account.total().leases == 2  # b and c; a was left out, the others came later
        assert journal.load(10).events == (note(3),)
        assert [lease.id for lease in journal.load(10).ended] == ["new-2", "new-3"]
    with closing(SqliteJournal(path)) as journal:  # and nothing of it harms the next start
        assert journal.load(10).events == (note(3),)


def test_what_was_pruned_is_told_by_the_latest_of_it_though_the_clock_was_set_back(path: Path) -> None:
    with closing(SqliteJournal(path, most_ended=2)) as journal:
        journal.append((), [a_lease(str(number), ended_at=300.0 + number) for number in range(2)])
        journal.compact(())
        assert complete_since(path) is None
        journal.append((), [a_lease("2", ended_at=250.0), a_lease("3", ended_at=260.0)])
        journal.compact(())
        assert total(path).leases == 2
        assert complete_since(path) == 301.0
        journal.append((), [a_lease("4", ended_at=270.0), a_lease("5", ended_at=400.0)])
        journal.compact(())
    assert complete_since(path) == 301.0  # 250 and 260 are gone as well, and that is before


def test_what_was_lost_with_a_damaged_file_is_told(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append((), [a_lease("a")])
        journal.replace_damaged([note(1)])
        assert total(path) == UsageTotals()
        lost_at = complete_since(path)
        assert lost_at is not None
        assert abs(lost_at - path.stat().st_mtime) < H


@pytest.mark.parametrize(("first", "expected"), [(1, None), (5, 300.0)])
def test_a_journal_from_before_accounting_tells_what_it_can(path: Path, first: int, expected: float | None) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append((), [a_lease("a"), replace(a_lease("b"), ended_at=400.0)])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE ended_lease SET position = position + 100")
        connection.execute("UPDATE ended_lease SET position = position - 101 + ?", (first,))
        connection.execute("DROP TABLE accounting")
        connection.execute("DROP TABLE identity")
        connection.execute("PRAGMA user_version = 1")
        connection.commit()
    SqliteJournal(path).close()
    assert complete_since(path) == expected
    assert total(path).leases == 2


def no_journal(path: Path) -> Iterator[str]:
    yield "cannot be opened"
    path.write_bytes(b"no database, but long enough to be looked at " * 100)
    yield "damaged"


def test_what_cannot_be_read_is_told_in_words_and_made_by_nobody(path: Path) -> None:
    for words in no_journal(path):
        with pytest.raises(JournalError, match=words):
            complete_since(path)
    path.unlink()
    assert list(path.parent.iterdir()) == []
