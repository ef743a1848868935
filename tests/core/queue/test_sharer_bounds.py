"""Many small shares: how many may share a GPU, and how many leases an owner may have."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain, repeat

from gpu_worker_pool.core.decider.decide import MOST_DUE
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.queue.verdicts import verdict
from tests.core.build import Box, reading, refusals


def test_a_gpu_is_shared_by_so_many_and_the_next_takes_another_gpu_or_waits() -> None:
    box = Box(reading(0), reading(1), max_sharers=2)
    for number in range(5):
        box.ask(f"share{number}", memory_mb=10)
    assert [len(slot.occupants) for slot in box.state.slots.values()] == [2, 2]
    assert box.stage("share4") == "queued"
    found = box.verdict(0, memory_mb=10)
    assert found == verdict("sharers_full", sharers=2, limit=2)
    assert str(found) == "shared by 2 leases, which is the limit for a GPU"
    assert "2 shared by 2 leases, which is the limit for a GPU" in str(box.explain("share4"))


def test_an_owner_has_so_many_leases_and_keeps_no_other_owner_from_the_queue() -> None:
    box = Box(reading(0), max_leases_per_owner=2)
    box.ask("a", owner="alice")
    box.ask("b", owner="alice")
    assert refusals(box.ask("c", owner="alice"), ev.RefusalCode.TOO_MANY_LEASES)
    assert box.stage("c") == "unknown"
    box.ask("d", owner="bob")
    assert box.stage("d") == "queued"
    box.release("a")
    box.ask("c", owner="alice")
    assert box.stage("c") == "queued"
    assert box.state.live_count == {"alice": 2, "bob": 1}


def test_a_step_that_must_stop_early_goes_on_in_the_order_of_the_queue() -> None:
    box = Box(max_sharers=100)
    for number in range(10):
        box.ask(f"share{number}", memory_mb=10)
    whole = deepcopy(box.state)
    parts = step(box.state, cmd.Observe((reading(0),)), box.now, chain(repeat(True, 3), repeat(False)).__next__)
    while box.state.settled_until < box.now:
        events = step(box.state, cmd.Tick(), box.now, chain(repeat(True, 3), repeat(False)).__next__)
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
