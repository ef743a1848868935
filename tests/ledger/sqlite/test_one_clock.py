"""Journals from before version 4, whose clock began again with every boot."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from math import isclose
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.ledger.driver import Driver
from gpu_worker_pool.ledger.journal import JournalDamaged
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.ledger.sqlite.migrations import known_migrations
from gpu_worker_pool.ledger.writer import InlineWriter
from tests.ledger import children

WALL = 1_700_000_000.0
REQUEST = (
    '{"wishes":{"gpus":1,"memory_mb":null,"model":null,"memory_threshold_percent":null,'
    '"utilization_threshold_percent":null},"holder":{"worker_id":null,"owner":"ada","host":null,"pid":null,'
    '"pid_started":null,"boot_id":null,"pid_namespace":null,"process":PROCESS},"priority":0,"ttl_s":600.0,"labels":[]}'
)
REMOTE, LOCAL = REQUEST.replace("PROCESS", "null"), REQUEST.replace("PROCESS", "[7,1.0]")
# The machine booted at 5,000 s of its clock, and its box had another name before. The reboot took 100 s, of which the
# clock after it says 20.
OLD = (
    f'{{"kind":"PoolOpened","at":5000.0,"boot_id":"boot1","wall_offset_s":{WALL}}}',
    '{"kind":"HistoryCondensed","at":5000.0,"fences":[["was",4]],"next_seq":9}',
    f'{{"kind":"LeaseQueued","at":5010.0,"lease_id":"local","request":{LOCAL},"seq":9,"requested_at":{WALL + 5010}}}',
    f'{{"kind":"LeaseGranted","at":5010.0,"lease_id":"local","gpus":[["was","GPU-0"]],"fence":5,"granted_at":{WALL + 5010}}}',
    f'{{"kind":"LeaseQueued","at":5020.0,"lease_id":"remote","request":{REMOTE},"seq":10,"requested_at":{WALL + 5020}}}',
    (
        f'{{"kind":"LeaseGranted","at":5020.0,"lease_id":"remote","gpus":[["was","GPU-1"]],"fence":6,"granted_at":{WALL + 5020},'
        '"limit":9020.0}'
    ),
    f'{{"kind":"LeaseQueued","at":5030.0,"lease_id":"waits","request":{REMOTE},"seq":11,"requested_at":{WALL + 5030}}}',
    (
        '{"kind":"GpusBooked","at":5040.0,"booking":{"id":"b1","gpus":[["was","GPU-1"]],'
        f'"starts_at":{WALL + 90_000},"ends_at":{WALL + 91_000},"owner":"ada","reason":"a course","by":"root"}}}}'
    ),
    f'{{"kind":"PoolOpened","at":20.0,"boot_id":"boot2","wall_offset_s":{WALL + 5040 + 100 - 20}}}',
    f'{{"kind":"LeaseEnded","at":20.0,"lease_id":"local","reason":"holder_died","draining":[],"ended_at":{WALL + 5140}}}',
    (
        f'{{"kind":"LeaseGranted","at":30.0,"lease_id":"waits","gpus":[["box","GPU-0"]],"fence":7,"granted_at":{WALL + 5150},'
        '"limit":1030.0}'
    ),
    '{"kind":"LeaseWarned","at":40.0,"lease_id":"waits","reason":"preempted","ends":100.0}',
    '{"kind":"UseCounted","at":40.0,"owner":"ada","used":17.0,"as_of":40.0,"recent":[]}',
    '{"kind":"GpuExcluded","at":50.0,"gpu":["box","GPU-2"],"reason":"repair"}',
)
NEW = (
    f'{{"kind":"TakenOver","at":5000.0,"epoch":0,"boot_id":"boot1","clock_base":0.0,"wall_offset_s":{WALL}}}',
    '{"kind":"HistoryCondensed","at":5000.0,"fences":[["box",4]],"next_seq":9}',
    OLD[2],
    OLD[3].replace("was", "box"),
    OLD[4],
    OLD[5].replace("was", "box"),
    OLD[6],
    OLD[7].replace("was", "box"),
    f'{{"kind":"TakenOver","at":5140.0,"epoch":0,"boot_id":"boot2","clock_base":5120.0,"wall_offset_s":{WALL}}}',
    OLD[9].replace('"at":20.0', '"at":5140.0'),
    OLD[10].replace('"at":30.0', '"at":5150.0').replace('"limit":1030.0', '"limit":6150.0'),
    OLD[11].replace('"at":40.0', '"at":5160.0').replace('"ends":100.0', '"ends":5220.0'),
    OLD[12].replace('"at":40.0', '"at":5160.0').replace('"as_of":40.0', '"as_of":5160.0'),
    OLD[13].replace('"at":50.0', '"at":5170.0'),
    '{"kind":"NodeJoined","at":5170.0,"node":"box","boot_id":"boot2","gpus":null}',
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def write_old(path: Path, lines: Sequence[str] = OLD) -> None:
    """A journal of version 3."""
    SqliteJournal(path, migrations=known_migrations()[:3]).close()
    crc = 0
    with closing(sqlite3.connect(path)) as connection, connection:
        for line in lines:
            crc = crc32(line.encode(), crc)
            body: dict[str, Any] = json.loads(line)
            row = (body["at"], body["kind"], line, crc)
            connection.execute("INSERT INTO event (at, kind, body, crc) VALUES (?, ?, ?, ?)", row)


def bodies(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [body for (body,) in connection.execute("SELECT body FROM event ORDER BY position")]


def test_an_old_journal_goes_on_with_one_clock(path: Path) -> None:
    write_old(path)

    SqliteJournal(path).close()

    assert bodies(path) == list(NEW)
    assert bodies(Path(f"{path}.version-3")) == list(OLD)


async def test_it_goes_on_where_it_was(path: Path) -> None:
    write_old(path)
    journal = SqliteJournal(path)
    driver = Driver(PoolSettings(), clock=lambda: 60.0)

    driver.open(journal.load(10), InlineWriter(journal), boot_id="boot2", wall_clock=lambda: WALL + 5180.0, node="box")

    assert driver.now() == 5180.0
    assert driver.state.wall_offset_s == WALL
    waited, remote = driver.state.leases["waits"], driver.state.leases["remote"]
    assert isinstance(waited, ActiveLease)
    assert isinstance(remote, ActiveLease)
    assert (waited.limit, remote.limit) == (6150.0, 9020.0)
    assert waited.ending is not None
    assert (waited.ending.reason, waited.ending.at) == (EndReason.PREEMPTED, 5220.0)
    assert driver.state.fences == {"box": 7}
    assert driver.state.excluded == {GpuKey("box", "GPU-2"): "repair"}
    assert driver.state.bookings["b1"].gpus == (GpuKey("box", "GPU-1"),)
    driver.close()


async def test_a_reboot_before_the_first_start_of_the_new_version_is_noticed(path: Path) -> None:
    write_old(path, OLD[:8])
    journal = SqliteJournal(path)
    driver = Driver(PoolSettings(), clock=lambda: 20.0)

    driver.open(
        journal.load(10), InlineWriter(journal), boot_id="boot2", wall_clock=lambda: WALL + 5140.0, node="new name"
    )

    assert isclose(driver.now(), 5140.0)
    assert driver.state.ended["local"].reason is EndReason.HOLDER_DIED
    remote = driver.state.leases["remote"]
    assert isinstance(remote, ActiveLease)
    assert remote.gpus == (GpuKey("new name", "GPU-1"),)
    assert driver.state.fences == {"new name": 6}
    driver.close()


@pytest.mark.parametrize("failpoint", ["in_migration", "after_migration"])
def test_killed_in_the_migration_it_is_wholly_old_or_wholly_new(path: Path, failpoint: str) -> None:
    write_old(path)

    children.run("hold", path, failpoint)

    assert bodies(path) == list(OLD if failpoint == "in_migration" else NEW)
    SqliteJournal(path).close()
    assert bodies(path) == list(NEW)


def test_an_altered_event_is_not_given_a_new_checksum(path: Path) -> None:
    write_old(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE event SET body = replace(body, 'GPU-0', 'GPU-9')")

    with pytest.raises(JournalDamaged, match="was altered"):
        SqliteJournal(path)


def test_a_wall_clock_that_was_set_back_does_not_set_the_clock_back(path: Path) -> None:
    opened = json.loads(OLD[8])
    write_old(path, [*OLD[:8], json.dumps(opened | {"wall_offset_s": WALL - 1e6}), *OLD[9:]])

    with closing(SqliteJournal(path)) as journal:
        events = journal.load(0).events

    times = [event.at for event in events]
    assert times == sorted(times)
    assert replay(PoolState(), events).wall_offset_s == WALL - 1e6 - 5020.0
