"""Each fault of the database is told in words that say what to do, without the password."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from gpu_worker_pool.ledger.journal import JournalDamaged, JournalError, OutcomeUnknown
from gpu_worker_pool.ledger.postgres.hosts import RawConnection
from tests.ledger.children import ROOT
from tests.ledger.examples import ended, note
from tests.ledger.postgres.by_position import ByPosition
from tests.ledger.postgres.conftest import execute
from tests.ledger.postgres.server import PostgresServer, free_port
from tests.ledger.postgres.test_leadership import lead, written

SECRET = "s3cret@%/"  # noqa: S105 - of this test
ESCAPED = "s3cret%40%25%2F"


async def refusal(url: str) -> str:
    database = ByPosition(url)
    with pytest.raises(JournalError) as caught:
        await database.open()
    await database.close()
    assert not isinstance(caught.value, OutcomeUnknown), "nothing was changed"
    assert "s3cret" not in f"{caught.value!r} {caught.value.__cause__!r} {database!r}"
    return str(caught.value)


@pytest.fixture(scope="module")
def locked(server: PostgresServer) -> PostgresServer:
    """With a role that needs its password, a role that may not connect often, and a database that is only read."""
    statements = (
        f"CREATE ROLE secret_role LOGIN SUPERUSER PASSWORD '{SECRET}'",
        "CREATE ROLE crowded LOGIN CONNECTION LIMIT 0",
        "CREATE DATABASE only_read",
        "ALTER DATABASE only_read SET default_transaction_read_only = on",
    )
    asyncio.run(execute(server.url(), *statements))
    return server


async def test_the_right_password_is_taken_however_it_is_written(locked: PostgresServer) -> None:
    plain = locked.url("shared", f"secret_role:{ESCAPED}")
    asked = f"{locked.url('shared', 'secret_role')}?password={ESCAPED}"
    for url in (plain, asked, plain.replace("%40", "@")):
        database = ByPosition(url, "secrets")
        await database.open()
        assert "s3cret" not in repr(database)
        await database.close()


@pytest.mark.parametrize(
    ("name", "login", "words"),
    [
        (
            "shared",
            "secret_role:s3cretwrong",
            "password authentication failed.*the password or the role is wrong: correct",
        ),
        ("shared", "nobody_here:s3cret", 'role "nobody_here" does not exist.*create it'),
        ("no_such_one", "admin:s3cret", 'database "no_such_one" does not exist.*createdb'),
        ("shared", "crowded:s3cret", "too many connections.*raise its max_connections"),
        (
            "only_read",
            "admin:s3cret",
            "can only be read: if it is a standby, name the primary.*turn default_transaction_read_only off",
        ),
        ("shared?sslmode=require", "admin:s3cret", "does not speak TLS: turn it on"),
        ("shared?sslmode=nonsense", "admin:s3cret", "a parameter of its URL is not right: check those after"),
        (
            "shared?sslmode=verify-ca&sslrootcert=/no/such.pem",
            "admin:s3cret",
            "a file that its URL names cannot be read",
        ),
        (
            "shared?no_such_setting=1",
            "admin:s3cret",
            'unrecognized configuration parameter "no_such_setting": it .* correct it',
        ),
    ],
)
async def test_a_refusal_says_what_to_do(locked: PostgresServer, name: str, login: str, words: str) -> None:
    said = await refusal(locked.url(name, login))
    assert f"the database postgresql://{login.partition(':')[0]}@127.0.0.1:" in said
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(said)


async def test_a_server_that_is_not_there_is_told_from_one_that_is_silent() -> None:
    said = await refusal(f"postgresql://ada:s3cret@127.0.0.1:{free_port()}/pool")
    assert "nothing listens there: check the host, the port" in said
    said = await refusal("postgresql://ada:s3cret@no-such-host.invalid/pool")
    assert "the host's name is not known" in said
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        said = await refusal(f"postgresql://ada:s3cret@127.0.0.1:{port}/pool?connect_timeout=0.1")
    assert "did not answer in time: check the network" in said


async def test_a_silent_or_missing_host_does_not_keep_from_the_next_one(server: PostgresServer, pool: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{server.port}"
        database = ByPosition(f"postgresql://admin@{hosts}/shared?connect_timeout=0.2", pool)
        await database.open()
        assert (await database.read_leader()).epoch == 0
        await database.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("53100", "the disk of the database is full: free space there"),
        ("53200", "too little memory"),
        ("25006", "can only be read"),
        ("40001", "it may be repeated"),
        ("26000", "add statement_cache_size=0 to the URL"),
        ("22003", r"\(code 22003\)"),
    ],
)
async def test_an_append_that_the_server_refuses_changes_nothing_and_may_be_repeated(
    database: ByPosition, admin: RawConnection, pool: str, code: str, words: str
) -> None:
    await lead(database)
    assert await database.write(1, "t1", 0, "b1", [note(1)], ()) == 1
    name = f'"refusal {pool}"'
    await admin.execute(
        f"CREATE FUNCTION gpu_pool.{name}() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$"
    )
    await admin.execute(
        f"CREATE TRIGGER {name} BEFORE INSERT ON gpu_pool.event FOR EACH ROW WHEN (new.pool = '{pool}') "
        f"EXECUTE FUNCTION gpu_pool.{name}()"
    )
    with pytest.raises(JournalError, match=words) as caught:
        await database.write(1, "t1", 1, "b2", [note(2)], [ended("a")])
    assert not isinstance(caught.value, OutcomeUnknown)
    assert (await database.read_leader()).batch == "b1"
    await admin.execute(f"DROP FUNCTION gpu_pool.{name}() CASCADE")
    assert await database.write(1, "t1", 1, "b2", [note(2)], [ended("a")]) == 2
    assert await written(database) == [1, 2]


async def test_a_server_that_ends_the_connection_may_have_committed(
    database: ByPosition, admin: RawConnection, pool: str
) -> None:
    """It ends one that waits for its synchronous standby after the commit, too."""
    await lead(database)
    transaction = admin.transaction()
    await transaction.start()
    await admin.execute("SELECT 1 FROM gpu_pool.leader WHERE pool = $1 FOR UPDATE", pool)
    append = asyncio.ensure_future(database.write(1, "t1", 0, "b1", [note(1)], ()))
    ended_one = False
    while not ended_one:
        ended_one = bool(
            await admin.fetchval(
                "SELECT count(pg_terminate_backend(pid)) > 0 FROM pg_stat_activity "
                "WHERE wait_event_type = 'Lock' AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"
            )
        )
    with pytest.raises(OutcomeUnknown, match=r"terminating connection.*not known whether"):
        await append
    await transaction.rollback()
    assert await database.write(1, "t1", 0, "b1", [note(1)], ()) == 1


async def test_a_pool_that_was_deleted_is_said_to_be_damaged(
    database: ByPosition, admin: RawConnection, pool: str
) -> None:
    await admin.execute("DELETE FROM gpu_pool.leader WHERE pool = $1", pool)
    with pytest.raises(JournalDamaged, match=r"no longer there.*restore"):
        await database.read_leader()


WITHOUT_ASYNCPG = """
import sys
sys.modules["asyncpg"] = None
import gpu_worker_pool.server.app, gpu_worker_pool.cli, gpu_worker_pool.client
"""


def test_only_a_fleet_needs_asyncpg() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_ASYNCPG], check=True, cwd=ROOT, timeout=60)
