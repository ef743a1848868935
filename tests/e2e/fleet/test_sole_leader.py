"""A fleet without a database: one box leads with its own journal, is killed and restarted, and moves to PostgreSQL later."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerDidNotStartError
from tests.cli.in_process import called
from tests.ledger.postgres.server import PostgresServer

from .fleet import Box, until

GPU_POOL = [sys.executable, "-m", "gpu_worker_pool"]


class SoleFleet:
    """A leader with its own journal, and boxes that join it."""

    def __init__(self, folder: Path, boxes: ExitStack) -> None:
        self.folder, self._boxes = folder, boxes
        self.leader = self.box("gpu-01", "lead")

    def box(self, name: str, fleet: str, **settings: str) -> Box:
        box = Box(fleet, self.folder / name, **settings)
        self._boxes.callback(box.close)
        return box

    def join(self, name: str) -> Box:
        box = self.box(name, self.leader.url, GPU_POOL_FLEET_KEY=self.key_file.read_text().strip())
        box.start()
        return box

    @property
    def key_file(self) -> Path:
        return self.leader.state_dir / "fleet-key"


@pytest.fixture
def boxes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def fleet(tmp_path: Path, boxes: ExitStack) -> SoleFleet:
    fleet = SoleFleet(tmp_path, boxes)
    fleet.leader.start()
    return fleet


def await_gpus(box: Box, number: int) -> None:
    def known() -> bool:
        status, pool = box.call("GET", "/fleet/pool")
        return status == 200 and sum(gpu["state"] != "unknown" for gpu in pool["gpus"]) == number

    until(known, f"{number} GPUs are known")


def ask(box: Box, lease: str, **wishes: Any) -> dict[str, Any]:
    status, answer = box.call("PUT", f"/fleet/leases/{lease}", {"ttl_s": 60.0, **wishes})
    assert status in {200, 201, 202}, answer
    return dict(answer)


def seen(box: Box, *leases: str) -> list[tuple[Any, ...]]:
    found = [box.json(f"/fleet/leases/{lease}") for lease in leases]
    shown = ("id", "state", "fence", "position", "requested_at", "pool_id")
    return [(*(lease.get(name) for name in shown), str(lease.get("gpus"))) for lease in found]


def renewed(box: Box, *leases: str) -> set[str]:
    status, answer = box.call("POST", "/fleet/leases/renew", {"ids": list(leases)})
    return {lease["id"] for lease in answer["renewed"]} if status == 200 else set()


def test_one_queue_over_two_boxes_outlives_kill_9_of_its_leader(fleet: SoleFleet) -> None:
    leader, other = fleet.leader, fleet.join("gpu-02")
    await_gpus(other, 4)
    for number in range(6):
        ask(other if number % 2 else leader, f"lease{number}")
    leases = [f"lease{number}" for number in range(6)]
    told = seen(other, *leases)
    assert [lease[1] for lease in told] == ["active"] * 4 + ["queued"] * 2
    on_box = {lease[0]: lease[-1] for lease in told[:4]}
    epoch = leader.epoch

    leader.kill()

    here = [lease for lease, gpus in on_box.items() if "gpu-02" in gpus]
    assert len(here) == 2
    assert renewed(other, *here) == set(here), "holders renew at their box"
    until(lambda: other.health().get("reason"), "the box says that it has no leader")
    status, refused = other.call("PUT", "/fleet/leases/new", {"ttl_s": 60.0})
    assert (status, refused["detail"]) == (503, "No leader at the moment; waiting. Try again in a few seconds.")
    jobs, shown = called("jobs", "--all", env={"GPU_SERVICE_ENDPOINT": other.url}), {id_[:8] for id_ in here}
    assert shown <= set(jobs.out.split()), jobs
    boxes = called("fleet", env={"GPU_SERVICE_ENDPOINT": other.url})
    assert (boxes.code, "no leader at the moment; waiting" in " ".join(boxes.err.split())) == (125, True), boxes
    leader.start()
    await_gpus(other, 4)
    assert seen(other, *leases) == told
    assert leader.epoch > epoch
    leader.call("DELETE", "/fleet/leases/lease1")
    until(lambda: seen(leader, "lease4")[0][1] == "active", "the first in line gets the GPU")
    assert seen(leader, "lease5")[0][1] == "queued"


def test_a_request_for_one_box_says_where_gpus_are_free(fleet: SoleFleet) -> None:
    other = fleet.join("gpu-02")
    await_gpus(other, 4)
    for lease in ("a", "b"):
        assert other.call("PUT", f"/leases/{lease}", {"ttl_s": 60.0})[0] == 201
    waits = other.call("PUT", "/leases/c", {"ttl_s": 60.0})[1]
    assert waits["state"] == "queued"
    assert waits["reason"].endswith("; free on other boxes: 2 on gpu-01")
    ask(other, "e")
    ask(other, "f")
    until(lambda: "free on" not in other.json("/leases/c")["reason"], "none is free elsewhere")


def test_a_box_with_leases_becomes_a_leader_and_an_ordinary_box_again(tmp_path: Path, boxes: ExitStack) -> None:
    alone = Box("", tmp_path / "gpu-01")
    boxes.callback(alone.close)
    alone.start()
    holder = boxes.enter_context(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
    boxes.callback(holder.kill)
    alone.call("PUT", "/leases/local", {"ttl_s": 60.0, "host": socket.gethostname(), "pid": holder.pid})
    alone.call("PUT", "/leases/remote", {"ttl_s": 60.0})
    alone.call("PUT", "/leases/waits", {"ttl_s": 60.0})
    names = ("local", "remote", "waits")
    before = [fields(alone, lease) for lease in names]
    assert [lease["state"] for lease in before] == ["active", "active", "queued"]

    for fleet in ("lead", "lead", "", "lead"):
        alone.kill()
        alone.env["GPU_POOL_FLEET"] = fleet
        alone.start()
        until(lambda: all(gpu["state"] != "unknown" for gpu in alone.json("/pool")["gpus"]), "its GPUs are known")
        assert [fields(alone, lease) for lease in names] == before, f"GPU_POOL_FLEET={fleet}"
        until(lambda: alone.call("POST", "/leases/renew", {"ids": ["remote"]})[1]["renewed"], "its holder renews")

    holder.kill()
    until(lambda: fields(alone, "waits")["state"] == "active", "the death of a local holder is noticed")


def fields(box: Box, lease: str) -> dict[str, Any]:
    found = box.json(f"/leases/{lease}")
    return {
        name: found.get(name) for name in ("id", "state", "fence", "requested_at", "granted_at", "gpus", "is_local")
    }


def test_a_leader_with_leases_of_other_boxes_does_not_go_on_alone(fleet: SoleFleet) -> None:
    leader, other = fleet.leader, fleet.join("gpu-02")
    await_gpus(leader, 4)
    for number in range(4):
        ask(leader, f"lease{number}")
    leader.kill()
    leader.env["GPU_POOL_FLEET"] = ""
    with pytest.raises(
        ServerDidNotStartError, match=r"2 leases are on other boxes \(gpu-02\): start it with --lead again"
    ):
        leader.start()
    leader.env["GPU_POOL_FLEET"] = "lead"
    leader.start()
    assert [lease[1] for lease in seen(leader, "lease0", "lease1", "lease2", "lease3")] == ["active"] * 4
    other.kill()
    other.env["GPU_POOL_FLEET"] = ""
    with pytest.raises(ServerDidNotStartError, match="still keeps 2 leases of its fleet"):
        other.start()


def test_boxes_bring_their_leases_to_a_leader_that_lost_its_disk(fleet: SoleFleet) -> None:
    leader, other = fleet.leader, fleet.join("gpu-02")
    await_gpus(other, 4)
    for number in range(4):
        ask(other, f"lease{number}")
    there = [lease[0] for lease in seen(other, *(f"lease{number}" for number in range(4))) if "gpu-02" in lease[-1]]
    leader.kill()
    for file in leader.state_dir.iterdir():
        if file != fleet.key_file:
            file.unlink()

    leader.start()

    await_gpus(other, 4)
    assert renewed(other, *there) == set(there)
    assert {lease["id"] for lease in leader.json("/fleet/leases")["leases"]} == set(there)


def test_the_key_is_made_once_and_kept_for_the_owner_alone(fleet: SoleFleet) -> None:
    assert stat.S_IMODE(fleet.key_file.stat().st_mode) == 0o600
    key = fleet.key_file.read_text()
    other = fleet.join("gpu-02")
    kept = other.state_dir / "fleet-key"
    assert (kept.read_text(), stat.S_IMODE(kept.stat().st_mode)) == (key, 0o600)

    for box in (fleet.leader, other):
        box.env.pop("GPU_POOL_FLEET_KEY", None)
        box.restart()
    await_gpus(other, 4)
    assert fleet.key_file.read_text() == key

    stranger = fleet.box("gpu-03", fleet.leader.url, GPU_POOL_FLEET_KEY="0" * 64)
    stranger.start()
    until(lambda: "different fleet keys" in str(stranger.health().get("reason")), "the box says why it is not taken")


def test_a_fleet_moves_to_a_database_with_every_lease_alive(fleet: SoleFleet, postgres: PostgresServer) -> None:
    leader, other = fleet.leader, fleet.join("gpu-02")
    await_gpus(other, 4)
    leases = [f"lease{number}" for number in range(6)]
    for lease in leases:
        ask(other, lease)
    ask(other, "past")
    leader.call("DELETE", "/fleet/leases/past")
    told = seen(other, *leases)
    name = f"moved{leader.port}"
    postgres.create_database(name)

    def move() -> subprocess.CompletedProcess[str]:
        command = [*GPU_POOL, "fleet", "move", "--to", postgres.url(name)]
        return subprocess.run(command, env=leader.env, cwd=fleet.folder, capture_output=True, text=True, check=False)

    assert "stop it first: holders keep their leases meanwhile" in move().stderr
    leader.stop()
    said = move()
    assert said.returncode == 0, said.stderr
    assert "4 leases, 2 waiting and the accounting are in postgresql://" in said.stdout
    with pytest.raises(ServerDidNotStartError, match="moved to a database"):
        leader.start()
    leader.env["GPU_POOL_FLEET"] = postgres.url(name)
    leader.start()

    await_gpus(other, 4)
    assert seen(other, *leases) == told
    assert renewed(other, *leases[:4]) == set(leases[:4])
    assert leader.json("/fleet/leases/past")["state"] == "ended"
    assert ask(other, "lease5")["position"] == 2
    leader.call("DELETE", "/fleet/leases/lease0")
    until(lambda: seen(other, "lease4")[0][1] == "active", "the first in line gets the GPU")
    assert "whose leases and accounting are in its PostgreSQL" in move().stderr


def test_the_line_to_paste_is_shown_to_the_user_of_the_server(fleet: SoleFleet) -> None:
    shown = subprocess.run(
        [*GPU_POOL, "fleet", "key"], env=fleet.leader.env, capture_output=True, text=True, check=True
    )
    key = fleet.key_file.read_text().strip()
    assert (
        shown.stdout.strip()
        == f"GPU_POOL_FLEET_KEY={key} gpu-pool serve --join {fleet.leader.url.replace('127.0.0.1', 'localhost')}"
    )
    # A server on another port, in another folder than the settings of this shell say.
    plain = {"PATH": os.environ["PATH"], "HOME": str(fleet.folder)}
    (journal,) = fleet.key_file.parent.glob("[!c]*.sqlite3")  # not that of its custody
    given = ["--journal", str(journal), "--endpoint", fleet.leader.url]
    named = subprocess.run([*GPU_POOL, "fleet", "key", *given], env=plain, capture_output=True, text=True, check=True)
    assert named.stdout == shown.stdout
    nowhere = {**os.environ, "GPU_POOL_STATE_DIR": str(fleet.folder / "empty")}
    none = subprocess.run([*GPU_POOL, "fleet", "key"], env=nowhere, capture_output=True, text=True, check=False)
    assert "`gpu-pool serve --lead` makes one" in none.stderr
