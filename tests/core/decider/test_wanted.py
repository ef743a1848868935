"""Which waiter wants a lease: it would be served before a new request like it if the lease were released now. The property tests
hold it against the plain model: release, ask again, look.
"""

from __future__ import annotations

import pickle
from typing import Any

from gpu_worker_pool.core.decider.wanted import wanted_by
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.configured import Booking, Quota
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from tests.core.build import WALL_OFFSET_S, Box, key, process, reading


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


def test_a_waiter_that_cannot_use_it_does_not_want_it() -> None:
    box = held(2)
    box.ask("waiter", owner="bob", among=("1",))
    assert wanted(box) is None
    assert wanted(box, "other1") == "waiter"


def test_a_request_for_the_same_work_does_not_count() -> None:
    box = held()
    box.ask("more of the sweep", owner="ada")
    assert wanted(box) is None
    box.do(cmd.RequestLease("another job", Request(Wishes(), Holder(owner="ada"), labels=(("name", "eval"),))))
    assert wanted(box) == "another job"


def test_the_waiter_behind_one_for_the_same_work_wants_it() -> None:
    box = held()
    box.ask("more of the sweep", owner="ada")
    box.ask("waiter", owner="bob")
    assert wanted(box) == "waiter"


def test_a_waiter_for_more_gpus_wants_it_once_they_are_reserved_for_it() -> None:
    box = held(2, time_limit_s=None)
    box.ask("waiter", owner="bob", gpus=2)
    assert wanted(box) is None
    box.do(cmd.Release("other1", is_holder=True))
    box.ask("bound", owner="cyd", time_limit_s=5000.0)
    box.observe_now(reading(1))
    box.run_to(box.now + 700.0)
    assert box.stage("bound") == "active"
    assert wanted(box) == "waiter"


def test_a_short_request_goes_on_where_gpus_are_reserved() -> None:
    box = held(2, time_limit_s=1000.0)
    box.release("other1")
    box.ask("bound", owner="cyd", time_limit_s=5000.0)
    box.observe_now(reading(1))
    box.ask("waiter", owner="bob", gpus=2)
    box.run_to(box.now + 700.0)
    assert box.state.reservation is not None
    assert wanted(box) is None


def test_a_waiter_whose_client_does_not_call_does_not_want_it() -> None:
    box = held(settings={"take_up_s": 5.0})
    box.ask("waiter", owner="bob")
    box.release("sweep")
    box.now += 0.1
    box.observe_now(reading())
    box.pass_time(5.0)
    assert "waiter" in box.state.passed_over
    box.observe_now(reading())
    box.ask("sweep again", owner="ada")
    assert wanted(box, "sweep again") is None
    box.renew("waiter")
    assert wanted(box, "sweep again") == "waiter"


def test_a_share_is_wanted_if_it_leaves_enough_memory() -> None:
    box = held(memory_mb=30_000.0, pid=7)
    box.ask("beside", owner="cyd", memory_mb=20_000.0, pid=8)
    box.now += 1.0
    box.observe_now(reading(used_mb=45_000.0, utilization=90, processes=(process(7, 25_000.0), process(8, 20_000.0))))
    box.ask("large", owner="bob", memory_mb=50_000.0)
    assert wanted(box) is None
    box.ask("small", owner="bob", memory_mb=40_000.0)
    assert wanted(box) == "small"


def test_what_a_holder_without_a_known_process_uses_goes_with_it() -> None:
    box = held()
    box.now += 1.0
    box.observe_now(reading(used_mb=79_000.0, utilization=100, processes=None))
    box.ask("waiter", owner="bob")
    assert wanted(box) == "waiter"
    box.now += 1.0
    box.observe_now(reading(used_mb=79_000.0, utilization=100, processes=(process(7, 70_000.0),)))
    assert wanted(box) == "waiter"


def test_a_process_outside_the_pool_stays() -> None:
    box = held(pid=7)
    box.now += 1.0
    box.observe_now(reading(used_mb=60_000.0, processes=(process(7, 40_000.0), process(8, 20_000.0))))
    box.ask("waiter", owner="bob")
    assert wanted(box) is None


def test_a_gang_wants_a_lease_on_one_of_its_nodes() -> None:
    nodes = ("alpha", "beta")
    box = Box(*(reading(0, node=node) for node in nodes), stale_after_s=1e9)
    box.ask("sweep", owner="ada")
    box.ask("gang", owner="bob", nodes=2)
    assert wanted(box) == "gang"


def test_the_owner_of_a_booking_wants_it_before_a_waiter_that_came_first() -> None:
    box = held()
    starts_at = box.now + WALL_OFFSET_S + 10.0
    booking = Booking("course", (key(),), starts_at, starts_at + 1000.0, "bob", "a course")
    box.do(cmd.BookGpus(booking, Wishes()))
    box.run_to(box.now + 20.0)
    box.ask("first", owner="cyd")
    assert wanted(box) is None
    box.ask("booked", owner="bob")
    assert wanted(box) == "booked"


def test_an_owner_that_used_less_wants_it_where_shares_are_fair() -> None:
    box = held(settings={"fair_share": True})
    box.now += 100.0
    box.ask("waiter", owner="bob")
    assert wanted(box) == "waiter"


def test_another_request_of_the_owner_wants_its_place_in_the_quota() -> None:
    box = Box(*map(reading, range(2)), stale_after_s=1e9)
    box.set_quota("ada", Quota(gpus=1))
    box.ask("sweep", owner="ada")
    box.ask("interactive", owner="ada", among=("1",))
    assert wanted(box) == "interactive"


def test_a_preemptible_lease_that_was_told_to_make_room_is_wanted() -> None:
    box = held(preemptible=True)
    box.ask("waiter", owner="bob")
    assert wanted(box) == "waiter"
