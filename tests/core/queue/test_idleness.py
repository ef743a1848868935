"""Leases whose GPUs compute nothing."""

from __future__ import annotations

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason
from gpu_worker_pool.core.queue.idleness import idle_s
from tests.core.build import START, Box, of_kind, process, reading

IDLE_S = 1800.0


def box_with(**settings: object) -> Box:
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
    box = box_with()
    box.now += 10 * IDLE_S

    box.restart()
    assert idle(box) is None
    look(box, 10 * IDLE_S, 0, 0)

    assert idle(box) is None


def test_where_idle_gpus_are_taken_back_the_lease_ends_after_a_warning() -> None:
    box = box_with(idle_reclaim=True)

    (warned,) = of_kind(look(box, IDLE_S, 0, 0), ev.LeaseWarned)
    assert warned == ev.LeaseWarned(box.now, "a", EndReason.IDLE, box.now + 60.0)
    box.run_to(box.now + 60.0)

    assert box.stage("a") == "draining"
