"""One leads, by the clock of the database, and only the leader writes."""

from __future__ import annotations

import asyncio

import pytest

from gpu_worker_pool.core.fleet.leadership import LEADERSHIP_S, LeaderRow
from gpu_worker_pool.ledger.postgres.hosts import RawConnection
from tests.ledger.examples import ended, note
from tests.ledger.postgres.by_position import ByPosition


async def lead(database: ByPosition, term: str = "t1", *, seen_epoch: int = 0) -> LeaderRow:
    row = await database.claim(term, "box", "http://box", seen_epoch)
    assert row is not None
    return row


async def expire(admin: RawConnection, pool: str) -> None:
    await admin.execute("UPDATE gpu_pool.leader SET expires_at = clock_timestamp() WHERE pool = $1", pool)


async def written(database: ByPosition) -> list[int]:
    return [int(stored.event.at) for stored in await database.read(0, 1000)]


# Claiming


async def test_of_many_claims_at_once_one_wins(database: ByPosition, other: ByPosition) -> None:
    rows = await asyncio.gather(
        *(who.claim(f"t{number}", "box", "http://box", 0) for number, who in enumerate([database, other] * 4))
    )
    [winner] = [row for row in rows if row is not None]
    assert (await database.read_leader()).term == winner.term


async def test_an_epoch_rises_above_all_that_was_seen(database: ByPosition, admin: RawConnection, pool: str) -> None:
    assert (await lead(database)).epoch == 1
    await expire(admin, pool)
    assert (await lead(database, "t2", seen_epoch=7)).epoch == 8
    await expire(admin, pool)
    assert (await lead(database, "t3", seen_epoch=3)).epoch == 9


async def test_renewing_keeps_the_leadership_of_this_term_only(
    database: ByPosition, other: ByPosition, admin: RawConnection, pool: str
) -> None:
    row = await lead(database)
    await admin.execute("UPDATE gpu_pool.leader SET expires_at = expires_at - interval '1 s' WHERE pool = $1", pool)
    renewed = await database.renew(row.epoch, "t1")
    assert renewed is not None
    assert (await other.read_leader()).expires_in_s > LEADERSHIP_S - 1
    assert await other.renew(row.epoch, "t2") is None
    assert await other.renew(row.epoch + 1, "t1") is None
    await expire(admin, pool)
    assert await database.renew(row.epoch, "t1") is None, "another candidate may be claiming it"


async def test_handing_over_lets_another_candidate_claim_at_once(database: ByPosition, other: ByPosition) -> None:
    row = await lead(database)
    await other.hand_over(row.epoch, "t2")
    assert (await other.read_leader()).expires_in_s > 0, "it was not the other's to hand over"
    await database.hand_over(row.epoch, "t1")
    assert await database.write(row.epoch, "t1", 0, "b1", [note(1)], ()) is None
    assert (await lead(other, "t2")).epoch == 2


async def test_an_end_that_no_leader_can_have_set_does_not_block_a_claim(
    database: ByPosition, other: ByPosition, admin: RawConnection, pool: str
) -> None:
    """The clock of the database was set back by an hour, or another machine took over."""
    await lead(database)
    await admin.execute("UPDATE gpu_pool.leader SET expires_at = expires_at + interval '1 h' WHERE pool = $1", pool)
    assert (await other.read_leader()).expires_in_s == 0
    assert (await lead(other, "t2")).epoch == 2


# Appending


async def test_appending_moves_the_head_and_renews(
    database: ByPosition, other: ByPosition, admin: RawConnection, pool: str
) -> None:
    row = await lead(database)
    await admin.execute("UPDATE gpu_pool.leader SET expires_at = expires_at - interval '2 s' WHERE pool = $1", pool)
    assert await database.write(row.epoch, "t1", 0, "b1", [note(1), note(2)], [ended("a")]) == 2
    seen = await other.read_leader()
    assert (seen.end.position, seen.batch) == (2, "b1")
    assert seen.expires_in_s > LEADERSHIP_S - 2
    assert await written(other) == [1, 2]
    assert await other.load_ended(10) == (ended("a"),)


@pytest.mark.parametrize(
    ("epoch", "term", "head"),
    [(2, "t1", 1), (0, "t1", 1), (1, "t2", 1), (1, "t1", 0), (1, "t1", 2)],
    ids=["newer epoch", "older epoch", "other term", "older head", "newer head"],
)
async def test_without_the_epoch_the_term_or_the_head_nothing_is_written(
    database: ByPosition, epoch: int, term: str, head: int
) -> None:
    await lead(database)
    assert await database.write(1, "t1", 0, "b1", [note(1)], [ended("a")]) == 1
    before = await database.read_leader()
    assert await database.write(epoch, term, head, "b2", [note(2)], [ended("b")]) is None
    after = await database.read_leader()
    assert (after.end, after.batch) == (before.end, "b1")
    assert await written(database) == [1]
    assert await database.load_ended(10) == (ended("a"),)
    assert await database.write(1, "t1", 1, "b3", [note(3)], ()) == 2, "the leader goes on"
    assert await written(database) == [1, 3]


async def test_it_works_without_prepared_statements(shared_url: str, pool: str) -> None:
    """As through an old PgBouncer in transaction mode."""
    database = ByPosition(f"{shared_url}?statement_cache_size=0", pool)
    await database.open()
    await lead(database)
    for head in range(3):
        assert await database.write(1, "t1", head, f"b{head}", [note(head)], [ended("a")]) == head + 1
    assert await written(database) == [0, 1, 2]
    await database.close()


async def test_a_deposed_leader_writes_nothing(
    database: ByPosition, other: ByPosition, admin: RawConnection, pool: str
) -> None:
    await lead(database)
    await database.write(1, "t1", 0, "b1", [note(1)], ())
    await expire(admin, pool)
    row = await lead(other, "t2")
    assert (row.epoch, row.end.position) == (2, 1)
    assert await database.write(1, "t1", 1, "b2", [note(2)], [ended("a")]) is None
    assert await database.renew(1, "t1") is None
    await database.hand_over(1, "t1")
    assert await other.write(2, "t2", 1, "b3", [note(3)], ()) == 2
    assert await written(other) == [1, 3]
    assert [stored.epoch for stored in await other.read(0, 10)] == [1, 2]
    assert await other.load_ended(10) == ()


async def test_an_append_and_a_claim_that_meet_are_one_after_the_other(
    database: ByPosition, other: ByPosition, admin: RawConnection, pool: str
) -> None:
    """Both wait for the row. Whichever gets it first, what is in the journal is what the new leader knows."""
    await lead(database)
    for round_ in range(6):
        row = await database.read_leader()
        transaction = admin.transaction()
        await transaction.start()
        await admin.execute("UPDATE gpu_pool.leader SET expires_at = 'epoch' WHERE pool = $1", pool)
        append = asyncio.ensure_future(
            database.write(row.epoch, str(row.term), row.end.position, f"b{round_}", [note(round_)], ())
        )
        claim = asyncio.ensure_future(other.claim(f"other {round_}", "box 2", "http://box2", 0))
        await asyncio.sleep(0)
        await transaction.commit()
        head, claimed = await asyncio.gather(append, claim)
        assert (head is None) == (claimed is not None), "the append renews, so only one of them succeeds"
        if claimed is not None:
            assert claimed.end.position == row.end.position
        assert len(await written(other)) == (await other.read_leader()).end.position
