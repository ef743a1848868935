"""Leases inside a lease: they use their parent's GPUs, wait for each other, and end with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import T4, Box, key, of_kind, process, reading, request


def inside(box: Box, lease_id: str, parent: str, **wants: Any) -> list[ev.Event]:
    wants.setdefault("worker", lease_id)
    return box.do(cmd.RequestLease(lease_id, replace(request(**wants), parent=parent)))


def refusal(events: list[ev.Event]) -> str:
    (event,) = of_kind(events, ev.LeaseRefused)
    assert isinstance(event, ev.LeaseRefused)
    return event.why


def test_a_sub_lease_uses_its_parents_gpu_and_not_another() -> None:
    box = Box(reading(0), reading(1))
    box.ask("outer")
    inside(box, "inner", "outer")
    assert box.gpus_of("inner") == box.gpus_of("outer")
    assert box.fence_of("inner") > box.fence_of("outer")
    assert list(box.state.slots[box.gpus_of("outer")[0]].occupants) == ["outer"]


def test_two_exclusive_sub_leases_of_one_gpu_wait_for_each_other() -> None:
    box = Box(reading(0), reading(1))
    box.ask("outer")
    inside(box, "first", "outer", owner=None)
    inside(box, "second", "outer")
    assert (box.stage("first"), box.stage("second")) == ("active", "queued")
    text = str(box.explain("second"))
    assert "Position 1 of 1 inside lease outer" in text
    assert "another job inside this lease uses its GPU (first)" in text
    assert len(box.state.queue) == 0
    box.release("first")
    assert (box.stage("first"), box.stage("second")) == ("released", "active")


def test_two_gpus_serve_two_sub_leases() -> None:
    box = Box(reading(0), reading(1))
    box.ask("outer", gpus=2)
    inside(box, "one", "outer")
    inside(box, "two", "outer")
    assert {*box.gpus_of("one"), *box.gpus_of("two")} == {key(0), key(1)}


def test_inside_a_lease_no_waiter_passes_another() -> None:
    box = Box(reading(0), reading(1))
    box.ask("outer", gpus=2)
    inside(box, "one", "outer")
    inside(box, "both", "outer", gpus=2)
    inside(box, "late", "outer")
    inside(box, "urgent", "outer", priority=5)
    assert [box.stage(id_) for id_ in ("both", "late", "urgent")] == ["queued", "queued", "active"]
    assert "is ahead" in str(box.explain("late")) or "another job" in str(box.explain("late"))
    box.release("urgent")
    assert box.stage("late") == "queued"
    box.release("one")
    assert [box.stage(id_) for id_ in ("both", "late")] == ["active", "queued"]


def test_sub_leases_with_memory_share_what_the_parent_may_use() -> None:
    box = Box(reading(0))
    box.ask("outer", memory_mb=10_000)
    inside(box, "a", "outer", memory_mb=6_000)
    inside(box, "b", "outer", memory_mb=4_000)
    inside(box, "c", "outer", memory_mb=1_000)
    assert [box.stage(id_) for id_ in "abc"] == ["active", "active", "queued"]
    assert "10000 MB" in refusal(inside(box, "d", "outer", memory_mb=10_001))
    # Without memory_mb it has the parent's share to itself.
    inside(box, "alone", "outer")
    for id_ in "abc":
        assert box.stage("alone") == "queued"
        box.release(id_)
    assert box.stage("alone") == "active"
    # The share of the outermost lease bounds those further in.
    assert "10000 MB" in refusal(inside(box, "e", "alone", memory_mb=20_000))


@pytest.mark.parametrize(
    ("wants", "words"),
    [
        ({"gpus": 2}, "not 2 GPUs on one node"),
        ({"model": "T4"}, "not 1 GPU of model T4"),
        ({"among": ("1",)}, "not 1 GPU among 1"),
        ({"memory_mb": 80_001}, "with 80000 MB"),
    ],
)
def test_what_the_parent_cannot_satisfy_is_refused_at_once(wants: dict[str, Any], words: str) -> None:
    box = Box(reading(0), reading(1, name=T4))
    box.ask("outer", among=("0",))
    why = refusal(inside(box, "inner", "outer", **wants))
    assert words in why
    assert "--new" in why
    assert box.stage("inner") == "unknown"


def test_a_parent_that_is_not_active_is_refused() -> None:
    box = Box(reading(0))
    box.ask("outer")
    box.ask("waiting")
    assert "still waits" in refusal(inside(box, "a", "waiting"))
    assert "not known here" in refusal(inside(box, "b", "never"))
    box.release("outer")
    assert "has ended (released)" in refusal(inside(box, "c", "outer"))
    assert "GPU_POOL_LEASE_ID" in refusal(inside(box, "d", "outer"))


def test_a_parent_of_another_owner_is_refused() -> None:
    box = Box(reading(0))
    box.ask("outer", owner="carol")
    assert "another owner" in refusal(inside(box, "inner", "outer", owner="bob"))


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (cmd.Release("outer"), "released"),
        (cmd.Revoke("outer"), "revoked"),
        (cmd.ReportDeath("outer"), "holder_died"),
    ],
)
def test_all_sub_leases_end_with_their_parent(end: cmd.Command, reason: str) -> None:
    box = Box(reading(0))
    box.ask("outer")
    inside(box, "inner", "outer")
    inside(box, "innermost", "inner")
    inside(box, "waiting", "inner")
    ended = of_kind(box.do(end), ev.LeaseEnded)
    assert [event.lease_id for event in ended] == ["waiting", "innermost", "inner", "outer"]  # type: ignore[attr-defined]
    assert {box.stage(id_) for id_ in ("inner", "innermost", "waiting")} == {reason}
    assert box.stage("outer") == "draining"


def test_sub_leases_expire_with_their_parent_once() -> None:
    box = Box(reading(0))
    box.ask("outer", ttl_s=10.0)
    inside(box, "inner", "outer", ttl_s=5.0)
    inside(box, "waiting", "outer", ttl_s=1000.0)
    box.pass_time(20.0)
    assert [box.stage(id_) for id_ in ("inner", "waiting")] == ["expired", "expired"]


def test_a_sub_lease_ends_alone_and_without_draining() -> None:
    box = Box(reading(0))
    box.ask("outer", pid=10)
    inside(box, "inner", "outer", pid=20)
    # The inner holder descends from the outer one, so its memory is the outer lease's.
    box.observe_now(reading(0, used_mb=5_000, processes=(process(20, 5_000, parents=(10,)),)))
    assert set(box.state.slots[key(0)].members) == {"outer"}
    box.do(cmd.ReportDeath("inner"))
    assert (box.stage("inner"), box.stage("outer")) == ("holder_died", "active")
    box.release("outer")
    box.now += 1
    box.observe_now(reading(0, used_mb=5_000, processes=(process(20, 5_000),)))
    assert box.stage("outer") == "draining"


def test_a_reboot_ends_what_is_inside_a_local_lease() -> None:
    box = Box(reading(0))
    box.ask("outer", pid=10)
    inside(box, "inner", "outer")
    box.reboot()
    assert (box.stage("outer"), box.stage("inner")) == ("holder_died", "holder_died")


def test_sub_leases_survive_a_restart_and_are_served_when_the_gpu_was_read() -> None:
    box = Box(reading(0))
    box.ask("outer")
    inside(box, "inner", "outer")
    inside(box, "next", "outer")
    box.restart()
    assert (box.stage("inner"), box.stage("next")) == ("active", "queued")
    box.release("inner")
    assert box.stage("next") == "queued"  # the index of the GPU is not known yet
    box.observe_now(reading(0))
    assert box.stage("next") == "active"


def test_a_condensed_history_has_the_sub_leases() -> None:
    box = Box(reading(0))
    box.ask("outer")
    inside(box, "inner", "outer")
    inside(box, "next", "outer")
    short = replay(PoolState(settings=box.settings), condense(box.state))
    assert short.leases == box.state.leases
    assert short.inside == box.state.inside


def test_asking_again_changes_nothing_and_another_parent_is_a_conflict() -> None:
    box = Box(reading(0), reading(1))
    box.ask("outer")
    box.ask("other")
    inside(box, "inner", "outer")
    assert of_kind(inside(box, "inner", "outer"), ev.DurableEvent) == []
    assert of_kind(inside(box, "inner", "other"), ev.LeaseConflicted)


def test_leases_inside_each_other_are_bounded() -> None:
    box = Box(reading(0))
    box.ask("l0")
    for depth in range(1, 16):
        inside(box, f"l{depth}", f"l{depth - 1}")
        assert box.stage(f"l{depth}") == "active"
    assert "limit" in refusal(inside(box, "l16", "l15"))


def test_waiters_inside_one_lease_are_bounded() -> None:
    box = Box(reading(0), max_queued_per_owner=2)
    box.ask("outer")
    for number in range(3):
        inside(box, f"inner{number}", "outer")
    assert of_kind(inside(box, "inner3", "outer"), ev.QueueFull)


def test_a_sub_lease_leaves_the_pool_settled() -> None:
    """Others wait as before: a lease inside another frees and takes nothing of theirs."""
    box = Box(reading(0))
    box.ask("outer")
    box.ask("stranger")
    before = box.state.settled_until
    inside(box, "inner", "outer")
    box.release("inner")
    assert box.stage("stranger") == "queued"
    assert box.state.settled_until == before


def test_a_preemptible_request_inside_a_lease_keeps_its_place() -> None:
    box = Box(reading(0))
    box.do(cmd.RequestLease("outer", request(owner="ada")))
    for number, preemptible in enumerate((False, True, False)):
        inner = replace(request(owner="ada", preemptible=preemptible), parent="outer")
        box.do(cmd.RequestLease(f"inner{number}", inner))

    box.release("inner0")

    assert [box.stage(f"inner{number}") for number in (1, 2)] == ["active", "queued"]
