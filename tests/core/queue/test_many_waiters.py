"""A queue of many different wishes stays cheap. What it costs is counted in calls and not in time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from gpu_worker_pool.core.queue import placement, planner, preemption, serve
from tests.core.build import Box, reading
from tests.core.queue.boxes import free_at_once

PASS = serve.serve_queue.__code__
PLACE = placement.Placer.place.__code__
CLAIM = preemption.find_claim.__code__
PLAN = planner.Planner.plan.__code__
WAITERS = 120


def calls(run: Callable[[], Any]) -> Counter[object]:
    """How often each function was called."""
    found: Counter[object] = Counter()

    def note(frame: Any, kind: str, _: object) -> None:
        if kind == "call":
            found[frame.f_code] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def wants(number: int) -> dict[str, Any]:
    """Wishes that differ from those of each other number."""
    return {
        "gpus": 1 + number % 4,
        "priority": number % 50,
        "time_limit_s": 1000.0 + 7.3 * number,
        "preemptible": bool(number % 2),
        "memory_mb": 100.0 + number if number % 3 == 0 else None,
    }


def full_box(*, preemptible: int, **settings: float) -> Box:
    """Eight leased GPUs, this many of them under preemptible leases; and many waiters with different wishes."""
    box = free_at_once(*map(reading, range(8)), stale_after_s=1e9, **settings)
    for number in range(8):
        box.ask(f"holder{number}", preemptible=number < preemptible)
    for number in range(WAITERS):
        box.ask(f"waiter{number}", **wants(number))
    assert len(box.state.queue) == WAITERS
    return box


@pytest.mark.parametrize("preemptible", [0, 1, 8])
def test_a_pass_over_many_different_waiters_tries_few_wishes(preemptible: int) -> None:
    box = full_box(preemptible=preemptible)

    box.state.unsettle()
    found = calls(lambda: box.pass_time(0.0))

    assert found[PASS] == 1
    # Exclusive or shared, and the number of GPUs, before and after each claim: it does not grow with the waiters.
    assert found[PLACE] <= 20
    assert found[CLAIM] <= 20


def test_a_wish_that_is_kept_from_less_is_tried_though_another_failed() -> None:
    box = free_at_once(reading(0), reading(1), stale_after_s=1e9, reserve_after_s=0.0)
    box.ask("holder", time_limit_s=100.0)
    box.ask("wide", gpus=2)
    box.ask("long", time_limit_s=1000.0)
    assert box.stage("long") == "queued"

    box.ask("short", time_limit_s=50.0)

    assert box.stage("short") == "active"


def test_few_dates_are_looked_for_when_all_wait_for_holders_without_a_limit() -> None:
    box = full_box(preemptible=0, reserve_after_s=10.0)
    different = len({box.state.queued(lease_id).request.wishes for lease_id in box.state.queue})

    found = calls(lambda: box.run_to(box.now + 10.0))

    assert box.state.reservation is None
    assert 0 < found[PLAN] <= different < WAITERS


def test_the_first_of_those_that_fit_is_served_and_not_the_one_that_needs_least() -> None:
    box = free_at_once(reading(0), stale_after_s=1e9)
    box.ask("holder")
    for lease_id, memory_mb in (("largest", 64_001.0), ("first", 40_000.0), ("least", 30_000.0)):
        box.ask(lease_id, memory_mb=memory_mb, among=("0",))

    box.release("holder")

    assert [box.stage(lease_id) for lease_id in ("first", "least")] == ["active", "queued"]
