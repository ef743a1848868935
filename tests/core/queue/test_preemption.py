"""Preemptible leases: they take what is idle, and make room for requests that are not preemptible."""

from __future__ import annotations

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Quota
from gpu_worker_pool.core.model.lease import EndReason
from tests.core.build import START, Box, key, of_kind, process, reading
from tests.core.queue.boxes import free_at_once

GRACE_S = 60.0


def box_of(gpus: int, **settings: float) -> Box:
    return free_at_once(*(reading(index) for index in range(gpus)), stale_after_s=1e9, **settings)


def warned(events: list[ev.Event]) -> list[str]:
    return [event.lease_id for event in events if isinstance(event, ev.LeaseWarned)]


def test_a_preemptible_lease_ends_after_a_warning_when_its_gpu_is_needed() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True)

    events = box.ask("job")

    assert of_kind(events, ev.LeaseWarned) == [ev.LeaseWarned(START, "idle", EndReason.PREEMPTED, START + GRACE_S)]
    box.run_to(START + GRACE_S)
    assert (box.stage("idle"), box.stage("job")) == ("preempted", "active")


def test_a_preemptible_lease_that_leaves_at_once_makes_room_at_once() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True)
    box.ask("job")

    box.release("idle")

    assert box.stage("job") == "active"


def test_preemptible_requests_come_last() -> None:
    box = box_of(1)
    box.ask("holder")
    box.ask("idle", preemptible=True, priority=10)
    box.ask("job")

    box.release("holder")

    assert (box.stage("idle"), box.stage("job")) == ("queued", "active")


def test_no_preemptible_request_preempts_another() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True)

    assert warned(box.ask("other", preemptible=True, priority=5)) == []


def test_the_youngest_ends_first_and_no_more_than_needed() -> None:
    box = box_of(3)
    for lease_id in ("old", "middle", "young"):
        box.ask(lease_id, preemptible=True)
        box.pass_time(1.0)

    assert warned(box.ask("job")) == ["young"]
    assert warned(box.ask("other")) == ["middle"]
    assert warned(box.pass_time(1.0)) == []


def test_free_gpus_are_used_before_any_lease_ends() -> None:
    box = box_of(3)
    for lease_id in ("a", "b"):
        box.ask(lease_id, preemptible=True)
        box.pass_time(1.0)

    assert warned(box.ask("wide", gpus=2)) == ["b"]


def test_what_is_free_is_kept_for_the_waiter_that_gets_the_rest() -> None:
    box = box_of(2)
    box.ask("idle", preemptible=True)
    box.ask("wide", gpus=2)

    box.ask("late")

    assert (box.stage("late"), set(box.state.claims.values())) == ("queued", {"wide"})
    box.run_to(START + GRACE_S)
    assert box.gpus_of("wide") == (key(0), key(1))


def test_nothing_ends_where_that_would_not_be_enough() -> None:
    box = box_of(2)
    box.ask("idle", preemptible=True)
    box.ask("job")

    assert warned(box.ask("wide", gpus=2)) == []


def test_shares_end_until_there_is_room() -> None:
    box = box_of(1)
    box.ask("fixed", memory_mb=20_000)
    for lease_id in ("a", "b"):
        box.ask(lease_id, memory_mb=20_000, preemptible=True)
        box.pass_time(1.0)

    assert warned(box.ask("c", memory_mb=20_000)) == ["b"]
    assert warned(box.ask("alone")) == []


def test_a_waiter_that_leaves_gives_up_what_was_kept_for_it() -> None:
    box = box_of(2)
    box.ask("idle", preemptible=True)
    box.ask("wide", gpus=2)
    box.ask("late")

    box.release("wide")

    assert box.stage("late") == "active"


def test_while_the_processes_of_a_preempted_lease_stay_nobody_else_is_preempted() -> None:
    box = Box(reading(0), reading(1), stale_after_s=1e9)
    box.ask("old", preemptible=True, pid=1)
    box.pass_time(1.0)
    box.ask("young", preemptible=True, pid=2)
    busy = reading(1, processes=(process(2, 16_000),), used_mb=16_000)
    box.observe_now(reading(0), busy)
    box.ask("job")
    box.run_to(box.now + GRACE_S)

    events = box.observe_now(reading(0), busy)

    assert (box.stage("young"), warned(events)) == ("draining", [])
    box.observe_now(reading(0), reading(1))
    assert box.gpus_of("job") == (key(1),)


