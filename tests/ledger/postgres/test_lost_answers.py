"""The network loses an answer, the writer is stopped or killed in the middle: nothing is written twice, nothing by halves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gpu_worker_pool.ledger.journal import JournalError, OutcomeUnknown
from gpu_worker_pool.ledger.postgres.hosts import RawConnection
from tests.ledger.children import ROOT
from tests.ledger.examples import ended, note
from tests.ledger.postgres.by_position import ByPosition
from tests.ledger.postgres.child import BATCH
from tests.ledger.postgres.proxy import LossyProxy, lossy
from tests.ledger.postgres.test_leadership import lead, written


@pytest.fixture
async def proxy(shared_url: str) -> AsyncIterator[LossyProxy]:
    async with lossy(shared_url) as proxy:
        yield proxy


@pytest.fixture
async def behind(proxy: LossyProxy, database: ByPosition, pool: str) -> AsyncIterator[ByPosition]:
    """The same pool, through the proxy. It has led and written one event, so its statements are prepared."""
    behind = ByPosition(f"{proxy.url}?connect_timeout=0.3", pool, command_timeout_s=0.3)
    await behind.open()
    await lead(behind)
    assert await behind.write(1, "t1", 0, "b0", [note(0)], ()) == 1
    yield behind
    await behind.close()


async def test_a_commit_whose_answer_was_lost_is_known_by_its_batch_and_not_written_twice(
    proxy: LossyProxy, behind: ByPosition, database: ByPosition
) -> None:
    proxy.cuts_at_answer = True
    with pytest.raises(OutcomeUnknown, match=r"connection was closed.*not known whether"):
        await behind.write(1, "t1", 1, "b1", [note(1)], [ended("a")])
    assert await behind.write(1, "t1", 1, "b1", [note(1)], [ended("a")]) is None
    row = await behind.read_leader()
    assert (row.epoch, row.term, row.end.position, row.batch) == (1, "t1", 2, "b1"), "it was written"
    assert await behind.write(1, "t1", 2, "b2", [note(2)], ()) == 3
    assert await written(database) == [0, 1, 2]
    assert await database.load_ended(10) == (ended("a"),)


async def test_an_append_that_never_arrived_is_written_by_the_next_try(
    proxy: LossyProxy, behind: ByPosition, database: ByPosition
) -> None:
    connections = proxy.accepted
    proxy.requests.clear()
    with pytest.raises(OutcomeUnknown, match="did not answer in time"):
        await behind.write(1, "t1", 1, "b1", [note(1)], ())
    assert await written(database) == [0]
    proxy.requests.set()
    head = await behind.write(1, "t1", 1, "b1", [note(1)], ())
    row = await behind.read_leader()
    # What was held back may have arrived first.
    assert (head, row.end.position, row.batch) in {(2, 2, "b1"), (None, 2, "b1")}
    assert proxy.accepted == connections + 1, "it was connected again, and no request to cancel was sent"
    assert await written(database) == [0, 1]


async def test_an_answer_that_comes_too_late_costs_the_connection_and_not_the_journal(
    proxy: LossyProxy, behind: ByPosition, database: ByPosition
) -> None:
    proxy.answers.clear()
    with pytest.raises(OutcomeUnknown, match="did not answer in time"):
        await behind.write(1, "t1", 1, "b1", [note(1)], ())
    with pytest.raises(JournalError) as caught:
        await behind.read_leader()
    assert not isinstance(caught.value, OutcomeUnknown), "reading changes nothing, and nothing was connected"
    proxy.answers.set()
    assert (await behind.read_leader()).batch == "b1"
    assert await written(database) == [0, 1]


async def test_a_claim_whose_answer_was_lost_is_known_by_its_term(
    proxy: LossyProxy, behind: ByPosition, database: ByPosition
) -> None:
    await behind.hand_over(1, "t1")
    proxy.cuts_at_answer = True
    with pytest.raises(OutcomeUnknown):
        await behind.claim("t2", "box", "http://box", 0)
    assert await behind.claim("t2", "box", "http://box", 0) is None
    row = await behind.read_leader()
    assert (row.epoch, row.term) == (2, "t2")
    assert await behind.write(2, "t2", row.end.position, "b1", [note(1)], ()) == 2
    assert await written(database) == [0, 1]


async def test_a_caller_that_gives_up_leaves_nothing_open(
    proxy: LossyProxy, behind: ByPosition, admin: RawConnection, pool: str
) -> None:
    proxy.requests.clear()
    append = asyncio.ensure_future(behind.write(1, "t1", 1, "b1", [note(1)], ()))
    await proxy.has_request.wait()
    append.cancel()
    with pytest.raises(asyncio.CancelledError):
        await append
    proxy.requests.set()
    assert (await behind.read_leader()).end.position in {1, 2}
    await admin.execute("SELECT 1 FROM gpu_pool.leader WHERE pool = $1 FOR UPDATE NOWAIT", pool)


async def test_connections_that_the_server_ended_are_opened_again(behind: ByPosition, admin: RawConnection) -> None:
    await admin.execute(
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
        "WHERE application_name = 'gpu-pool' AND datname = 'shared' AND pid <> pg_backend_pid()"
    )
    for ask in (behind.read_leader, lambda: behind.read(0, 10), lambda: behind.write(1, "t1", 1, "b", (), ())):
        try:
            await ask()
        except JournalError as error:
            assert "connection" in str(error)  # noqa: PT017 - only if the end was not seen yet
            await ask()
    assert await written(behind) == [0]


# Real processes


@asynccontextmanager
async def running(url: str, pool: str, failpoint: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "GPU_POOL_FAILPOINT": failpoint}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.ledger.postgres.child", url, pool),
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@pytest.mark.parametrize(
    ("failpoint", "appended", "batches", "snapshot"),
    [
        ("before_append:3", 2, 2, 6),
        ("after_append:3", 2, 3, 6),
        ("in_compaction:2", 4, 4, 6),
        ("after_compaction:2", 4, 4, 12),
    ],
)
async def test_a_leader_that_is_killed_leaves_whole_batches(
    database: ByPosition,
    shared_url: str,
    pool: str,
    failpoint: str,
    appended: int,
    batches: int,
    snapshot: int,
) -> None:
    async with running(shared_url, pool, failpoint) as child:
        output, _ = await child.communicate()
        said = [json.loads(line) for line in output.splitlines()]
    assert child.returncode == -signal.SIGKILL
    assert len([line for line in said if "appended" in line]) == appended
    row = await database.read_leader()
    assert (row.end.position, row.batch) == (batches * BATCH, f"b{batches - 1}")
    found = await database.load_snapshot()
    assert found is not None
    assert (found.end.position, len(found.events)) == (snapshot, snapshot)
    later = await database.read(snapshot, 100)
    assert [int(stored.event.at) for stored in later] == list(range(snapshot, batches * BATCH))
    assert len(await database.load_ended(100)) == batches
