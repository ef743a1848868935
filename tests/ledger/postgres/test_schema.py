"""The tables are created once, however many candidates start; the pool is the one that was meant."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from gpu_worker_pool.ledger.journal import JournalError, JournalTooNew
from gpu_worker_pool.ledger.postgres.accounts import QUERIES
from tests.ledger.examples import note
from tests.ledger.postgres.by_position import ByPosition
from tests.ledger.postgres.conftest import execute
from tests.ledger.postgres.server import PostgresServer
from tests.ledger.postgres.test_leadership import lead, written
from tests.ledger.postgres.test_lost_answers import running


@asynccontextmanager
async def opened(url: str, pool: str | None = None) -> AsyncIterator[ByPosition]:
    database = ByPosition(url, pool)
    try:
        await database.open()
        yield database
    finally:
        await database.close()


async def contents(url: str) -> list[tuple[object, ...]]:
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch(
            "SELECT table_name::text, column_name::text FROM information_schema.columns "
            "WHERE table_schema = 'gpu_pool' ORDER BY 1, 2"
        )
        return [tuple(row) for row in rows]
    finally:
        await connection.close()


# Tables


async def test_candidates_that_start_at_once_on_an_empty_database_agree(empty_url: str) -> None:
    candidates = [ByPosition(empty_url) for _ in range(5)]
    await asyncio.gather(*(candidate.open() for candidate in candidates))
    assert {(candidate.pool, len(candidate.pool_id)) for candidate in candidates} == {("pool", 16)}
    assert len({candidate.pool_id for candidate in candidates}) == 1
    claims = await asyncio.gather(
        *(candidate.claim(f"t{number}", "box", "http://box", 0) for number, candidate in enumerate(candidates))
    )
    assert len([row for row in claims if row is not None]) == 1
    await asyncio.gather(*(candidate.close() for candidate in candidates))


async def test_a_newer_version_is_refused_and_left_alone(empty_url: str) -> None:
    async with opened(empty_url):
        pass
    await execute(empty_url, "UPDATE gpu_pool.format SET version = 2")
    before = await contents(empty_url)
    with pytest.raises(JournalTooNew, match=r"newer version.*version 2, this one knows 1"):
        async with opened(empty_url, "another"):
            pass
    assert await contents(empty_url) == before


async def test_a_candidate_that_is_killed_while_it_creates_the_tables_leaves_none(empty_url: str) -> None:
    async with running(empty_url, "pool", "in_creation:1") as child:
        await child.wait()
    assert child.returncode == -signal.SIGKILL
    assert await contents(empty_url) == []
    async with running(empty_url, "pool", "after_creation:1") as child:
        await child.wait()
    async with opened(empty_url) as database:
        assert (await database.read_leader()).end.position == 0


async def test_every_named_query_fits_the_tables(empty_url: str) -> None:
    async with opened(empty_url):
        pass
    connection = await asyncpg.connect(empty_url)
    for sql in QUERIES.values():
        await connection.prepare(sql)
    await connection.close()


# Pools


async def test_the_only_pool_is_the_one_that_is_meant(empty_url: str) -> None:
    async with opened(empty_url, "blue") as first, opened(empty_url) as second:
        assert (second.pool, second.pool_id) == ("blue", first.pool_id)


async def test_of_several_pools_one_must_be_named_and_they_know_nothing_of_each_other(
    empty_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(empty_url) as first, opened(empty_url, "blue") as second:
        assert caplog.text.count("a new pool 'blue' was created") == 1
        assert "beside 'pool'; if you meant another" in caplog.text
        assert first.pool_id != second.pool_id
        for database in (first, second):
            await lead(database)
        await first.write(1, "t1", 0, "b1", [note(1)], ())
        await second.write(1, "t1", 0, "b1", [note(2), note(3)], ())
        await first.snapshot(1, [note(1)])
        assert (await written(first), await written(second)) == ([1], [2, 3])
        assert await second.load_snapshot() is None
    with pytest.raises(JournalError, match=r"several pools \(blue, pool\): set GPU_POOL_FLEET_POOL"):
        async with opened(empty_url):
            pass
    async with opened(empty_url, "pool") as again:
        assert again.pool_id == first.pool_id


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 101])
def test_an_odd_name_of_a_pool_is_refused(name: str) -> None:
    with pytest.raises(JournalError, match=r"GPU_POOL_FLEET_POOL is .* it must be a name of 1 to 100"):
        ByPosition("postgresql://host/pool", name)


# Rights


async def test_a_role_that_may_not_create_the_schema_is_told_so(server: PostgresServer, empty_url: str) -> None:
    await execute(empty_url, "CREATE ROLE clerk LOGIN")
    url = server.url("scratch", "clerk")
    with pytest.raises(JournalError, match=r"permission denied.*GRANT CREATE ON DATABASE"):
        async with opened(url):
            pass
    assert await contents(empty_url) == []
    async with opened(empty_url):
        pass
    grants = (
        "USAGE ON SCHEMA",
        "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA",
        "USAGE ON ALL SEQUENCES IN SCHEMA",
    )
    await execute(empty_url, *(f"GRANT {grant} gpu_pool TO clerk" for grant in grants))
    async with opened(url) as database:
        await lead(database)
        assert await database.write(1, "t1", 0, "b1", [note(1)], ()) == 1


# Servers and databases


async def test_a_database_that_cannot_hold_all_names_is_refused(server: PostgresServer) -> None:
    await execute(server.url(), "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    with pytest.raises(JournalError, match=r"has the encoding LATIN1; create one with the encoding UTF8"):
        async with opened(server.url("latin")):
            pass
    assert await contents(server.url("latin")) == []


async def test_appends_wait_for_the_disk_though_the_database_does_not_by_default(empty_url: str) -> None:
    for ordinary, here in (("off", "on"), ("remote_apply", "remote_apply")):
        await execute(empty_url, f"ALTER DATABASE scratch SET synchronous_commit = {ordinary}")
        async with opened(empty_url) as database:
            assert await database._commands.read(lambda raw: raw.fetchval("SHOW synchronous_commit"), 60.0) == here
