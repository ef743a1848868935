"""Every box keeps the leases on its GPUs. Two boxes can lead, one cannot; each is killed, and so is the database."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerDidNotStartError
from tests.cli.in_process import called
from tests.e2e.fleet.faults import read, send
from tests.e2e.fleet.fleet import GPUS, KEY, Box, Fleet, fleet_of, until
from tests.e2e.worker import identity
from tests.ledger.postgres.server import PostgresServer


class Boxes:
    """Two candidates and a box that cannot lead."""

    def __init__(self, fleet: Fleet, agent: Box) -> None:
        self.fleet = fleet
        self.agent = agent
        self.all = [*fleet.candidates, agent]

    def pool(self) -> Any:
        return self.fleet.leader().json("/fleet/pool")

    def request(self, lease_id: str, **form: object) -> Any:
        """A lease of a remote holder, by the leader."""
        status, lease = self.fleet.leader().call("PUT", f"/fleet/leases/{lease_id}", {"ttl_s": 5.0, **form})
        assert (status, lease.get("state")) == (201, "active"), lease
        return lease

    def on(self, box: Box, lease_id: str, **form: object) -> Any:
        """A lease on a GPU of this box."""
        mine = [gpu["uuid"] for gpu in self.pool()["gpus"] if gpu["node"] == box.node]
        return self.request(lease_id, among=mine[:1], **form)

    def state(self, lease_id: str) -> Any:
        status, lease = self.fleet.leader().call("GET", f"/fleet/leases/{lease_id}")
        return (lease["state"], lease["end_reason"]) if status == 200 else (status, lease)

    def release(self, *lease_ids: str) -> None:
        for lease_id in lease_ids:
            assert self.fleet.leader().call("DELETE", f"/fleet/leases/{lease_id}")[0] == 200


def renewed(box: Box, *lease_ids: str, **form: object) -> bool:
    """Whether the box renewed all, and named the pool. A client believes no other server."""
    status, answer = box.call("POST", "/leases/renew", {"ids": lease_ids, **form})
    return status == 200 and {each["id"] for each in answer["renewed"]} == set(lease_ids) and bool(answer["pool_id"])


def are_up(boxes: Boxes) -> bool:
    """Whether all GPUs of all boxes can be granted."""
    free = [gpu for gpu in boxes.pool()["gpus"] if gpu["state"] == "free"]
    return len(free) == GPUS * len(boxes.all)


@pytest.fixture(scope="module")
def boxes(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    postgres.create_database("agents")
    folder = tmp_path_factory.mktemp("fleet")
    with fleet_of(postgres, "agents", folder, size=2) as fleet:
        listed = ",".join(candidate.url for candidate in fleet.candidates)
        with Box(listed, folder / "agent") as agent:
            found = Boxes(fleet, agent)
            until(lambda: are_up(found), "all boxes are up")
            yield found


def test_the_gpus_of_each_box_are_granted_and_used(boxes: Boxes) -> None:
    for box in boxes.all:
        lease = boxes.on(box, f"on-{box.node}")
        assert [gpu["node"] for gpu in lease["gpus"]] == [box.node]
        assert 0 < lease["expires_in_s"] <= lease["ttl_s"]
        # The box itself shows that its GPU is in use.
        until(lambda box=box: box.json("/gpu/stats")["gpus"][0]["memory"]["used_mb"] > 1000, "its GPU is used")
    boxes.release(*(f"on-{box.node}" for box in boxes.all))
    until(lambda: are_up(boxes), "all GPUs are free again")


@pytest.fixture
def held(boxes: Boxes, request: pytest.FixtureRequest) -> Iterator[dict[str, Box]]:
    """A lease on each box, by its id."""
    leases = {f"{request.node.name[5:20]}-{box.node}": box for box in boxes.all}
    for lease_id, box in leases.items():
        boxes.on(box, lease_id)
    yield leases
    for box in boxes.all:
        if not box.is_running:
            box.start()
    boxes.release(*leases)
    until(lambda: are_up(boxes), "all GPUs are free again")


def are_kept(boxes: Boxes, held: dict[str, Box]) -> bool:
    return {boxes.state(lease_id) for lease_id in held} == {("active", None)}


def test_a_box_that_is_killed_and_restarted_keeps_its_leases(boxes: Boxes, held: dict[str, Box]) -> None:
    boxes.agent.kill()
    boxes.agent.start()
    # By itself, before it has heard of any leader.
    assert all(renewed(box, lease_id) for lease_id, box in held.items() if box is boxes.agent)
    until(lambda: len(boxes.agent.json("/health")["fleet"]["leader"] or ""), "it has found the leader")
    assert are_kept(boxes, held)


def test_a_grant_that_its_box_has_not_confirmed_does_not_keep_the_leader_from_stopping(boxes: Boxes) -> None:
    leader, agent = boxes.fleet.leader(), boxes.agent
    among = [gpu["uuid"] for gpu in boxes.pool()["gpus"] if gpu["node"] == agent.node]
    agent.send(signal.SIGSTOP)
    try:
        connection = send(leader, "PUT", "/fleet/leases/unconfirmed", json.dumps({"among": among, "ttl_s": 2.0}))
        until(lambda: [lease["id"] for lease in boxes.pool()["leases"]] == ["unconfirmed"], "it is granted")
        leader.stop()
        assert read(connection) == 503
    finally:
        agent.send(signal.SIGCONT)
        leader.start()
    until(lambda: are_up(boxes), "nobody asks again, so the lease ends")


def test_a_box_that_is_away_is_drained_and_its_leases_are_neither_renewed_nor_lost(
    boxes: Boxes, held: dict[str, Box]
) -> None:
    boxes.agent.kill()
    leader = boxes.fleet.leader()

    def states() -> set[str]:
        return {gpu["state"] for gpu in boxes.pool()["gpus"] if gpu["node"] == "agent"}

    until(lambda: "free" not in states(), "the leader does not hear from it")
    status, drained = leader.call("POST", "/fleet/admin/gpus/agent:1/drain", {"reason": "repair"})
    assert (status, drained["node"]) == (200, "agent"), drained
    mine = [lease_id for lease_id, box in held.items() if box is boxes.agent]
    status, answer = leader.call("POST", "/fleet/leases/renew", {"ids": mine})
    assert (status, answer["renewed"], answer["lost"]) == (200, [], [])
    boxes.agent.start()
    until(lambda: boxes.agent.health()["fleet"]["leader"], "it has found the leader")
    assert "out_of_service" in states()
    assert leader.call("POST", "/fleet/admin/gpus/agent:1/undrain")[0] == 200


def test_a_box_whose_file_is_damaged_hears_from_the_leader_what_it_keeps(boxes: Boxes, held: dict[str, Box]) -> None:
    boxes.agent.kill()
    (file,) = boxes.agent.state_dir.glob("custody-*.sqlite3")
    file.write_bytes(b"damaged")
    boxes.agent.start()
    assert "The leader tells this box which leases it has" in boxes.agent.log()
    mine = [lease_id for lease_id, box in held.items() if box is boxes.agent]
    until(lambda: renewed(boxes.agent, *mine), "it keeps its leases again")
    assert are_kept(boxes, held)


def test_while_the_leader_is_replaced_each_box_renews_its_own_leases(boxes: Boxes, held: dict[str, Box]) -> None:
    leader = boxes.fleet.leader()
    leader.kill()
    alive = {lease_id: box for lease_id, box in held.items() if box is not leader}
    others = boxes.fleet.others(leader)

    def led() -> bool:
        assert all(renewed(box, lease_id) for lease_id, box in alive.items())
        return any(box.leads for box in others)

    until(led, "another one leads")
    leader.start()
    assert all(renewed(box, lease_id) for lease_id, box in held.items())
    assert are_kept(boxes, held)


def test_without_the_database_renewals_go_on_and_nothing_expires(boxes: Boxes, held: dict[str, Box]) -> None:
    boxes.fleet.database.send_to_all(signal.SIGSTOP)
    try:
        until(lambda: not any(box.leads for box in boxes.fleet.candidates), "nobody leads")
        assert all(renewed(box, lease_id) for lease_id, box in held.items())
        for lease_id, box in held.items():
            until(lambda box=box: box.call("GET", "/fleet/pool")[0] == 503, "the box has noticed")
            pool = box.json("/pool")
            assert (pool["can_grant"], [lease["id"] for lease in pool["leases"]]) == (False, [lease_id])
            assert "no leader at the moment; waiting" in pool["trouble"]
            assert sorted(gpu["state"] for gpu in pool["gpus"]) == ["free", "leased"]
            done = called("status", env={"GPU_SERVICE_ENDPOINT": box.url})
            assert done.code == 0, done
            assert "no leader at the moment; waiting" in " ".join(done.out.split())
            assert f"{box.node}:0" in done.out
    finally:
        boxes.fleet.database.send_to_all(signal.SIGCONT)
    assert are_kept(boxes, held)


def test_a_token_that_was_added_renews_at_the_box_without_the_database_and_without_a_leader(
    boxes: Boxes, held: dict[str, Box]
) -> None:
    """Also at a box that was restarted meanwhile. A caller from elsewhere has nothing but its token."""
    token, digest = "the-secret-token-of-ada", hashlib.sha256(b"the-secret-token-of-ada").hexdigest()
    assert boxes.agent.call("PUT", f"/admin/tokens/{digest}", {"name": "ada", "role": "operator"})[0] == 200
    headers = {"X-Forwarded-For": "192.0.2.1", "Authorization": f"Bearer {token}"}
    (mine,) = [lease_id for lease_id, box in held.items() if box is boxes.agent]

    def renews() -> bool:
        answer = boxes.agent.ask("/leases/renew", "POST", headers, {"ids": [mine]})
        return answer.status == 200 and [each["id"] for each in answer.json["renewed"]] == [mine]

    until(renews, "the box has heard of the token")
    boxes.fleet.database.send_to_all(signal.SIGSTOP)
    try:
        until(lambda: not any(box.leads for box in boxes.fleet.candidates), "nobody leads")
        assert renews()
        boxes.agent.kill()
        boxes.agent.start()
        assert renews()
    finally:
        boxes.fleet.database.send_to_all(signal.SIGCONT)
    until(lambda: renews() and any(box.leads for box in boxes.fleet.candidates), "one leads again")
    assert boxes.state(mine) == ("active", None)
    assert boxes.fleet.leader().call("DELETE", f"/admin/tokens/{digest}")[0] == 200
    until(lambda: not renews(), "the box has heard that the token is revoked")


def test_a_box_that_cannot_write_says_so_and_requests_are_served_elsewhere(boxes: Boxes) -> None:
    agent, leader = boxes.agent, boxes.fleet.leader()
    assert agent.process is not None
    elsewhere = [f"full-{number}" for number in range(GPUS * len(boxes.fleet.candidates))]
    # As on a full disk: no file can be written.
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        for lease_id in elsewhere:
            assert leader.call("PUT", f"/fleet/leases/{lease_id}", {"ttl_s": 60.0, "wait_s": 1.0})[0] in {201, 202}
        for lease_id in elsewhere:
            lease = until(lambda id_=lease_id: granted(leader.call("GET", f"/fleet/leases/{id_}?wait_s=1")), "granted")
            assert {gpu["node"] for gpu in lease["gpus"]} != {agent.node}
        # If none came to the box so far, this one does.
        status, waits = leader.call("PUT", "/fleet/leases/full", {"ttl_s": 60.0})
        assert (status, waits["state"]) == (202, "queued"), waits
        (trouble,) = [box["trouble"] for box in leader.json("/fleet")["boxes"] if box["node"] == agent.node]
        assert trouble
        until(lambda: trouble in (agent.health()["reason"] or ""), "the box says so, too")
    finally:
        resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    lease = until(lambda: granted(leader.call("GET", "/fleet/leases/full?wait_s=1")), "it has its place on the box")
    assert {gpu["node"] for gpu in lease["gpus"]} == {agent.node}
    assert renewed(agent, "full")
    boxes.release("full", *elsewhere)
    until(lambda: are_up(boxes), "all GPUs are free again")


def test_a_lease_that_nobody_renews_ends_at_the_leader(boxes: Boxes) -> None:
    boxes.on(boxes.agent, "left", ttl_s=0.5)
    until(lambda: boxes.state("left") == ("ended", "expired"), "its TTL has run out on its box")
    until(lambda: are_up(boxes), "its GPU is free again")


def test_the_death_of_a_holder_on_a_box_ends_its_lease_at_the_leader(boxes: Boxes) -> None:
    """The boxes of this test are on one machine, so any of them may ask for a process of it. The leader's does."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as holder:
        leader = boxes.fleet.leader()
        boxes.on(leader, "mortal", **identity_of(holder.pid))
        assert boxes.state("mortal") == ("active", None)
        holder.kill()
        holder.wait()
        until(lambda: boxes.state("mortal") == ("ended", "holder_died"), "its box has seen the death")
    until(lambda: are_up(boxes), "its GPU is free again")


