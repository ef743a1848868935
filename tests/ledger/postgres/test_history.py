"""What is read back is what was written: damage is noticed, and a snapshot stands for what came before it."""

from __future__ import annotations

import logging
import zlib

import pytest

from gpu_worker_pool.ledger.journal import HistoryChanged, JournalDamaged, JournalError, JournalTooNew
from gpu_worker_pool.ledger.postgres.hosts import RawConnection
from tests.ledger.examples import ended, note
from tests.ledger.postgres.by_position import ByPosition
from tests.ledger.postgres.test_leadership import lead, written


async def append(database: ByPosition, first: int, last: int) -> None:
    events = [note(number) for number in range(first, last + 1)]
    assert await database.write(1, "t1", first - 1, f"b{first}", events, [ended(f"lease{first}")]) == last


@pytest.fixture
async def written_to(database: ByPosition) -> ByPosition:
    """The notes 1 to 10, each at its own position, in five batches."""
    await lead(database)
    for first in range(1, 11, 2):
        await append(database, first, first + 1)
    return database


async def loaded(database: ByPosition) -> tuple[object, ...] | None:
    """The end of the newest snapshot, and its only event."""
    found = await database.load_snapshot()
    return None if found is None else (found.end.position, *found.events)


# Reading


async def test_events_are_read_in_pieces(written_to: ByPosition) -> None:
    first = await written_to.read(0, 4)
    second = await written_to.read(4, 4)
    third = await written_to.read(8, 4)
    stored = [*first, *second, *third]
    assert [event.end.position for event in stored] == list(range(1, 11))
    assert [int(event.event.at) for event in stored] == list(range(1, 11))
    assert await written_to.read(10, 4) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            "UPDATE gpu_pool.event SET body = replace(body, '5', '6') WHERE pool = $1 AND position = 5",
            "position 5.*altered",
        ),
        ("UPDATE gpu_pool.event SET epoch = 7 WHERE pool = $1 AND position = 5", "position 5.*altered"),
        ("UPDATE gpu_pool.event SET crc = crc + 1 WHERE pool = $1 AND position = 5", "position 5.*altered"),
        ("DELETE FROM gpu_pool.event WHERE pool = $1 AND position = 5", "the event at position 5 is missing"),
        ("DELETE FROM gpu_pool.event WHERE pool = $1 AND position BETWEEN 4 AND 6", "events 4 to 6 are missing"),
        ("DELETE FROM gpu_pool.event WHERE pool = $1 AND position < 3", "event 1 is not there"),
        ("DELETE FROM gpu_pool.event WHERE pool = $1 AND position > 8", "events 9 to 10 are missing"),
        ("DELETE FROM gpu_pool.event WHERE pool = $1", "event 1 is not there"),
        ("UPDATE gpu_pool.leader SET head = 8 WHERE pool = $1", "events follow the last one"),
        (
            (
                "UPDATE gpu_pool.event AS e SET body = o.body FROM gpu_pool.event AS o "
                "WHERE e.pool = $1 AND o.pool = $1 AND e.position IN (3, 4) AND o.position = 7 - e.position"
            ),
            "position 3.*altered",
        ),
        ("DELETE FROM gpu_pool.leader WHERE pool = $1", "no longer there"),
    ],
)
async def test_damage_is_noticed_and_said(
    written_to: ByPosition, admin: RawConnection, pool: str, damage: str, words: str
) -> None:
    await admin.execute(damage, pool)
    with pytest.raises(JournalDamaged, match=f"{words}.*restore the database from a backup.*GPU_POOL_FLEET_POOL"):
        await written_to.read(0, 100)


async def test_damage_at_the_border_of_two_pieces_is_noticed(
    written_to: ByPosition, admin: RawConnection, pool: str
) -> None:
    assert len(await written_to.read(0, 4)) == 4
    await admin.execute("DELETE FROM gpu_pool.event WHERE pool = $1 AND position = 5", pool)
    with pytest.raises(JournalDamaged, match="the event at position 5 is missing"):
        await written_to.read(4, 4)


