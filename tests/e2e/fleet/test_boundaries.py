"""The leader is killed or stopped at every boundary of an append. What was acknowledged is there at the next leader, what
was not is there as a whole or not at all, and asking again with the same id gives one lease.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.fleet.faults import read, send
from tests.e2e.fleet.fleet import LIMIT_S, Box, Candidate, Fleet, fleet_of, until
from tests.e2e.remembering_client import Client, Died
from tests.ledger.postgres.server import PostgresServer


@pytest.fixture(scope="module")
def fleet(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    postgres.create_database("boundaries")
    # The first look and those after a release are all there are: what is written depends on the client alone.
    settings = {"SIMULATED_GPUS": "1", "REFRESH_INTERVAL": "60"}
    folder = tmp_path_factory.mktemp("fleet")
    with fleet_of(postgres, "boundaries", folder, size=2, **settings) as fleet:
        # The GPU is on a box that is never killed.
        listed = ",".join(candidate.url for candidate in fleet.candidates)
        with Box(listed, folder / "agent", **settings):
            yield fleet


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Client:
    """Of all tests: nothing that one of them was promised may be gone in a later one."""
    pool = fleet.await_boxes(3).json("/fleet/pool")
    client = Client("/fleet")
    client.among = [gpu["uuid"] for gpu in pool["gpus"] if gpu["node"] == "agent"]
    return client


@pytest.fixture
def leader(fleet: Fleet, client: Client) -> Candidate:
    """The one that leads, with a free GPU; the other one follows."""
    for candidate in fleet.candidates:
        if not candidate.is_running:
            candidate.start()
    leader = fleet.await_boxes(3)
    client.port = leader.port
    client.clear()
    return leader


@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("failpoint", ["before_append", "after_append"])
def test_killed_at_a_failpoint(fleet: Fleet, client: Client, failpoint: str, times: int) -> None:
    first, second = fleet.candidates
    # The take-over is written first. The boxes are known already.
    fleet.let_lead(first, GPU_POOL_FAILPOINT=f"{failpoint}:{times + 1}")
    client.port = fleet.await_boxes(3).port

    with pytest.raises(Died):  # noqa: PT012 - anywhere in there
        for _ in range(20):
            client.work()
    assert first.process is not None
    assert first.process.wait(LIMIT_S) == -signal.SIGKILL

    take_over(fleet, second, client)
    client.verify()
    client.clear()
    client.work()
    client.verify()


def test_killed_while_its_append_is_on_its_way(fleet: Fleet, client: Client, leader: Candidate) -> None:
    """It arrives when another one leads, and changes nothing."""
    (other,) = fleet.others(leader)
    await_quiet(fleet, client)
    leader.proxy.stop_requests()
    connection = send(leader, "PUT", "/fleet/leases/on-its-way", json.dumps({"ttl_s": 60.0, "among": client.among}))
    until(lambda: b"on-its-way" in leader.proxy.held_back, "the append is on its way")
    leader.kill()
    connection.close()

    take_over(fleet, other, client)
    head = read_head(fleet)
    leader.proxy.restore()

    assert client.look("on-its-way") is None
    assert client.call("PUT", "on-its-way")["state"] == "active"
    assert read_head(fleet) > head
    assert epochs(fleet) == sorted(epochs(fleet))
    client.verify()


def test_killed_while_the_answer_is_on_its_way(fleet: Fleet, client: Client, leader: Candidate) -> None:
    """The grant is written, and nobody knows. Asking again gives the same grant."""
    lose_answer(fleet, client, leader, "answered")

    found = client.look("answered")
    assert found is not None
    again = client.call("PUT", "answered")
    assert (again["state"], again["fence"]) == ("active", found["fence"])
    client.verify()


def test_a_grant_that_no_client_was_told_of_ends_unless_it_is_asked_for(
    fleet: Fleet, client: Client, leader: Candidate
) -> None:
    """Long before its TTL: its box has never kept it, so no client holds the GPU."""
    other = lose_answer(fleet, client, leader, "forgotten")

    until(lambda: not other.json("/fleet/pool")["leases"], "the lease has ended")

    found = client.look("forgotten")
    assert found is not None
    assert (found["end_reason"], found["ended_by"]) == ("released", "the server")
    assert "was not repeated" in found["end_note"]
    client.work()
    client.verify()


def test_stopped_inside_an_append_while_another_one_claims(fleet: Fleet, client: Client, leader: Candidate) -> None:
    """PostgreSQL carries the append out after its sender was stopped. Later the sender must not answer as a leader."""
    (other,) = fleet.others(leader)
    await_quiet(fleet, client)
    with fleet.database.locked("gpu_pool.leader", fleet.name):
        connection = send(leader, "PUT", "/fleet/leases/inside", json.dumps({"ttl_s": 60.0, "among": client.among}))
        until(lambda: is_append_waiting(fleet), "the append is inside the database")
        leader.send(signal.SIGSTOP)
    client.port = other.port
    fleet.leader([other])
    try:
        found = client.look("inside")
        assert found is not None
        assert (found["state"], found["end_reason"]) == ("active", None)
    finally:
        leader.send(signal.SIGCONT)

    assert read(connection) == 503
    until(lambda: leader.health()["fleet"]["role"] == "follower", "the old leader follows")
    assert client.call("PUT", "inside")["fence"] == found["fence"]
    client.verify()


def lose_answer(fleet: Fleet, client: Client, leader: Candidate, lease_id: str) -> Candidate:
    """Let a leader write a grant and die before it knows; return the next one."""
    (other,) = fleet.others(leader)
    await_quiet(fleet, client)
    head = read_head(fleet)
    leader.proxy.stop_answers()
    connection = send(leader, "PUT", f"/fleet/leases/{lease_id}", json.dumps({"ttl_s": 60.0, "among": client.among}))
    until(lambda: read_head(fleet) > head, "the append is carried out")
    leader.kill()
    connection.close()
    leader.proxy.restore()
    take_over(fleet, other, client)
    return other


def take_over(fleet: Fleet, other: Candidate, client: Client) -> None:
    fleet.end_leadership()
    fleet.leader([other])
    client.port = fleet.await_boxes(2).port


def await_quiet(fleet: Fleet, client: Client) -> None:
    """Until the leader has written all that it has to write. An append renews as well, so for a second nothing is in the
    way of the next one.
    """
    client.number += 1
    client.call("PUT", f"before{client.number}")
    client.end(f"before{client.number}")
    last = "SELECT body FROM gpu_pool.event ORDER BY position DESC LIMIT 1"
    until(
        lambda: "GpuDrained" in fleet.database.execute(last, fleet.name), "the GPU is free again, and that is written"
    )


def read_head(fleet: Fleet) -> int:
    return int(fleet.database.execute("SELECT head FROM gpu_pool.leader", fleet.name))


def epochs(fleet: Fleet) -> list[int]:
    rows = fleet.database.execute("SELECT epoch FROM gpu_pool.event ORDER BY position", fleet.name)
    return [int(row) for row in rows.splitlines()]


def is_append_waiting(fleet: Fleet) -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%gpu_pool.event%'"
    return fleet.database.execute(query) != "0"
