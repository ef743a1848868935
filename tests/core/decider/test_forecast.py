"""What a request would come to if it were made now. The property tests make it in a copy of the pool, and compare."""

from __future__ import annotations

import pickle

import pytest

from gpu_worker_pool.core.decider.forecast import MOST_WAITERS, Forecast, When, usual_wishes
from gpu_worker_pool.core.model.configured import Quota
from gpu_worker_pool.core.model.lease import Basis
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.queue.planner import FreeAt
from tests.core.build import A100, T4, Box, forecast, reading


def told(box: Box, owner: str | None = None, **wishes: object) -> Forecast:
    """The forecast; the question changes nothing."""
    before = pickle.dumps(box.state)
    (found,) = forecast(box.state, box.now, [Wishes(**wishes)], owner)  # type: ignore[arg-type]
    assert pickle.dumps(box.state) == before
    return found


def test_free_gpus_are_had_now_more_at_a_declared_end_and_what_no_node_has_never() -> None:
    box = Box(*map(reading, range(4)), stale_after_s=1e9)
    box.ask("one", gpus=2, time_limit_s=600.0)
    found = forecast(box.state, box.now, usual_wishes(box.state))
    assert [each.wishes.gpus for each in found] == [1, 2, 4, 8]
    assert [each.when for each in found] == [When.NOW, When.NOW, When.LATER, When.NEVER]
    assert found[2].start == FreeAt(box.now + 600.0, Basis.DECLARED, "one")
    assert found[3].why == "8 GPUs on one node were asked for; this box has 4 GPUs"


def test_a_lease_without_a_limit_is_predicted_to_last_as_long_as_those_before() -> None:
    box = Box(reading(), stale_after_s=1e9)
    box.ask("first")
    assert told(box).when is When.UNKNOWN, "no lease has ended yet"
    box.now += 300.0
    box.release("first")
    box.observe_now(reading())
    box.ask("second")
    assert told(box) == Forecast(Wishes(), When.LATER, FreeAt(box.now + 300.0, Basis.PREDICTED, "second"))


def test_it_is_behind_those_that_wait() -> None:
    box = Box(reading(), stale_after_s=1e9)
    for number in range(3):
        box.ask(f"lease{number}", time_limit_s=100.0)
    start = told(box).start
    assert start is not None
    assert start.at == pytest.approx(box.now + 300.0)
    for number in range(MOST_WAITERS):
        box.ask(f"more{number}", time_limit_s=100.0)
    assert told(box).when is When.UNKNOWN, "there are too many ahead"


def test_it_knows_what_the_next_pass_would_reserve_for_those_ahead() -> None:
    """The GPU that is reserved drains, so the waiter starts sooner than was said when it was reserved."""
    box = Box(reading(), stale_after_s=1e9, reserve_after_s=0.0)
    for lease_id, lasted_s in (("first", 300.0), ("second", 100.0)):
        box.ask(lease_id)
        if lease_id == "second":
            box.ask("waiter")
        box.now += lasted_s
        box.release(lease_id)
        if lease_id == "first":
            box.observe_now(reading())
    assert told(box).start == FreeAt(box.now + 200.0, Basis.PREDICTED, "waiter")


def test_each_model_is_told_where_there_are_several() -> None:
    box = Box(reading(0), reading(1, name=T4), stale_after_s=1e9)
    box.ask("held", model="T4", time_limit_s=600.0)
    wishes = usual_wishes(box.state, sizes=(1,))
    assert [each.model for each in wishes] == [None, A100, T4]
    assert [each.when for each in forecast(box.state, box.now, wishes)] == [When.NOW, When.NOW, When.LATER]


def test_what_others_make_room_on_is_had_when_they_have_left() -> None:
    box = Box(reading(), stale_after_s=1e9, preempt_grace_s=60.0)
    box.ask("preemptible", preemptible=True)
    assert told(box) == Forecast(Wishes(), When.LATER, FreeAt(box.now + 60.0, Basis.DECLARED, "preemptible"))


def test_an_owner_is_told_of_its_quota() -> None:
    box = Box(*map(reading, range(4)), stale_after_s=1e9)
    box.set_quota("ada", Quota(gpus=1))
    box.ask("held", owner="ada")
    assert told(box, "ada").when is When.UNKNOWN
    assert told(box, "ada", gpus=2).why == "2 GPUs were asked for; the quota of ada allows at most 1"
    assert told(box, "bob").when is When.NOW