async def test_an_ended_lease_that_was_altered_is_noticed(
    written_to: ByPosition, admin: RawConnection, pool: str
) -> None:
    await admin.execute("UPDATE gpu_pool.ended_lease SET body = body || ' ' WHERE pool = $1", pool)
    with pytest.raises(JournalDamaged, match="an ended lease"):
        await written_to.load_ended(10)


NEWER = '{"kind":"GpuPainted","at":10.0,"colour":"red"}'
INSTALL_IT = r"was written by a newer version.*{}.*install the newer one on this machine.*does not lead"


async def test_an_event_of_a_newer_version_is_not_damage(
    written_to: ByPosition, other: ByPosition, admin: RawConnection, pool: str
) -> None:
    crc = await admin.fetchval("SELECT crc FROM gpu_pool.event WHERE pool = $1 AND position = 9", pool)
    crc = zlib.crc32(f"1 {NEWER}".encode(), crc)
    newer = "UPDATE gpu_pool.event SET body = $2, crc = $3 WHERE pool = $1 AND position = 10"
    await admin.execute(newer, pool, NEWER, crc)
    assert len(await other.read(0, 9)) == 9
    with pytest.raises(JournalTooNew, match=INSTALL_IT.format("position 10.*GpuPainted")):
        await other.read(9, 100)


async def test_what_a_newer_version_wrote_of_an_ended_lease_is_not_damage(
    written_to: ByPosition, admin: RawConnection, pool: str
) -> None:
    body = await admin.fetchval("SELECT body FROM gpu_pool.ended_lease WHERE pool = $1 LIMIT 1", pool)
    newer = body.replace("{", '{"colour":"red",', 1)
    change = "UPDATE gpu_pool.ended_lease SET body = $2, crc = $3 WHERE pool = $1 AND body = $4"
    await admin.execute(change, pool, newer, zlib.crc32(newer.encode()), body)
    with pytest.raises(JournalTooNew, match=INSTALL_IT.format("an ended lease.*colour")):
        await written_to.load_ended(10)


async def test_a_past_that_was_written_again_is_noticed(
    written_to: ByPosition,
    other: ByPosition,
    admin: RawConnection,
    pool: str,
) -> None:
    """The database failed over to a standby that was behind, and another leader wrote on."""
    known = await other.end_at(10)
    await admin.execute("DELETE FROM gpu_pool.event WHERE pool = $1 AND position > 8", pool)
    await admin.execute(
        "UPDATE gpu_pool.leader SET head = 8, crc = e.crc FROM gpu_pool.event AS e "
        "WHERE leader.pool = $1 AND e.pool = $1 AND e.position = 8",
        pool,
    )
    assert await written_to.write(1, "t1", 10, "b99", [note(99)], ()) is None
    assert await written_to.write(1, "t1", 8, "b99", [note(n) for n in (99, 100, 101)], ()) == 11
    with pytest.raises(HistoryChanged, match="event 10 is not the one of the snapshot"):
        await other.write_snapshot(known, [note(10)])
    assert await other.load_snapshot() is None, "a state of another past is not kept"
    with pytest.raises(HistoryChanged, match=r"event 10 is another one.*lost commits"):
        await other.read_events(known, 100)
    assert await written(other) == [*range(1, 9), 99, 100, 101]


# Snapshots


async def test_a_snapshot_and_the_events_after_it_are_the_history(written_to: ByPosition) -> None:
    await written_to.snapshot(6, [note(60)])
    assert await loaded(written_to) == (6, note(60))
    assert [stored.end.position for stored in await written_to.read(6, 100)] == [7, 8, 9, 10]
    assert await written(written_to) == list(range(1, 11)), "the only snapshot may be damaged, so all events stay"


