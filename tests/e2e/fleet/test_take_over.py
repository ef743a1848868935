"""A fleet at work while its leader and its database are broken: grants go on, nothing is lost, nothing is granted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.fleet import faults
from tests.e2e.fleet.fleet import Fleet, crew, fleet_of, until
from tests.e2e.history_check import check
from tests.e2e.run_history import read_history
from tests.ledger.postgres.server import PostgresServer


@pytest.fixture(scope="module")
def fleet(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    postgres.create_database("take_over")
    with fleet_of(postgres, "take_over", tmp_path_factory.mktemp("fleet")) as fleet:
        fleet.await_boxes()
        fleet.employ(*crew())
        yield fleet


READ = (
    "/health",
    "/pool",
    "/leases",
    "/usage",
    "/timeline",
    "/gpu/summary",
    "/config",
    "/metrics",
    "/livez",
    "/readyz",
)
PASSED_ON = {
    ("PUT", "/leases/x"): {201, 202},
    ("GET", "/leases/x"): {200},
    ("POST", "/leases/renew"): {200},
    ("DELETE", "/leases/x"): {200},
    ("DELETE", "/quotas/x"): {404},
    ("DELETE", "/bookings/x"): {404},
    ("POST", "/admin/gpus/77/drain"): {404},
}


def test_a_follower_answers_what_it_knows_and_passes_the_rest_on_to_the_leader(fleet: Fleet) -> None:
    leader = fleet.leader()
    follower = fleet.others(leader)[0]
    until(lambda: follower.health()["can_grant"], "the follower has found the leader")

    assert {path: follower.ask(path).status for path in READ} == dict.fromkeys(READ, 200)
    health = follower.health()
    assert (health["status"], health["can_grant"]) == ("healthy", True)
    told, pool = health["fleet"], follower.json("/pool")
    assert (told["role"], told["leader_url"]) == ("follower", leader.json("/health")["fleet"]["leader_url"])
    assert pool["fleet"]["id"] == leader.json("/pool")["fleet"]["id"]
    assert b"gpupool_can_grant 1.0" in follower.ask("/metrics").body
    for (method, path), statuses in PASSED_ON.items():
        body = {"ids": ["x"]} if path == "/leases/renew" else {} if method == "PUT" else None
        answer = follower.ask(path, method, body=body)
        assert answer.status in statuses, (method, path, answer.body)


def measure(fleet: Fleet, fault: faults.Fault, record_property: Callable[[str, object], None]) -> None:
    faults.work_on(fleet)
    epoch = fleet.leader().epoch
    took_s = fault(fleet)
    assert fleet.leader().epoch > epoch
    size = len([each for each in fleet.candidates if each.is_running])
    record_property("measured", f"fleet of {size}, {fault.__name__}: grants go on after {took_s:.2f} s")


@pytest.mark.parametrize("fault", faults.ALL)
def test_of_three_one_goes_on(
    fleet: Fleet, fault: faults.Fault, record_property: Callable[[str, object], None]
) -> None:
    measure(fleet, fault, record_property)


@pytest.mark.parametrize("fault", faults.OF_LEADER)
def test_of_two_the_other_goes_on(
    fleet: Fleet, fault: faults.Fault, record_property: Callable[[str, object], None]
) -> None:
    for candidate in fleet.others(fleet.leader())[1:]:
        candidate.stop()
    measure(fleet, fault, record_property)


def test_nothing_was_lost_or_granted_twice(fleet: Fleet) -> None:
    fleet.end_workers()

    history = read_history(fleet.folder)

    assert not check(history, is_fleet=True)
    assert {lease.is_local for lease in history.tenures} == {True, False}
    assert not [line for line in history.lines if line.get("why") in {"gave up", "lost"}]
