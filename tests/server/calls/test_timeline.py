"""GET /timeline: who held which GPU, from a journal that has a past, and from what is held now."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.routes.accounting import spans_by_gpu
from gpu_worker_pool.testing import ServerProcess
from gpu_worker_pool.wire.accounting import TimelineView
from tests.server.described import assert_described
from tests.server.leasing import put, release, take, wait_until_free
from tests.server.past_leases import server_with_past

HOUR_S = 3600.0
NOW = 1_000_000.0


def ended(lease_id: str, granted_at: float | None, ended_at: float, gpus: int = 1, **holder: Any) -> EndedLease:
    return EndedLease(
        lease_id,
        Request(Wishes(gpus), Holder(**holder), labels=(("command", f"run {lease_id}"), ("other", "no"))),
        tuple(GpuKey("box", f"GPU-{number}") for number in range(gpus)),
        1,
        granted_at or 0.0,
        granted_at,
        ended_at,
        EndReason.EXPIRED,
        peak_memory_mb=30_000.5,
        mean_utilization_percent=61.5,
    )


def active(lease_id: str, granted_at: float, gpus: int = 1) -> ActiveLease:
    lease = ended(lease_id, granted_at, granted_at, gpus)
    return ActiveLease(lease_id, lease.request, lease.gpus, 1, granted_at, granted_at, 1000 * gpus)


def ids(by_gpu: Mapping[str, Sequence[ActiveLease | EndedLease]]) -> dict[str, list[str]]:
    return {uuid: [lease.id for lease in leases] for uuid, leases in by_gpu.items()}


# The pure part


def test_of_too_many_the_latest_are_kept_and_that_is_said() -> None:
    leases = [active("a", NOW - 1), active("b", NOW - 2, gpus=2), active("c", NOW - 3)]
    found, is_cut = spans_by_gpu(leases, most=2)
    assert (ids(found), is_cut) == ({"GPU-0": ["a"]}, True)  # not half of b, and nothing that is older than it
    assert spans_by_gpu(leases, most=4)[1] is False


# The call


@pytest.fixture(scope="module")
def began_at() -> float:
    return time.time()


@pytest.fixture(scope="module")
def server(began_at: float) -> Iterator[ServerProcess]:
    past = [
        ended("long-ago", began_at - 9 * HOUR_S, began_at - 8 * HOUR_S, owner="eve"),
        ended("early", began_at - 9 * HOUR_S, began_at - 5 * HOUR_S, gpus=2, owner="ada", worker_id="w-1"),
        ended("late", began_at - 2 * HOUR_S, began_at - HOUR_S, owner="<script>"),
        ended("backwards", began_at - HOUR_S, began_at - 2 * HOUR_S),
    ]
    with server_with_past(past) as running:
        yield running


def by_gpu(answer: Any) -> dict[str, list[str]]:
    assert_described(TimelineView, answer)
    return {gpu["uuid"]: [span["lease_id"] for span in gpu["spans"]] for gpu in answer["gpus"] if gpu["spans"]}


def test_the_last_hours_are_shown_with_what_is_held_now(server: ServerProcess, began_at: float) -> None:
    first = server.json("/timeline")
    assert by_gpu(first) == {"GPU-0": ["early", "late"], "GPU-1": ["early"]}
    assert (first["node"], first["source"], first["is_cut"], first["unknown_leases"]) == ("box", "simulated", False, 1)
    assert first["complete_since"] is None
    assert [(gpu["gpu_id"], gpu["name"] is None) for gpu in first["gpus"]] == [
        *((number, False) for number in range(4)),
        *((None, True) for _ in range(2)),  # they are in the journal and no longer in the box
    ]
    assert first["gpus"][4]["spans"][0] == {
        "lease_id": "early",
        "owner": "ada",
        "worker_id": "w-1",
        "label": "run early",
        "since": iso_time(began_at - 9 * HOUR_S),
        "until": iso_time(began_at - 5 * HOUR_S),
        "end_reason": "expired",
        "is_shared": False,
        "ended_by": None,
        "end_note": None,
        "peak_memory_mb": 30_000.5,
        "mean_utilization_percent": 61.5,
    }
    assert by_gpu(server.json("/timeline?hours=1.5")) == {"GPU-0": ["late"]}
    assert by_gpu(server.json("/timeline?hours=168"))["GPU-0"] == ["early", "long-ago", "late"]

    held = take(server, owner="zoe", gpus=2, memory_mb=1000, labels={"command": "python train.py"})
    put(server, "waiter", gpus=4)
    uuids = [gpu["uuid"] for gpu in held["gpus"]]
    seen = by_gpu(server.json("/timeline?hours=0.1"))
    assert seen == {uuid: [held["id"]] for uuid in uuids}
    spans = [gpu["spans"][0] for gpu in server.json("/timeline?hours=0.1")["gpus"] if gpu["uuid"] in uuids]
    assert [(s["label"], s["until"], s["end_reason"], s["is_shared"]) for s in spans] == [
        ("python train.py", None, None, True)
    ] * 2
    assert spans[0]["since"] == held["granted_at"]

    release(server, "waiter")
    over = release(server, held["id"])
    for _ in ("while it may drain", "and when it is gone"):
        answer = server.json("/timeline?hours=0.1")
        assert by_gpu(answer) == seen  # once
        (span,) = next(gpu["spans"] for gpu in answer["gpus"] if gpu["uuid"] == uuids[0])
        assert (span["until"], span["end_reason"]) == (over["ended_at"], "released")
        wait_until_free(server)
