"""A fleet of real processes while all of it is broken, on a real PostgreSQL and without: no lease ends, no GPU has two holders.

FLEET_SEED repeats a schedule of faults, NEMESIS_KEEP keeps the histories in that folder. `make soak` runs for longer, with more
boxes, a standby that is promoted, and fifty workers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet import nemesis, trials
from tests.e2e.fleet.scene import Scene
from tests.ledger.postgres.server import PostgresServer

# One of each group; the soak has them all.
OF_LEADER = (
    "kill_leader",
    "stop_leader",
    "cut_leader_from_database",
    "lose_requests_of_leader",
    "lose_answers_to_leader",
)
OF_NETWORK = ("cut_boxes_from_leader", "lose_requests_to_leader", "lose_answers_of_leader", "cut_network_of_box")
OF_DATABASE = ("kill_database", "stop_database")
OF_BOX = ("kill_box", "stop_box", "duplicate_box", "duplicate_dead_box", "reboot_box")
# Of a leader that nobody replaces.
OF_SOLE_LEADER = ("kill_leader", "hand_over", "stop_leader", "reboot_leader")


@pytest.fixture(scope="module", params=["database", "own journal"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    base = Path(os.environ["NEMESIS_KEEP"]) if "NEMESIS_KEEP" in os.environ else tmp_path_factory.mktemp("fleet")
    if request.param == "database":
        postgres: PostgresServer = request.getfixturevalue("postgres")
        postgres.create_database("nemesis")
        scene = Scene(postgres, "nemesis", base / "boxes")
    else:
        scene = Scene(None, "", base / "own", agents=2)
    try:
        scene.start()
        yield scene
    finally:
        scene.close()


def test_no_lease_ends_in_an_outage(scene: Scene) -> None:
    """While the database is away for longer than the TTL and a box is restarted, and while the leader is replaced, or killed
    and started again, three times.
    """
    scene.begin(scene.folder.parent / "held")
    trials.employ_holders(scene)

    lost = {name: trials.lost_by(scene, outage) for name, outage in trials.outages(scene, 0.0).items()}

    scene.end_workers()
    assert not any(lost.values()), lost


def test_no_gpu_has_two_holders_of_old_and_new_clients(scene: Scene) -> None:
    scene.begin(scene.folder.parent / "crowd")

    history, found = trials.crowd(scene, old=3, new=5, rounds=2)

    assert found == []
    assert len(history.tenures) == (3 * len(scene.boxes) + 5) * 2
    assert {lease.who[:3] for lease in history.tenures} == {"old", "new"}


def test_the_promises_are_kept_whatever_fails(scene: Scene) -> None:
    seed = int(os.environ.get("FLEET_SEED", random.SystemRandom().randrange(10_000)))
    scene.begin(scene.folder.parent / f"nemesis-{seed}")
    drawn = random.Random(seed)
    groups = (
        (OF_LEADER, OF_NETWORK, OF_DATABASE, OF_BOX) if scene.has_database else (OF_SOLE_LEADER, OF_NETWORK, OF_BOX)
    )
    kinds = [drawn.choice(group) for group in groups]
    plan = nemesis.FleetPlan(
        seed, chaos_s=0.0, calm_s=3.0, ttl_s=2.0, most_s=3.0, pause_s=0.6, kinds=[*kinds, "kill_worker"]
    )

    report = nemesis.run(plan, scene)

    told = f"FLEET_SEED={seed}, histories in {scene.folder}, {dict(report.counts)}"
    assert not report.violations, "\n".join([told, *map(str, report.violations)])
    assert report.counts["grants"] >= 10, told
    assert report.counts["faults_that_did_not_come"] == 0, told
