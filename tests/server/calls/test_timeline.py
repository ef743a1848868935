"""GET /timeline: who held which GPU, from a journal that has a past, and from what is held now."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.core.accounting.timeline import Timeline
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.ledger.journal import JournalDamaged
from gpu_worker_pool.ledger.sqlite.accounts import SqliteAccounts
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.testing import ServerProcess
from gpu_worker_pool.wire.accounting import TimelineView
from tests.server.described import assert_described
from tests.server.leasing import assert_problem, put, release, take, wait_until_free
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
    )


def active(lease_id: str, granted_at: float, gpus: int = 1) -> ActiveLease:
    lease = ended(lease_id, granted_at, granted_at, gpus)
    return ActiveLease(lease_id, lease.request, lease.gpus, 1, granted_at, granted_at, 1000 * gpus)


def ids(timeline: Timeline) -> dict[str, list[str]]:
    return {uuid: [span.lease_id for span in spans] for uuid, spans in timeline.by_gpu.items()}


# The pure part


def test_a_lease_is_a_span_on_each_of_its_gpus() -> None:
    timeline = Timeline(NOW - 100, NOW, most=10)
    timeline.add(active("held", NOW - 500, gpus=2))
    timeline.add(ended("over", NOW - 150, NOW - 50))
    timeline.add(ended("before", NOW - 150, NOW - 101))

    assert ids(timeline) == {"GPU-0": ["held", "over"], "GPU-1": ["held"]}
    held, over = timeline.by_gpu["GPU-0"]
    assert (held.since, held.until, held.end_reason, held.label) == (NOW - 500, None, None, "run held")
    assert (over.since, over.until, over.end_reason) == (NOW - 150, NOW - 50, EndReason.EXPIRED)
    assert (timeline.unknown_leases, timeline.is_cut) == (0, False)


@pytest.mark.parametrize(
    ("granted_at", "ended_at"),
    [(None, NOW), (nan, NOW), (NOW - 5, nan), (NOW - 5, NOW - 6), (NOW - 5, NOW + 1), (-1e12, NOW)],
)
def test_times_that_make_no_sense_are_counted_and_not_shown(
    granted_at: float | None, ended_at: float, tmp_path: Path
) -> None:
    lease = ended("odd", granted_at, ended_at)
    timeline = Timeline(NOW - 100, NOW, most=10)
    timeline.add(lease)
    assert (ids(timeline), timeline.unknown_leases) == ({}, 1)

    path = tmp_path / "journal"
    with closing(SqliteJournal(path, durability="normal")) as journal:
        journal.append((), [lease])
        read, _ = SqliteAccounts(path).trace(lambda: Timeline(NOW - 100, NOW, most=10))
        assert (ids(read), read.unknown_leases) == ({}, 1)
        read, _ = SqliteAccounts(path).trace(lambda: Timeline(NOW - 100, NOW, most=10), but_for={"odd"})
        assert read.unknown_leases == 0


def test_of_too_many_the_latest_are_kept_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(SqliteJournal(path, durability="normal")) as journal:
        # Not in the order of their ends; the two that ended first have no room.
        journal.append((), [ended(f"lease-{n}", NOW - 90, NOW - 50 + n * 7 % 40) for n in range(40)])
        journal.append((), [replace(ended("never-granted", None, NOW - 1), gpus=())])
        accounts = SqliteAccounts(path)
        exact, _ = accounts.trace(lambda: Timeline(NOW - 100, NOW, most=40))
        cut, _ = accounts.trace(lambda: Timeline(NOW - 100, NOW, most=38))
    assert (exact.is_cut, len(exact.by_gpu["GPU-0"]), exact.unknown_leases) == (False, 40, 0)
    assert (cut.is_cut, len(cut.by_gpu["GPU-0"])) == (True, 38)
    assert min(span.until or NOW for span in cut.by_gpu["GPU-0"]) == NOW - 48

    wide = Timeline(NOW - 100, NOW, most=2)
    for lease in (active("a", NOW - 1), active("b", NOW - 2, gpus=2), active("c", NOW - 3)):
        wide.add(lease)
    assert (ids(wide), wide.is_cut) == ({"GPU-0": ["a"]}, True)  # not half of b, and nothing that is older than it


def test_a_damaged_lease_is_told(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(SqliteJournal(path, durability="normal")) as journal:
        journal.append((), [ended("a", NOW - 2, NOW - 1)])
        with closing(sqlite3.connect(path)) as other:
            other.execute("UPDATE ended_lease SET body = '[]'")
            other.commit()
        with pytest.raises(JournalDamaged, match="is damaged"):
            SqliteAccounts(path).trace(lambda: Timeline(NOW - 100, NOW, most=10))


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


@pytest.mark.parametrize(
    "query",
    [
        "hours=0",
        "hours=169",
        "hours=nan",
        "hours=six",
        "hours=1_0",
        "hours=1e1",
        "hours=+1",
        "hours=",
        "hours=1&hours=2",
        "h=1",
    ],
)
def test_a_query_that_makes_no_sense_is_refused(server: ServerProcess, query: str) -> None:
    assert_problem(server.ask(f"/timeline?{query}"), 422, "hours")


def test_reading_is_open_and_a_journal_in_trouble_is_told(server: ServerProcess) -> None:
    answer = server.ask("/timeline", headers={"X-Forwarded-For": "10.0.0.1", "Origin": "http://elsewhere.example"})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
    assert server.ask("/timeline", "DELETE").headers["allow"] == "GET"

    (journal,) = server.state_dir.glob("*.sqlite3")
    journal.rename(server.state_dir / "taken-away")
    assert_problem(server.ask("/timeline"), 503, "cannot be read now", str(journal))
