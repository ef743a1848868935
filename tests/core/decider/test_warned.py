"""Leases that the pool ends after a warning: at their time limit, for others that need the GPU, or because they compute nothing."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Quota
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason
from gpu_worker_pool.core.queue.idleness import idle_s
from gpu_worker_pool.core.queue.planner import NEVER, Planner
from gpu_worker_pool.core.queue.withheld import Withheld
from tests.core.build import START, Box, free_at_once, of_kind, process, reading, refusals

HOUR_S = 3600.0


def box_with(**settings: float) -> Box:
    return Box(reading(0), reading(1), stale_after_s=1e9, **settings)


def limit_of(box: Box, lease_id: str) -> float | None:
    lease = box.state.leases[lease_id]
    assert isinstance(lease, ActiveLease)
    return lease.limit


def test_a_holder_that_ends_after_the_warning_is_known_to_have_obeyed() -> None:
    box = box_with()
    box.ask("a", time_limit_s=HOUR_S)
    box.ask("b", time_limit_s=HOUR_S)
    box.release("b")
    box.run_to(START + HOUR_S - 30)
    box.release("a")

    ended = (box.state.find(id_) for id_ in ("a", "b"))
    assert [(lease.reason, lease.warned) for lease in ended if isinstance(lease, EndedLease)] == [
        (EndReason.RELEASED, EndReason.TIME_LIMIT),
        (EndReason.RELEASED, None),
    ]


@pytest.mark.parametrize("is_by_quota", [False, True])
def test_more_than_the_longest_limit_is_refused(is_by_quota: bool) -> None:
    box = box_with() if is_by_quota else box_with(max_time_limit_s=HOUR_S)
    if is_by_quota:
        box.set_quota("*", Quota(max_time_limit_s=HOUR_S))

    (refused,) = refusals(box.ask("a", time_limit_s=2 * HOUR_S), ev.RefusalCode.UNSERVABLE)

    assert "a time limit of 2h was asked for; the longest allowed is 1h" in str(refused)


def test_a_reboot_leaves_a_remote_holder_the_rest_of_its_time() -> None:
    box = box_with()
    box.ask("a", time_limit_s=HOUR_S)

    box.now += 595.0
    box.reboot()

    assert limit_of(box, "a") == START + HOUR_S
    box.observe_now(reading(0))
    (ended,) = of_kind(box.run_to(START + 2 * HOUR_S), ev.LeaseEnded)
    assert ended.at == START + HOUR_S


def test_a_limit_that_came_after_the_grant_says_nothing_of_its_end() -> None:
    box = box_with()
    box.ask("a", owner="ada")

    box.set_quota("ada", Quota(max_time_limit_s=150.0))

    assert Planner(box.state, box.now, Withheld(box.state, box.now)).end_of("a") == NEVER


GRACE_S = 60.0


def box_of(gpus: int, **settings: float) -> Box:
    return free_at_once(*(reading(index) for index in range(gpus)), stale_after_s=1e9, **settings)


def warned(events: list[ev.Event]) -> list[str]:
    return [event.lease_id for event in events if isinstance(event, ev.LeaseWarned)]


def test_a_restart_leaves_the_warning_as_it_was() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True)
    box.ask("job")
    box.now += 30.0

    box.restart()
    box.observe_now(reading(0))
    box.run_to(START + GRACE_S)

    assert (box.stage("idle"), box.stage("job")) == ("preempted", "active")


def withdrawn(events: list[ev.Event]) -> list[str]:
    return [event.lease_id for event in events if isinstance(event, ev.LeaseWarned) and event.reason is None]


def test_near_its_time_limit_a_spared_lease_is_warned_of_that() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True, time_limit_s=100.0)
    box.now += 45.0
    box.ask("job")
    box.now += 10.0

    events = of_kind(box.release("job"), ev.LeaseWarned)

    assert events == [ev.LeaseWarned(box.now, "idle", EndReason.TIME_LIMIT, START + 100.0)]


def test_the_look_after_a_restart_withdraws_what_no_waiter_needs() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True)
    box.ask("job")
    journal = box.log[: len(box.log)]
    box.release("job")
    # The withdrawal itself was lost with the server.
    box.log = [*journal, *(event for event in box.log[len(journal) :] if not isinstance(event, ev.LeaseWarned))]

    assert warned(box.restart()) == []
    assert withdrawn(box.observe_now(reading(0))) == ["idle"]


IDLE_S = 1800.0


def idle_box(**settings: object) -> Box:
    box = Box(reading(0), reading(1), stale_after_s=1e9, **settings)
    box.ask("a", gpus=2, pid=1)
    return box


def idle(box: Box) -> float | None:
    lease = box.state.leases["a"]
    assert isinstance(lease, ActiveLease)
    return idle_s(box.state, lease, box.now)


def look(box: Box, at: float, *utilization: float | None) -> list[ev.Event]:
    box.now = START + at
    running = (process(1, 40_000),)
    gpus = enumerate(utilization)
    return box.observe_now(
        *(reading(index, utilization=load, used_mb=40_000, processes=running) for index, load in gpus)
    )


def test_a_restart_does_not_make_a_lease_idle() -> None:
    box = idle_box()
    box.now += 10 * IDLE_S

    box.restart()
    assert idle(box) is None
    look(box, 10 * IDLE_S, 0, 0)

    assert idle(box) is None


def test_where_idle_gpus_are_taken_back_the_lease_ends_after_a_warning() -> None:
    box = idle_box(idle_reclaim=True)

    (warned,) = of_kind(look(box, IDLE_S, 0, 0), ev.LeaseWarned)
    assert warned == ev.LeaseWarned(box.now, "a", EndReason.IDLE, box.now + 60.0)
    box.run_to(box.now + 60.0)

    assert box.stage("a") == "draining"
