"""Which waiter wants a lease: it could be served, before a new request like it, if the lease were released now."""

from __future__ import annotations

import pickle
from typing import Any

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.queue.wanted import wanted_by
from tests.core.build import Box, process, reading


def wanted(box: Box, lease_id: str = "sweep") -> str | None:
    """The waiter; the question changes nothing."""
    before = pickle.dumps(box.state)
    found = wanted_by(box.state, lease_id, box.now)
    assert pickle.dumps(box.state) == before
    return None if found is None else found.id


def held(gpus: int = 1, **wants: Any) -> Box:
    """A box whose GPUs are all held, one of them by a sweep of ada."""
    box = Box(*map(reading, range(gpus)), reserve_after_s=600.0, stale_after_s=1e9, **wants.pop("settings", {}))
    box.ask("sweep", owner="ada", **wants)
    for number in range(1, gpus):
        box.ask(f"other{number}", owner="cyd")
    return box


def test_no_lease_is_wanted_while_no_request_waits() -> None:
    box = held()
    assert wanted(box) is None


def test_only_an_active_lease_is_wanted() -> None:
    box = held()
    box.ask("waiter", owner="bob")
    box.release("sweep")
    assert wanted(box, "sweep") is None
    assert wanted(box, "waiter") is None
    assert wanted(box, "never heard of") is None


def test_a_waiter_of_the_same_priority_wants_it_and_one_of_a_lower_one_does_not() -> None:
    box = held()
    box.ask("waiter", owner="bob", priority=-1)
    assert wanted(box) is None
    box.ask("later", owner="bob")
    assert wanted(box) == "later"


def test_a_request_for_the_same_work_does_not_count() -> None:
    box = held()
    box.ask("more of the sweep", owner="ada")
    assert wanted(box) is None
    box.do(cmd.RequestLease("another job", Request(Wishes(), Holder(owner="ada"), labels=(("name", "eval"),))))
    assert wanted(box) == "another job"


def test_what_a_holder_without_a_known_process_uses_goes_with_it() -> None:
    box = held()
    box.now += 1.0
    box.observe_now(reading(used_mb=79_000.0, utilization=100, processes=None))
    box.ask("waiter", owner="bob")
    assert wanted(box) == "waiter"
    box.now += 1.0
    box.observe_now(reading(used_mb=79_000.0, utilization=100, processes=(process(7, 70_000.0),)))
    assert wanted(box) == "waiter"
