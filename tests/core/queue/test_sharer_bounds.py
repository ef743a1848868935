"""Many small shares: how many may share a GPU, how many leases an owner may have, and what one more of them costs."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from gpu_worker_pool.core.decider.decide import MOST_DUE
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.slot import GpuSlot, Members, Occupant, Occupants, memory_use
from gpu_worker_pool.core.queue.eligibility import judge
from gpu_worker_pool.core.queue.verdicts import SharersFull
from tests.core.build import Box, key, process, reading, request


def test_a_gpu_is_shared_by_so_many_and_the_next_takes_another_gpu_or_waits() -> None:
    box = Box(reading(0), reading(1), max_sharers=2)
    for number in range(5):
        box.ask(f"share{number}", memory_mb=10)
    assert [len(slot.occupants) for slot in box.state.slots.values()] == [2, 2]
    assert box.stage("share4") == "queued"
    verdict = judge(box.state, box.state.slots[key(0)], request(memory_mb=10).wishes, box.now)
    assert verdict == SharersFull(2, 2)
    assert str(verdict) == "shared by 2 leases, which is the limit for a GPU"
    assert "2 shared by 2 leases, which is the limit for a GPU" in str(box.explain("share4"))


def test_who_waits_for_a_full_gpu_gets_the_place_that_is_released() -> None:
    box = Box(reading(0), max_sharers=2)
    for name in ("a", "b", "c"):
        box.ask(name, memory_mb=10)
    box.release("a")
    box.observe_now(reading(0))
    assert [box.stage(name) for name in ("b", "c")] == ["active", "active"]


def test_an_exclusive_request_is_not_kept_from_a_full_gpu_by_new_shares() -> None:
    box = Box(reading(0), max_sharers=2, reserve_after_s=0.0)
    box.ask("a", memory_mb=10, time_limit_s=3600.0)
    box.ask("b", memory_mb=10, time_limit_s=3600.0)
    box.ask("whole")
    box.ask("c", memory_mb=10)
    for name in ("a", "b"):
        box.release(name)
        box.observe_now(reading(0))
    assert [box.stage(name) for name in ("whole", "c")] == ["active", "queued"]


def test_an_owner_has_so_many_leases_and_keeps_no_other_owner_from_the_queue() -> None:
    box = Box(reading(0), max_leases_per_owner=2)
    box.ask("a", owner="alice")
    box.ask("b", owner="alice")
    assert isinstance(box.ask("c", owner="alice")[-1], ev.TooManyLeases)
    assert box.stage("c") == "unknown"
    box.ask("d", owner="bob")
    assert box.stage("d") == "queued"
    box.release("a")
    box.ask("c", owner="alice")
    assert box.stage("c") == "queued"
    assert box.state.owned == {"alice": 2, "bob": 1}


def test_the_same_request_again_is_no_further_lease() -> None:
    box = Box(reading(0), max_leases_per_owner=1)
    box.ask("a", owner="alice")
    assert not any(isinstance(event, ev.Refusal) for event in box.ask("a", owner="alice"))


def test_a_step_that_must_stop_early_goes_on_in_the_order_of_the_queue() -> None:
    box = Box(max_sharers=100)
    for number in range(10):
        box.ask(f"share{number}", memory_mb=10)
    whole = deepcopy(box.state)
    parts = step(box.state, cmd.Observe((reading(0),)), box.now, 3)
    while box.state.settled_until < box.now:
        events = step(box.state, cmd.Tick(), box.now, 3)
        assert sum(isinstance(event, ev.LeaseGranted) for event in events) <= 3
        parts += events
    assert parts == step(whole, cmd.Observe((reading(0),)), box.now)
    assert box.state == whole


def test_one_tick_ends_so_many_leases_and_the_next_ends_the_others() -> None:
    box = Box(reading(0), max_queued_per_owner=1000)
    for number in range(MOST_DUE + 5):
        box.ask(f"lease{number}", ttl_s=10.0)
    assert sum(isinstance(event, ev.LeaseEnded) for event in box.pass_time(20.0)) == MOST_DUE
    assert sum(isinstance(event, ev.LeaseEnded) for event in box.pass_time(0.0)) == 5


class CountedMembers(Members):
    """Counts how often the leases of a process are looked up."""

    looked_up = 0

    def owners(self, process: ProcessId) -> list[str]:
        self.looked_up += 1
        return super().owners(process)


@pytest.mark.parametrize("sharers", [1, 50])
def test_one_more_share_costs_the_same_however_many_share_the_gpu(sharers: int) -> None:
    """Without sums that are kept, every grant would go through all processes on the GPU again."""
    box = Box(reading(0))
    for number in range(sharers):
        box.ask(f"share{number}", memory_mb=10, pid=number + 1)
    box.observe_now(reading(0, used_mb=sharers, processes=tuple(process(n + 1, 1) for n in range(sharers))))
    slot = box.state.slots[key(0)]
    slot.members = members = CountedMembers(slot.members)
    members.changes = slot.memory_sums.changes[1] if slot.memory_sums else 0
    before = slot.memory_sums
    box.ask("one more", memory_mb=10, pid=1000)
    assert slot.memory_sums is before
    assert members.looked_up <= 2 * sharers  # whether only leases use it: twice, before and after the grant


@pytest.mark.parametrize("processes", [None, (), (process(1, 700), process(2, None), process(9, 300))])
def test_sums_that_grew_are_those_that_are_made_again(processes: Any) -> None:
    seen = reading(0, used_mb=4000.3, processes=processes)
    grown = GpuSlot(key(0), seen, members=Members({"a": (ProcessId(1, 1.0),), "b": (ProcessId(2, 1.0),)}))
    grown.occupants["a"] = Occupant(100.1, ProcessId(1, 1.0))
    grown.occupants["b"] = Occupant(200.2, ProcessId(2, 1.0))
    for number, lease_id in enumerate("cdef"):
        holder = None if lease_id == "c" else ProcessId(number + 10, 1.0)
        grown.occupants[lease_id] = Occupant(100.1 * (number + 3), holder)
        fresh = GpuSlot(key(0), seen, Occupants(grown.occupants), Members(grown.members))
        mine, again = memory_use(grown, set()), memory_use(fresh, set())
        assert mine == again
        assert mine is not None
        assert again is not None
        assert mine.committed_mb == again.committed_mb == sum(mine.by_lease.values()) + mine.outside_mb


def test_the_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="max_sharers is 0"):
        PoolSettings(max_sharers=0)
    with pytest.raises(ValueError, match="max_leases_per_owner is 0"):
        PoolSettings(max_leases_per_owner=0)