async def test_two_snapshots_stay_and_what_the_older_one_covers_is_pruned(
    written_to: ByPosition, other: ByPosition, admin: RawConnection, pool: str
) -> None:
    for position in (4, 6, 9):
        await written_to.snapshot(position, [note(position)])
    rows = await admin.fetch("SELECT position FROM gpu_pool.snapshot WHERE pool = $1 ORDER BY position", pool)
    assert [row[0] for row in rows] == [6, 9]
    first = await admin.fetchval("SELECT min(position) FROM gpu_pool.event WHERE pool = $1", pool)
    assert first == 7
    with pytest.raises(HistoryChanged, match=r"event 4 is not there.*a snapshot has replaced events"):
        await other.read(3, 100)
    assert [stored.end.position for stored in await other.read(6, 100)] == [7, 8, 9, 10]
    assert [stored.end.position for stored in await other.read(9, 100)] == [10]
    await append(written_to, 11, 12)
    assert [stored.end.position for stored in await other.read(10, 100)] == [11, 12]


async def test_a_snapshot_at_the_head_replaces_all_events(written_to: ByPosition) -> None:
    await written_to.snapshot(9, [note(9)])
    await written_to.snapshot(10, ())
    await written_to.snapshot(10, [note(10)])
    assert await loaded(written_to) == (10, note(10))
    assert await written_to.read(10, 100) == []
    await append(written_to, 11, 12)
    assert [stored.end.position for stored in await written_to.read(10, 100)] == [11, 12]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE gpu_pool.snapshot SET body = set_byte(body, 5, get_byte(body, 5) # 1) WHERE pool = $1 AND position = 9",
        "UPDATE gpu_pool.snapshot SET body = substr(body, 1, 10) WHERE pool = $1 AND position = 9",
        "UPDATE gpu_pool.snapshot SET body_crc = 0 WHERE pool = $1 AND position = 9",
    ],
)
async def test_a_damaged_snapshot_falls_back_to_the_one_before_and_says_so(
    written_to: ByPosition, admin: RawConnection, pool: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for position in (4, 6, 9):
        await written_to.snapshot(position, [note(position)])
    await admin.execute(damage, pool)
    with caplog.at_level(logging.WARNING):
        assert await loaded(written_to) == (6, note(6))
    assert "snapshot at position 9" in caplog.text
    assert "is damaged" in caplog.text
    assert [stored.end.position for stored in await written_to.read(6, 100)] == [7, 8, 9, 10]


async def test_if_no_snapshot_is_whole_the_events_are_read_unless_they_were_pruned(
    written_to: ByPosition, admin: RawConnection, pool: str
) -> None:
    spoil = "UPDATE gpu_pool.snapshot SET body_crc = 0 WHERE pool = $1"
    await written_to.snapshot(4, [note(4)])
    await admin.execute(spoil, pool)
    assert await written_to.load_snapshot() is None
    assert await written(written_to) == list(range(1, 11))
    await written_to.snapshot(6, [note(6)])
    await admin.execute(spoil, pool)
    with pytest.raises(JournalDamaged, match=r"no snapshot is whole.*restore the database"):
        await written_to.load_snapshot()


async def test_a_snapshot_of_a_newer_version_is_passed_over_while_the_events_are_there(
    written_to: ByPosition, admin: RawConnection, pool: str
) -> None:
    body = zlib.compress(NEWER.encode())
    newer = "UPDATE gpu_pool.snapshot SET body = $2, body_crc = $3 WHERE pool = $1 AND position >= $4"
    for position in (4, 6, 9):
        await written_to.snapshot(position, [note(position)])
    await admin.execute(newer, pool, body, zlib.crc32(body), 9)
    assert await loaded(written_to) == (6, note(6))
    await admin.execute(newer, pool, body, zlib.crc32(body), 0)
    with pytest.raises(JournalTooNew, match=INSTALL_IT.format("position 6.*GpuPainted")):
        await written_to.load_snapshot()


@pytest.mark.parametrize("position", [3, 11])
async def test_a_snapshot_of_what_is_not_there_is_refused(written_to: ByPosition, position: int) -> None:
    for last in (4, 6):
        await written_to.snapshot(last, [note(last)])
    with pytest.raises(JournalError, match=f"event {position} is not the one of the snapshot"):
        await written_to.snapshot(position, [note(position)])
    assert await loaded(written_to) == (6, note(6))