def test_a_restart_leaves_the_warning_as_it_was() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True)
    box.ask("job")
    box.now += 30.0

    box.restart()
    box.observe_now(reading(0))
    box.run_to(START + GRACE_S)

    assert (box.stage("idle"), box.stage("job")) == ("preempted", "active")


def test_a_lease_with_several_gpus_makes_room_alone() -> None:
    box = box_of(3)
    box.ask("wide", gpus=2, preemptible=True)
    box.pass_time(1.0)
    box.ask("young", preemptible=True)

    assert warned(box.ask("job", gpus=2)) == ["wide"]


def test_a_share_that_makes_no_room_is_spared() -> None:
    box = box_of(1)
    box.ask("large", memory_mb=40_000, preemptible=True)
    box.pass_time(1.0)
    box.ask("small", memory_mb=8_000, preemptible=True)

    assert warned(box.ask("job", memory_mb=50_000)) == ["large"]


def test_no_other_node_makes_room_while_a_lease_drains_elsewhere() -> None:
    box = Box(reading(0, node="a"), reading(0, node="b"), stale_after_s=1e9)
    box.ask("old", preemptible=True, among=("GPU-a-0",), pid=1)
    box.pass_time(1.0)
    box.ask("young", preemptible=True, among=("GPU-b-0",), pid=2)
    busy = reading(0, node="b", processes=(process(2, 16_000),), used_mb=16_000)
    box.observe_now(reading(0, node="a"), busy)
    assert warned(box.ask("job")) == ["young"]

    events = box.run_to(box.now + GRACE_S)
    events += box.set_quota("ada", Quota(gpus=1))  # the whole queue is looked at again

    assert (box.stage("young"), warned(events)) == ("draining", [])


# A warning is withdrawn


def withdrawn(events: list[ev.Event]) -> list[str]:
    return [event.lease_id for event in events if isinstance(event, ev.LeaseWarned) and event.reason is None]


def test_the_warning_is_withdrawn_when_the_waiter_leaves() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True)
    box.ask("job")

    assert withdrawn(box.release("job")) == ["idle"]
    box.run_to(START + 2 * GRACE_S)
    assert box.stage("idle") == "active"


def test_the_warning_is_withdrawn_when_the_waiter_is_served_elsewhere() -> None:
    box = box_of(2)
    box.ask("holder")
    box.ask("idle", preemptible=True)
    box.ask("job")

    assert withdrawn(box.release("holder")) == ["idle"]
    assert box.stage("job") == "active"


def test_the_warning_stays_while_another_waiter_needs_the_gpu() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True)
    box.ask("job")
    box.ask("other")

    assert warned(box.release("job")) == []
    box.run_to(START + GRACE_S)
    assert (box.stage("idle"), box.stage("other")) == ("preempted", "active")


def test_near_its_time_limit_a_spared_lease_is_warned_of_that() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True, time_limit_s=100.0)
    box.now += 45.0
    box.ask("job")
    box.now += 10.0

    events = of_kind(box.release("job"), ev.LeaseWarned)

    assert events == [ev.LeaseWarned(box.now, "idle", EndReason.TIME_LIMIT, START + 100.0)]


def test_a_restart_withdraws_no_warning_before_the_gpus_are_read() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True)
    box.ask("job")

    assert warned(box.restart()) == []
    assert warned(box.pass_time(1.0)) == []
    assert warned(box.observe_now(reading(0))) == []
    assert warned(box.release("job")) == ["idle"]


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


def test_a_reading_that_is_missing_withdraws_nothing() -> None:
    box = free_at_once(reading(0), stale_after_s=15.0)
    box.ask("idle", preemptible=True)
    box.ask("job")

    assert warned(box.pass_time(20.0)) == []
    assert box.stage("idle") == "active"


def test_a_lease_makes_room_as_soon_as_nothing_else_keeps_its_gpu() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True, pid=7)
    box.observe_now(reading(0, used_mb=70_000))
    assert warned(box.ask("job")) == []

    assert warned(box.observe_now(reading(0))) == ["idle"]