def test_a_held_renewal_is_answered_when_its_lease_ends(boxes: Boxes) -> None:
    boxes.on(boxes.agent, "taken")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(boxes.agent.call, "POST", "/leases/renew", {"ids": ["taken"], "wait_s": 30.0})
        boxes.agent.json("/health")  # it serves other calls meanwhile
        boxes.release("taken")
        status, body = answer.result()
    # Only the leader knows how it ended.
    assert status in {200, 503}
    assert not body.get("renewed")


def test_a_box_with_another_key_is_refused_and_both_sides_say_what_to_do(boxes: Boxes, tmp_path: Path) -> None:
    other = "another-key-of-a-stranger"
    with Box(boxes.fleet.leader().url, tmp_path / "stranger", GPU_POOL_FLEET_KEY=other) as stranger:
        until(lambda: "have different fleet keys" in stranger.log(), "the stranger says why")
        assert "and the box stranger have different fleet keys" in boxes.fleet.leader().log()
        for box in (stranger, *boxes.all):
            assert not {KEY, other} & set(re.findall(r"[\w-]+", box.log() + json.dumps(box.json("/config"))))
        assert stranger.node not in {gpu["node"] for gpu in boxes.pool()["gpus"]}


def test_a_second_box_of_the_same_name_is_refused(boxes: Boxes, tmp_path: Path) -> None:
    twin = Box(boxes.fleet.leader().url, tmp_path / "twin", GPU_POOL_NODE=boxes.agent.node)
    with twin:
        until(lambda: f"another machine has the node name {boxes.agent.node}" in twin.log(), "the twin says why")
    boxes.on(boxes.agent, "still")
    boxes.release("still")


