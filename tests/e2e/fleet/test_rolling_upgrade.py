"""A fleet is upgraded by one version step, one box after the other, the leader last. No lease ends, and the order stays."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpu_worker_pool import __version__
from tests.ledger.postgres.server import PostgresServer

from .fleet import GPUS, Box, Candidate, fleet_of, until
from .next_version import VERSION, make_next_version
from .test_agents import Boxes, are_up, renewed
from .test_doctor import findings

WAITING = ("first", "second", "third")
# Longer than the test takes on a busy machine: it renews the leases, but not the requests that wait.
TTL_S = 600.0


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A fleet in which every GPU is leased and three requests wait, and the next version."""

    boxes: Boxes
    next_version: str
    folder: Path
    # The leases, and their nodes.
    held: dict[str, str] = field(default_factory=dict)

    def fill(self) -> None:
        for number in range(GPUS * len(self.boxes.all)):
            lease = self.boxes.request(f"lease-{number}", ttl_s=TTL_S)
            self.held[lease["id"]] = lease["gpus"][0]["node"]
        for lease_id in WAITING:
            form = {"ttl_s": TTL_S}
            assert self.boxes.fleet.leader().call("PUT", f"/fleet/leases/{lease_id}", form)[0] == 202

    def leases_of(self, box: Box) -> list[str]:
        return [lease_id for lease_id, node in self.held.items() if node == box.node]

    def restart(self, box: Box) -> None:
        """As an operator does: the new version is installed, and the server is restarted."""
        box.stop()
        box.env["PYTHONPATH"] = self.next_version
        box.start()
        until(lambda: self.versions().get(box.node) == VERSION, f"{box.node} is up with the next version")

    def versions(self) -> dict[str, str]:
        listed = self.boxes.fleet.leader().json("/fleet")["boxes"]
        return {box["node"]: box["version"] for box in listed if box["state"] == "up"}

    def check(self) -> None:
        """All leases are renewed at their boxes, none has ended, and the queue is as it was."""
        for box in self.boxes.all:
            if box.is_running:
                assert renewed(box, *self.leases_of(box))
        pool = self.boxes.pool()
        assert {lease["id"] for lease in pool["leases"]} == set(self.held)
        assert tuple(lease["id"] for lease in pool["queue"]) == WAITING

    def said_by_doctor(self) -> str:
        (box, *_) = self.boxes.fleet.candidates
        return " ".join(item["message"] for item in findings(box, self.folder)["fleet-boxes"])


@pytest.fixture
def upgrade(postgres: PostgresServer, tmp_path: Path) -> Iterator[Upgrade]:
    postgres.create_database("upgrade")
    with fleet_of(postgres, "upgrade", tmp_path, size=2) as fleet:
        listed = ",".join(candidate.url for candidate in fleet.candidates)
        with Box(listed, tmp_path / "agent") as agent:
            boxes = Boxes(fleet, agent)
            until(lambda: are_up(boxes), "all boxes are up")
            yield Upgrade(boxes, make_next_version(tmp_path / "next"), tmp_path)


def test_each_box_is_restarted_with_the_next_version_and_no_lease_is_lost(upgrade: Upgrade) -> None:
    fleet, agent = upgrade.boxes.fleet, upgrade.boxes.agent
    upgrade.fill()
    old = fleet.leader()
    (new,) = fleet.others(old)

    # The new agent has an old leader, and the new follower as well.
    for box in (agent, new):
        upgrade.restart(box)
        upgrade.check()
        assert fleet.leader() is old
        assert f"the boxes have different versions: {__version__} on " in upgrade.said_by_doctor()

    # The old leader hangs, so the new one leads. It writes what the old one does not know, which is then its follower.
    old.send(signal.SIGSTOP)
    assert fleet.leader([new]) is new
    old.send(signal.SIGCONT)
    until(lambda: "written by a newer version" in old.log(), "the old one says that it cannot follow")
    until(lambda: upgrade.versions() == {agent.node: VERSION, new.node: VERSION, old.node: __version__}, "all are up")
    upgrade.check()
    must_not_lead_what_it_cannot_read(old, new)
    assert renewed(old, *upgrade.leases_of(old))
    assert renewed(agent, *upgrade.leases_of(agent))
    new.start()
    assert fleet.leader() is new
    upgrade.check()

    # Restarted, the old version finds events of the new one. It says so, and keeps its leases.
    old.stop()
    old.start()
    assert renewed(old, *upgrade.leases_of(old))
    until(lambda: "written by a newer version" in str(old.health().get("reason")), "it says what to do")
    upgrade.restart(old)
    upgrade.check()
    assert "different versions" not in upgrade.said_by_doctor()
    order_is_kept(upgrade)


def must_not_lead_what_it_cannot_read(old: Candidate, new: Candidate) -> None:
    """The only box that does not know all of the journal is left. It fails closed, and says what to do."""
    epoch = new.epoch
    new.kill()
    until(lambda: old.epoch > epoch, "it has claimed the leadership, and given it up")
    until(lambda: "install the newer one on this machine" in str(old.health().get("reason")), "it says what to do")
    assert not old.leads


def order_is_kept(upgrade: Upgrade) -> None:
    for lease_id, freed in zip(WAITING, upgrade.held, strict=False):
        upgrade.boxes.release(freed)
        until(lambda lease_id=lease_id: upgrade.boxes.state(lease_id) == ("active", None), f"{lease_id} is next")
