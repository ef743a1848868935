"""A standby that is behind is promoted: the database has lost commits. The boxes know what was granted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet.fleet import Candidate, Fleet, fleet_of, until
from tests.ledger.postgres.server import PostgresServer

# How far a server has come: on a standby, what it has replayed.
HEAD = "SELECT head FROM gpu_pool.leader"


@pytest.fixture
def standby(postgres: PostgresServer) -> Iterator[PostgresServer]:
    standby = PostgresServer(standby_of=postgres)
    yield standby
    standby.remove()
    if not postgres.is_running:
        postgres.start()


@pytest.fixture
def fleet(postgres: PostgresServer, standby: PostgresServer, tmp_path: Path) -> Iterator[Fleet]:
    name = f"commits{standby.port}"
    postgres.create_database(name)
    both = f"postgresql://admin@127.0.0.1:{postgres.port},127.0.0.1:{standby.port}/{name}"
    with fleet_of(postgres, name, tmp_path, size=2, SIMULATED_GPUS="1", GPU_POOL_FLEET=both) as fleet:
        yield fleet


@pytest.mark.parametrize("survivor", ["leader", "follower"])
def test_the_boxes_bring_back_what_the_database_lost(fleet: Fleet, standby: PostgresServer, survivor: str) -> None:
    """What waited in line is asked for again; its client does so by itself."""
    leader = fleet.await_boxes()
    told = ask(leader, "a")
    fall_behind(fleet, standby)
    told += ask(leader, "b")
    ask(leader, "c")
    epoch = leader.health()["fleet"]["epoch"]

    if survivor == "follower":
        leader.kill()
    fleet.database.kill()
    standby.promote()

    living = [each for each in fleet.candidates if survivor == "leader" or each is not leader]
    until(lambda: fleet.leader(living).health()["fleet"]["epoch"] > epoch, "a candidate leads by what is left")
    if survivor == "follower":
        leader.start()
    fleet.await_boxes()
    assert see(fleet.leader(), "a", "b") == told
    assert fleet.leader().call("GET", "/fleet/leases/c")[0] == 404
    assert ask(fleet.leader(), "c")[0][1] == "queued", "both GPUs are in use"


def test_a_candidate_on_a_standby_says_so_and_leads_once_it_is_promoted(fleet: Fleet, standby: PostgresServer) -> None:
    fleet.leader()
    fall_behind(fleet, standby)
    for candidate in fleet.candidates:
        candidate.kill()
    alone = fleet.candidates[0]
    alone.env = {**alone.env, "GPU_POOL_FLEET": standby.url(fleet.name)}
    alone.start()
    assert "if it is a standby, name the primary in the URL" in alone.health()["reason"]

    standby.promote()

    fleet.leader([alone])


def ask(leader: Candidate, *leases: str) -> list[tuple[Any, ...]]:
    for lease in leases:
        status, answer = leader.call("PUT", f"/fleet/leases/{lease}", {"ttl_s": 60.0})
        assert status in {201, 202}, answer
    return see(leader, *leases)


def see(leader: Candidate, *leases: str) -> list[tuple[Any, ...]]:
    found = [leader.json(f"/fleet/leases/{lease}") for lease in leases]
    return [(lease["id"], lease["state"], lease["fence"], lease["position"], lease["requested_at"]) for lease in found]


def fall_behind(fleet: Fleet, standby: PostgresServer) -> None:
    """It has all up to now, and gets nothing more."""
    head = fleet.database.execute(HEAD, fleet.name)
    until(lambda: int(standby.execute(HEAD, fleet.name) or 0) >= int(head), "the standby has it")
    standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
    standby.execute("SELECT pg_reload_conf()")
    until(lambda: standby.execute("SELECT count(*) FROM pg_stat_wal_receiver") == "0", "the standby is cut off")


def test_a_follower_that_cannot_read_the_journal_says_so_and_lets_others_lead(fleet: Fleet) -> None:
    leader = fleet.leader()
    (follower,) = fleet.others(leader)
    follower.kill()
    fleet.database.execute("DELETE FROM gpu_pool.event WHERE position = 1", fleet.name)
    follower.start()

    def damage() -> str | None:
        health = follower.health()
        reason = health.get("reason") or ""
        return reason if "could not take over: the journal in the database" in reason else None

    until(damage, "the follower says that it cannot read the journal")
    assert follower.health()["fleet"]["leader"] is not None
    leader.kill()
    until(lambda: follower.health()["fleet"]["leader"] is None, "nobody leads")
    assert follower.health()["status"] == "degraded"
    assert not follower.leads
