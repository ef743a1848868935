"""Preemptible leases: they take what is idle, and make room for requests that are not preemptible."""

from __future__ import annotations

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndReason
from tests.core.build import START, Box, key, of_kind, reading
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


def test_the_youngest_ends_first_and_no_more_than_needed() -> None:
    box = box_of(3)
    for lease_id in ("old", "middle", "young"):
        box.ask(lease_id, preemptible=True)
        box.pass_time(1.0)

    assert warned(box.ask("job")) == ["young"]
    assert warned(box.ask("other")) == ["middle"]
    assert warned(box.pass_time(1.0)) == []


def test_what_is_free_is_kept_for_the_waiter_that_gets_the_rest() -> None:
    box = box_of(2)
    box.ask("idle", preemptible=True)
    box.ask("wide", gpus=2)

    box.ask("late")

    assert (box.stage("late"), set(box.state.claims.values())) == ("queued", {"wide"})
    box.run_to(START + GRACE_S)
    assert box.gpus_of("wide") == (key(0), key(1))


def test_a_restart_leaves_the_warning_as_it_was() -> None:
    box = box_of(1)
    box.ask("idle", preemptible=True)
    box.ask("job")
    box.now += 30.0

    box.restart()
    box.observe_now(reading(0))
    box.run_to(START + GRACE_S)

    assert (box.stage("idle"), box.stage("job")) == ("preempted", "active")


# A warning is withdrawn


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
