"""The database tells the accounting all that belongs to a span of time, as a file of SQLite does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.accounts import Accounts, SqliteAccounts
from gpu_worker_pool.ledger.journal import JournalDamaged, JournalError
from gpu_worker_pool.ledger.postgres import database as postgres_database
from gpu_worker_pool.ledger.postgres.accounts import PostgresAccounts
from gpu_worker_pool.ledger.postgres.hosts import RawConnection
from gpu_worker_pool.ledger.postgres.url import parse_url
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from tests.ledger import examples, plain_usage
from tests.ledger.plain_usage import NODE, NOW, Past, many, spans
from tests.ledger.postgres.by_position import ByPosition
from tests.ledger.postgres.conftest import execute
from tests.ledger.postgres.server import PostgresServer
from tests.ledger.postgres.test_leadership import lead
from tests.ledger.sqlite.test_accounts import a_lease


class TwoPlaces:
    """The same ended leases in PostgreSQL and in a file."""

    def __init__(self, runner: asyncio.Runner, url: str, path: Path) -> None:
        self._runner = runner
        self._url = url
        self._database = ByPosition(url, "accounts")
        runner.run(self._database.open())
        runner.run(lead(self._database))
        self._journal = SqliteJournal(path, durability="normal")
        self.both: tuple[Accounts, Accounts] = (self._database.accounts(), SqliteAccounts(path))

    def replace(self, leases: list[EndedLease]) -> None:
        self._runner.run(execute(self._url, "DELETE FROM gpu_pool.ended_lease WHERE pool = 'accounts'"))
        self._runner.run(self._database.write(1, "t1", 0, "b", (), leases))
        self._journal._file.connection().execute("DELETE FROM ended_lease")
        self._journal.append((), leases)

    def close(self) -> None:
        self._runner.run(self._database.close())
        self._journal.close()


@pytest.fixture(scope="module")
def two_places(server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoPlaces]:
    path = tmp_path_factory.mktemp("accounts") / "journal.sqlite"
    with asyncio.Runner() as runner, closing(TwoPlaces(runner, server.url("shared"), path)) as places:
        yield places


@settings(max_examples=40, deadline=None)
@given(found=many, spans=spans, node=st.sampled_from([None, NODE]))
def test_both_tell_all_that_belongs_to_a_span(
    two_places: TwoPlaces, found: list[Past], spans: list[tuple[float, float | None]], node: str | None
) -> None:
    two_places.replace([lease.ended(str(number)) for number, lease in enumerate(found)])
    live = [lease.live(str(number), node) for number, lease in enumerate(found) if lease.is_live]
    expected = [plain_usage.usage(found, span, node) for span in spans]
    for accounts in two_places.both:
        assert accounts.usage(spans, lambda: NOW, live, node) == (expected, (NOW, None))
    first, second = (accounts.held(600.0, lambda: NOW, live, node, most=3) for accounts in two_places.both)
    assert first[1:] == second[1:]
    assert [lease.ended_at for lease in first[0]] == [lease.ended_at for lease in second[0]]


@settings(max_examples=20, deadline=None)
@given(st.lists(examples.ended_leases, max_size=3))
def test_whatever_can_be_written_can_be_added_up(two_places: TwoPlaces, leases: list[EndedLease]) -> None:
    two_places.replace(leases)
    for accounts in two_places.both:
        accounts.usage([(0.0, None)], lambda: NOW)


@pytest.fixture
async def leading(shared_url: str, pool: str) -> AsyncIterator[ByPosition]:
    database = ByPosition(shared_url, pool, most_ended=2)
    await database.open()
    await lead(database)
    yield database
    await database.close()


async def complete_since(database: ByPosition) -> float | None:
    _, moment = await asyncio.to_thread(database.accounts().usage, [(0.0, None)], lambda: NOW)
    return moment.complete_since


async def test_the_reader_sees_one_moment_and_the_writer_does_not_wait(leading: ByPosition) -> None:
    await leading.write(1, "t1", 0, "b1", (), [a_lease(name) for name in "abc"])
    loop = asyncio.get_running_loop()

    def write_meanwhile() -> float:
        later = leading.write(1, "t1", 0, "b2", (), [a_lease("too late")])
        asyncio.run_coroutine_threadsafe(later, loop).result()
        asyncio.run_coroutine_threadsafe(leading.snapshot(0, ()), loop).result()
        return NOW

    (found,), moment = await asyncio.to_thread(leading.accounts().usage, [(0.0, None)], write_meanwhile)
    assert (found["ada"].leases, moment.complete_since) == (3, None)
    assert [lease.id for lease in await leading.load_ended(10)] == ["c", "too late"]


async def test_what_was_pruned_is_told_by_the_latest_of_it_though_the_clock_was_set_back(
    leading: ByPosition,
) -> None:
    ends = [(300.0, 301.0), (250.0, 260.0), (270.0, 400.0)]
    told = []
    for number, pair in enumerate(ends):
        leases = [a_lease(f"{number}-{end}", ended_at=end) for end in pair]
        await leading.write(1, "t1", 0, f"b{number}", (), leases)
        await leading.snapshot(0, ())
        told.append(await complete_since(leading))
    assert told == [None, 301.0, 301.0]


async def test_very_many_are_pruned_in_small_steps(leading: ByPosition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_database, "PRUNED_AT_ONCE", 2)
    await leading.write(1, "t1", 0, "b", (), [a_lease(str(end), ended_at=float(end)) for end in range(300, 307)])
    await leading.snapshot(0, ())
    assert [lease.id for lease in await leading.load_ended(10)] == ["305", "306"]
    assert await complete_since(leading) == 304.0


async def test_reading_a_span_goes_by_the_index(leading: ByPosition, admin: RawConnection) -> None:
    await admin.execute("SET enable_seqscan = off")
    plan = await admin.fetch(
        "EXPLAIN SELECT lease_id, body FROM gpu_pool.ended_lease WHERE pool = 'x' AND ended_at BETWEEN 5 AND 6"
    )
    assert "ended_lease_by_ended_at" in str(plan)


async def test_a_lease_that_was_altered_and_a_database_that_is_away_are_told_in_words(
    leading: ByPosition, admin: RawConnection, pool: str
) -> None:
    await leading.write(1, "t1", 0, "b1", (), [a_lease("a")])
    await admin.execute("UPDATE gpu_pool.ended_lease SET body = 'x' WHERE pool = $1", pool)
    with pytest.raises(JournalDamaged, match=r"in the database postgresql://admin@.*is damaged: not JSON"):
        await asyncio.to_thread(leading.accounts().held, NOW, lambda: NOW, most=10)
    nowhere = PostgresAccounts(parse_url("postgresql://ada:s3cret@127.0.0.1:1/pool"), "pool")
    with pytest.raises(
        JournalError, match=r"postgresql://ada@127.0.0.1:1/pool cannot be used: nothing listens"
    ) as caught:
        await asyncio.to_thread(nowhere.usage, [(0.0, None)], lambda: NOW)
    assert "s3cret" not in f"{caught.value!r} {nowhere!r}"