def test_a_copy_of_a_box_is_refused_while_the_box_lives(boxes: Boxes, tmp_path: Path) -> None:
    """The copy hears of no renewal at the box, and would end its leases."""
    until(lambda: are_up(boxes), "the GPUs are free again")
    boxes.on(boxes.agent, "kept", ttl_s=60.0)
    shutil.copytree(boxes.agent.state_dir, tmp_path / "copied")
    name, state = boxes.agent.node, str(tmp_path / "copied")
    twin = Box(boxes.fleet.leader().url, tmp_path / name, GPU_POOL_NODE=name, GPU_POOL_STATE_DIR=state)
    with twin:
        until(lambda: "with the same state directory or a copy of it" in twin.log(), "the copy says why")
        assert boxes.agent.call("POST", "/leases/renew", {"ids": ["kept"]})[1]["renewed"][0]["id"] == "kept"
    assert boxes.state("kept") == ("active", None)
    boxes.release("kept")


def test_fences_go_on_when_a_box_joins_a_fleet_and_leaves_it(postgres: PostgresServer, tmp_path: Path) -> None:
    postgres.create_database("fences")
    last = 0
    for number, fleet in enumerate(("", postgres.url("fences"), "")):
        with Box(fleet, tmp_path / "box") as box:
            for turn in range(3 - number):
                path = f"/leases/{number}-{turn}"
                asked = until(lambda path=path: granted(box.call("PUT", path, {"wait_s": 1.0})), "it is granted")
                assert asked["fence"] > last
                last = asked["fence"]
                assert box.call("DELETE", path)[0] == 200
            until(lambda: {gpu["state"] for gpu in box.json("/pool")["gpus"]} == {"free"}, "its GPUs are free")


def granted(answer: tuple[int, Any]) -> Any:
    return answer[1] if answer[0] in {200, 201} and answer[1]["state"] == "active" else None


def test_a_second_server_on_the_same_state_directory_does_not_start(boxes: Boxes, tmp_path: Path) -> None:
    state = str(boxes.agent.state_dir)
    second = Box("http://127.0.0.1:9", tmp_path / "agent", GPU_POOL_STATE_DIR=state)
    with pytest.raises(ServerDidNotStartError, match="in use by the process with pid"):
        second.start()
    second.close()


def identity_of(pid: int) -> dict[str, object]:
    started = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]
    return {**identity(), "pid": pid, "pid_started": float(started), "ttl_s": 60.0}
