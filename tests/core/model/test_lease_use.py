"""What a lease is seen to use: kept with its end, and through restarts."""

from __future__ import annotations

from typing import Any

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.decider.decide import MEASURED_EVERY_S
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import Box, process, reading


def look(box: Box, *readings: Reading, after_s: float = 1.0) -> list[ev.Event]:
    box.pass_time(after_s)
    return box.observe_now(*readings)


def ended(box: Box, lease_id: str = "a") -> EndedLease:
    box.release(lease_id)
    found = box.state.find(lease_id)
    assert isinstance(found, EndedLease)
    return found


def used(index: int, mb: float | None, percent: float | None, **more: Any) -> Reading:
    return reading(index, used_mb=mb, utilization=percent, **more)


def test_an_exclusive_lease_has_the_most_memory_of_all_its_gpus_and_their_mean_utilization() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a", gpus=2, ttl_s=3600.0)
    look(box, used(0, 1000, 10), used(1, 500, 30))
    look(box, used(0, 2000, 100), used(1, 100, 100))
    look(box, used(0, 900, 50), used(1, 900, 10))

    lease = ended(box)

    assert (lease.peak_memory_mb, lease.mean_utilization_percent) == (2100, 50.0)
    (event,) = (event for event in box.log if isinstance(event, ev.LeaseEnded))
    assert (event.peak_memory_mb, event.mean_utilization_percent) == (2100, 50.0)


def test_what_was_not_read_is_unknown_and_not_zero() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")
    assert (ended(box).peak_memory_mb, ended(box).mean_utilization_percent) == (None, None)

    box = Box(reading(0), reading(1))
    box.ask("a", gpus=2)
    look(box, used(0, 1000, None), used(1, None, 40))
    lease = ended(box)
    assert (lease.peak_memory_mb, lease.mean_utilization_percent) == (None, 40.0)


def test_a_reading_that_began_before_the_grant_is_not_the_leases() -> None:
    box = Box(reading(0))
    box.pass_time(5.0)
    began = box.now - 1.0
    box.ask("a")
    box.observe(reading(0, at=began, used_mb=300, utilization=3))
    assert ended(box).peak_memory_mb is None


def test_a_sharing_lease_has_the_memory_of_its_own_processes_and_no_utilization() -> None:
    box = Box(reading(0))
    box.ask("a", memory_mb=20_000, pid=11)
    box.ask("b", memory_mb=20_000, pid=12)
    box.ask("remote", memory_mb=1_000)
    both = (process(111, 5_000, parents=(11,)), process(12, 7_000))
    look(box, used(0, 13_000, 80, processes=both))
    look(box, used(0, 1_000, 80, processes=()))

    assert [ended(box, name).peak_memory_mb for name in ("a", "b", "remote")] == [5_000, 7_000, None]
    assert ended(box).mean_utilization_percent is None


def test_memory_that_a_process_does_not_tell_is_unknown() -> None:
    box = Box(reading(0))
    box.ask("a", memory_mb=20_000, pid=11)
    look(box, used(0, 13_000, 80, processes=(process(11, None),)))
    assert ended(box).peak_memory_mb is None


def test_it_is_written_now_and_then_so_that_a_restart_goes_on_with_it() -> None:
    box = Box(reading(0))
    box.ask("a", ttl_s=3600.0)
    written = [event for _ in range(3) for event in look(box, used(0, 3000, 80))]
    assert not [event for event in written if isinstance(event, ev.LeasesMeasured)]
    (measured,) = (
        event for event in look(box, used(0, 100, 0), after_s=MEASURED_EVERY_S) if isinstance(event, ev.LeasesMeasured)
    )
    assert [(use.peak_memory_mb, use.mean_utilization_percent) for use in measured.uses] == [(3000, 80.0)]

    for history in ([event for event in box.log if isinstance(event, ev.DurableEvent)], condense(box.state)):
        other = Box()
        other.state = replay(PoolState(settings=box.settings), history)
        other.now = box.now
        other.do(other.take_over())
        look(other, used(0, 4000, 80))
        assert ended(other).peak_memory_mb == 4000
        assert (ended(other).mean_utilization_percent or 0.0) >= 64.0


def test_a_draining_lease_keeps_what_it_used_through_a_compaction() -> None:
    box = Box(reading(0))
    box.ask("a", pid=11)
    look(box, used(0, 3000, 80, processes=(process(11, 3000),)))
    assert ended(box).draining
    again = replay(PoolState(settings=box.settings), condense(box.state)).find("a")
    assert isinstance(again, EndedLease)
    assert (again.peak_memory_mb, again.mean_utilization_percent) == (3000, 80.0)
