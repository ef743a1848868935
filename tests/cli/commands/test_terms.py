"""What is shown of a lease's terms: when it ends or starts, warnings, idle GPUs, reservations and bookings."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from gpu_worker_pool.cli.commands.status import PoolsSeen, show
from gpu_worker_pool.cli.output import Console
from gpu_worker_pool.cli.pools.forecast import forecast_text
from gpu_worker_pool.cli.pools.reading import read_pool
from gpu_worker_pool.cli.pools.report import Naming, PoolReport, short_start, show_start, show_terms
from gpu_worker_pool.cli.pools.servers import ServerAnswer
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.wire.leases import EndWarning, LeaseView
from gpu_worker_pool.wire.plans import ForecastStart, ForecastView

NOON = datetime(2026, 11, 17, 12).astimezone()
NOW = NOON.timestamp()


def at(hours: float) -> str:
    return (NOON + timedelta(hours=hours)).isoformat()


ACTIVE = LeaseView(id="a", state="active")
WAITING = LeaseView(id="w", state="queued", expected_start_at=at(2.5), expected_start_basis="declared")


@pytest.mark.parametrize(
    ("lease", "told"),
    [
        (ACTIVE, []),
        (replace(ACTIVE, ends_at=at(2), time_limit_s=7200.0), ["ends 14:00"]),
        (replace(ACTIVE, ends_at=at(48)), ["ends Thu 12:00"]),
        (replace(ACTIVE, preemptible=True, idle_s=2700.0), ["preemptible", "idle 45m"]),
        (
            replace(
                ACTIVE, ends_at=at(1), warning=EndWarning(reason=EndReason.TIME_LIMIT, ends_at=at(1), ends_in_s=40.5)
            ),
            ["ends in 40s: time limit"],
        ),
        (replace(ACTIVE, ends_at="soon"), ["ends an unknown time"]),
        (replace(WAITING, time_limit_s=5400.0, preemptible=True), ["for 90m", "preemptible"]),
        (replace(ACTIVE, state="ended", ends_at=at(2), preemptible=True), []),
    ],
)
def test_the_terms_of_a_lease_are_told(lease: LeaseView, told: list[str]) -> None:
    assert show_terms(lease, NOW) == told


@pytest.mark.parametrize(
    ("changed", "told", "in_short"),
    [
        ({}, "probably at 14:30", "14:30"),
        ({"expected_after": "carol"}, "probably at 14:30, if carol's job ends when it said", "14:30"),
        (
            {"expected_after": "carol (train.py)"},
            "probably at 14:30, if carol's job (train.py) ends when it said",
            "14:30",
        ),
        (
            {"expected_start_basis": "predicted", "expected_after": "carol"},
            "probably about 14:30, judging by earlier jobs",
            "~14:30",
        ),
        ({"expected_start_at": at(-1)}, "any moment now", "12:00"),
        ({"expected_start_at": None, "expected_start_basis": "unknown"}, "", ""),
        ({"expected_start_at": "later"}, "", ""),
    ],
)
def test_a_waiter_is_told_when_and_why_then(changed: dict[str, Any], told: str, in_short: str) -> None:
    lease = replace(WAITING, **changed)
    assert (show_start(lease, NOW), short_start(lease, NOW)) == (told, in_short)


def gpu(index: int, state: str, *leases: str) -> dict[str, Any]:
    return {"gpu_id": index, "uuid": f"GPU-{index}", "name": "NVIDIA A100", "state": state, "leases": leases}


def ref(index: int) -> dict[str, Any]:
    return {"gpu_id": index, "uuid": f"GPU-{index}", "name": "NVIDIA A100"}


def lease(id_: str, owner: str, command: str, **more: Any) -> dict[str, Any]:
    active = {"state": "active", "granted_at": at(-1)}
    return {"id": id_, "owner": owner, "labels": {"command": command}, **active, **more}


POOL: dict[str, Any] = {
    "gpus": [gpu(0, "leased", "one"), gpu(1, "leased", "two"), gpu(2, "free"), {**gpu(3, "held"), "reason": "kept"}],
    "leases": [
        lease("one", "carol", "train_the_large_model.py", ends_at=at(2.5), time_limit_s=9000.0, preemptible=True),
        lease(
            *("two", "dave", "eval.py"),
            idle_s=2700.0,
            warning={"reason": "idle", "ends_at": at(0.01), "ends_in_s": 36.0},
        ),
    ],
    "queue": [
        lease(
            *("next", "erin", "fine_tune.py"),
            state="queued",
            granted_at=None,
            requested_at=at(-0.5),
            position=1,
            wishes={"gpus": 2},
            reason="Position 1 of 1, waiting for 2 GPUs on one node: 2 leased by carol and dave",
            expected_start_at=at(2.5),
            expected_start_basis="declared",
            expected_after="carol (train_the_large_model.py)",
        )
    ],
    "reservation": {
        "lease_id": "next",
        "holder": "erin",
        "gpus": [ref(0), ref(3)],
        "starts_at": at(2.5),
        "basis": "declared",
    },
    "bookings": [
        {
            "id": "course",
            "gpus": [ref(2)],
            "starts_at": at(48),
            "ends_at": at(52),
            "owner": "ada",
            "reason": "[b]course",
        },
        {"id": "drain", "gpus": [ref(1)], "starts_at": at(480), "reason": "new fans"},
    ],
}


def read(pool: Any) -> PoolReport:
    return read_pool(ServerAnswer("box", "http://box:8000", 200, pool), Naming("box"))


def status(width: int, *, has_why: bool = False) -> list[str]:
    file = io.StringIO()
    show(
        Console(file=file, width=width, is_terminal=True, has_colours=False),
        PoolsSeen([read(POOL)]),
        NOW,
        has_why=has_why,
    )
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_status_tells_the_terms_the_starts_and_the_plans() -> None:
    lines = status(220)
    assert any(line.endswith("carol, train_the_large_model.py, since 11:00, ends 14:30, preemptible") for line in lines)
    assert any(line.endswith("dave, eval.py, since 11:00, ends in 36s: idle, idle 45m") for line in lines)
    waiting = next(line for line in lines if "erin" in line)
    told = "probably at 14:30, if carol's job (train_the_large_model.py) ends when it said"
    assert waiting.split()[-2:] == ["11:30", "14:30"]
    of_each = next(line for line in status(220, has_why=True) if "erin" in line and "2 leased" in line)
    assert of_each.endswith(f"2 leased by carol and dave; {told}")
    assert lines[-3:] == [
        "GPUs 0, 3 reserved for erin, probably at 14:30",
        "GPU 2 booked for ada from Thu 12:00 until Thu 16:00: [b]course",
        "GPU 1 out of service from 2026-12-07 12:00 on: new fans",
    ]


@pytest.mark.parametrize(
    "wrong", [None, True, -1, 1e400, 10**400, "9999-12-31T23:59:59-23:00", "\ud800", [], [5], {}, {"a": []}], ids=repr
)
def test_what_is_of_another_kind_is_unknown_and_never_a_crash(wrong: Any) -> None:
    broken = [{**POOL, **dict.fromkeys(POOL, wrong), "gpus": POOL["gpus"]}, {"gpus": wrong}, wrong]
    for part in ("gpus", "leases", "queue", "bookings"):
        first = {"time_limit_s": 1.0, "idle_s": 1.0, "warning": {"reason": "idle"}, **POOL[part][0]}
        broken += [{**POOL, part: [wrong]}, {**POOL, part: [dict.fromkeys(first, wrong)]}]
        # By itself too: a fault may hide another one.
        broken += [{**POOL, part: [{**first, key: wrong}]} for key in first]
    kept = POOL["reservation"]
    broken += [{**POOL, "reservation": {**kept, key: wrong}} for key in kept]
    file = io.StringIO()
    show(Console(file=file, width=200), PoolsSeen([read(pool) for pool in broken]), NOW)
    assert file.getvalue().count("\n") > len(broken)


def forecast(*starts: tuple[int, str | None, str | None]) -> ForecastView:
    found = tuple(ForecastStart(gpus=gpus, at=at_, basis="predicted", why=why) for gpus, at_, why in starts)
    return ForecastView(node="box", now=at(0), can_grant=True, starts=found)


@pytest.mark.parametrize(
    ("views", "told"),
    [
        ([], None),
        ([forecast((1, at(2), None), (4, at(3), None))], "If you ask now: 1 GPU about 14:00, 4 about 15:00"),
        ([forecast((1, at(2), None), (2, at(2), None), (4, None, None))], "If you ask now: 1 to 2 GPUs about 14:00"),
        ([forecast((1, at(2), None)), forecast((1, at(1), None))], "If you ask now: 1 GPU about 13:00"),
        ([forecast((1, at(-1), None))], "If you ask now: 1 GPU at once"),
        ([forecast((1, None, "your quota is 0 GPUs"))], "If you ask now, you will wait: your quota is 0 GPUs"),
    ],
)
def test_a_request_that_is_made_now_is_told_when_it_would_start(views: list[ForecastView], told: str | None) -> None:
    assert forecast_text(views, NOW) == told
