"""Preemptible leases: they take what is idle, and make room for requests that are not preemptible."""

from __future__ import annotations

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndReason
from tests.core.build import START, Box, of_kind, reading
from tests.core.queue.boxes import free_at_once

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
