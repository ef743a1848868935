"""The journal tells the accounting all that belongs to a span of time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndedLease, EndReason
from gpu_worker_pool.ledger.accounts import SqliteAccounts, UsageTotals
from gpu_worker_pool.ledger.journal import JournalDamaged, JournalError
from gpu_worker_pool.ledger.sqlite.journal import APPENDS_PER_STEP, PRUNED_AT_ONCE, SqliteJournal
from tests.ledger import plain_usage
from tests.ledger.examples import note
from tests.ledger.plain_usage import NODE, NOW, Past, many, spans

H = 3600.0


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accounts") / "journal.sqlite"


@pytest.fixture(scope="module")
def shared_journal(shared_path: Path) -> Iterator[SqliteJournal]:
    with closing(SqliteJournal(shared_path, durability="normal")) as journal:
        yield journal


def a_lease(lease_id: str, *, ended_at: float = 300.0) -> EndedLease:
    return Past("ada", (GpuKey(NODE, "0"),), False, 100.0, 200.0, ended_at, EndReason.RELEASED).ended(lease_id)


def total(path: Path, since: float = 0.0) -> UsageTotals:
    (found,), _ = SqliteAccounts(path).usage([(since, None)], lambda: NOW)
    totals = UsageTotals()
    for usage in found.values():
        totals.add(usage)
    return totals


def complete_since(path: Path) -> float | None:
    return SqliteAccounts(path).usage([(0.0, None)], lambda: NOW)[1].complete_since


@settings(max_examples=150, deadline=None)
@given(found=many, spans=spans, node=st.sampled_from([None, NODE]))
def test_the_journal_adds_up_all_that_belongs_to_each_span(
    shared_journal: SqliteJournal,
    shared_path: Path,
    found: list[Past],
    spans: list[tuple[float, float | None]],
    node: str | None,
) -> None:
    with closing(sqlite3.connect(shared_path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM ended_lease")
    # One that ends while the live ones are looked at is written as ended, too.
    shared_journal.append((), [lease.ended(str(number)) for number, lease in enumerate(found)])
    live = [lease.live(str(number), node) for number, lease in enumerate(found) if lease.is_live]
    counted, moment = SqliteAccounts(shared_path).usage(spans, lambda: NOW, live, node)
    assert moment == (NOW, None)
    assert counted == [plain_usage.usage(found, span, node) for span in spans]


@pytest.mark.parametrize("query", ["usage", "read_held", "count_unknown_holds"])
def test_reading_a_span_goes_by_the_index(path: Path, query: str) -> None:
    SqliteJournal(path).close()
    with closing(sqlite3.connect(path)) as connection:
        sql = SqliteAccounts.queries[query]
        count = max(number for number in range(1, 7) if f"?{number}" in sql)
        plan = connection.execute(f"EXPLAIN QUERY PLAN {sql}", [None] * count).fetchall()
    steps = [step for *_, step in plan]
    assert any("ended_lease_by_ended_at (ended_at>" in step for step in steps), steps
    assert not any("SCAN ended_lease" in step for step in steps), steps


def test_the_writer_does_not_wait_for_the_reader_and_the_reader_sees_one_moment(path: Path) -> None:
    with closing(SqliteJournal(path, most_ended=2)) as journal:
        journal.append((), [a_lease("a"), a_lease("b"), a_lease("c")])

        def write_meanwhile() -> float:
            """Asked for the time when the reader has begun."""
            journal.append([note(1)], [a_lease("too late")])
            journal.compact([note(3)])
            return NOW

        (found,), moment = SqliteAccounts(path).usage([(0.0, None)], write_meanwhile)
        assert (found["ada"].leases, moment.complete_since) == (3, None)
        assert journal.load(10).events == (note(3),)
        assert [lease.id for lease in journal.load(10).ended] == ["c", "too late"]
    with closing(SqliteJournal(path)) as journal:  # and nothing of it harms the next start
        assert journal.load(10).events == (note(3),)


def test_an_id_that_is_used_again_leaves_its_former_lease_in_the_accounts(path: Path) -> None:
    former = a_lease("a")
    again = replace(former, requested_at=400.0, granted_at=500.0, ended_at=700.0)
    with closing(SqliteJournal(path)) as journal:
        journal.append((), [former])
        journal.append((), [again, again])
        assert (total(path).leases, total(path).gpu_s) == (2, 300.0)
        live = Past("ada", former.gpus, False, 800.0, 800.0, NOW, EndReason.RELEASED).live("a", None)
        (found,), _ = SqliteAccounts(path).usage([(0.0, None)], lambda: NOW, [live])
        assert (found["ada"].leases, found["ada"].gpu_s) == (3, 500.0)


def test_an_owner_that_is_not_unicode_is_shown(path: Path) -> None:
    lease = a_lease("a")
    odd = replace(lease, request=replace(lease.request, holder=replace(lease.request.holder, owner="\ud800x")))
    with closing(SqliteJournal(path)) as journal:
        journal.append((), [odd])
        assert journal.load(1).ended == (odd,)
    (found,), _ = SqliteAccounts(path).usage([(0.0, None)], lambda: NOW)
    (owner,) = found
    assert owner is not None
    assert owner.endswith("x")
    owner.encode()


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


def test_very_many_are_pruned_in_small_steps(path: Path) -> None:
    """No client waits for the deletion of all of them."""
    with closing(SqliteJournal(path, durability="normal", most_ended=5)) as journal:
        journal.append((), [a_lease(str(number), ended_at=300.0 + number) for number in range(2 * PRUNED_AT_ONCE + 7)])
        journal.compact(())
        left = [len(journal.load(10_000).ended)]
        assert left == [PRUNED_AT_ONCE + 7]
        for number in range(2 * APPENDS_PER_STEP):
            journal.append([note(number)], ())
            left.append(len(journal.load(10_000).ended))
    assert max(before - after for before, after in pairwise(left)) == PRUNED_AT_ONCE
    assert left[-1] == 5
    assert complete_since(path) == 300.0 + 2 * PRUNED_AT_ONCE + 1


def test_what_was_lost_with_a_damaged_file_is_told(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append((), [a_lease("a")])
        journal.replace_damaged([note(1)])
        assert total(path) == UsageTotals()
        lost_at = complete_since(path)
        assert lost_at is not None
        assert abs(lost_at - path.stat().st_mtime) < H


# The leases that held GPUs


def held(path: Path, *, most: int = 100, **times: float) -> tuple[list[str], int]:
    leases, unknown, _ = SqliteAccounts(path).held(times.get("span_s", 100.0), lambda: NOW, most=most)
    return [lease.id for lease in leases], unknown


@pytest.mark.parametrize(
    ("granted_at", "ended_at"), [(None, NOW), (NOW - 5, NOW - 6), (NOW - 5, NOW + 1), (-1e12, NOW)]
)
def test_times_that_make_no_sense_are_counted_and_not_shown(
    path: Path, granted_at: float | None, ended_at: float
) -> None:
    lease = Past("ada", (GpuKey(NODE, "0"),), False, NOW - 50, granted_at, ended_at, EndReason.RELEASED)
    with closing(SqliteJournal(path)) as journal:
        journal.append((), [lease.ended("odd"), replace(a_lease("never granted"), gpus=(), granted_at=None)])
    assert held(path) == ([], 1)
    found, unknown, _ = SqliteAccounts(path).held(100.0, lambda: NOW, [lease.live("odd", None)], most=9)
    assert (found, unknown) == ([], 0)


def test_a_damaged_lease_is_told(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        journal.append((), [a_lease("a", ended_at=NOW)])
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("""UPDATE ended_lease SET body = replace(body, '"reason":"released"', '"reason":"bored"')""")
    with pytest.raises(JournalDamaged, match="'bored' is not a valid EndReason"):
        held(path)


def no_journal(path: Path) -> Iterator[str]:
    yield "cannot be opened"
    path.write_bytes(b"no database, but long enough to be looked at " * 100)
    yield "damaged"


@pytest.mark.parametrize("ask", [complete_since, held])
def test_what_cannot_be_read_is_told_in_words_and_made_by_nobody(path: Path, ask: Callable[[Path], object]) -> None:
    for words in no_journal(path):
        with pytest.raises(JournalError, match=words):
            ask(path)
    path.unlink()
    assert list(path.parent.iterdir()) == []
