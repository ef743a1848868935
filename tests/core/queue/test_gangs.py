"""Gangs: so many GPUs on each of several nodes, all or nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Booking, Quota
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.start_times import expected_starts
from tests.core.build import START, T4, WALL_OFFSET_S, Box, key, of_kind, process, reading, refusals, request
from tests.core.queue.boxes import free_at_once


def fleet(**nodes: int) -> Box:
    """Nodes with so many GPUs each; a released GPU is free at once, and the first waiter reserves at once."""
    readings = [reading(index, node=node) for node, gpus in nodes.items() for index in range(gpus)]
    return free_at_once(*readings, stale_after_s=1e9, reserve_after_s=0.0)


def keys(**indices: tuple[int, ...]) -> tuple[GpuKey, ...]:
    return tuple(key(index, node) for node, own in indices.items() for index in own)


def refusal(events: list[ev.Event]) -> str:
    (event,) = refusals(events, ev.RefusalCode.UNSERVABLE)
    return event.why


@pytest.mark.parametrize("nodes", [0, 1025, 1.0, True, "2", None])
def test_nodes_is_a_whole_number(nodes: object) -> None:
    with pytest.raises(ValueError, match=r"nodes is .*; it must be a whole number from 1 to 1024"):
        Wishes(nodes=nodes)  # type: ignore[arg-type]


def test_a_gang_has_no_more_gpus_than_a_request_may_have() -> None:
    assert Wishes(gpus=8, nodes=128).total_gpus == 1024

    with pytest.raises(ValueError, match="129 nodes with 8 GPUs each are 1032 GPUs; a request may have at most 1024"):
        Wishes(gpus=8, nodes=129)


@pytest.mark.parametrize(
    ("wishes", "text"),
    [
        (Wishes(gpus=8, nodes=2), "8 GPUs on each of 2 nodes"),
        (Wishes(nodes=3, model="T4"), "1 GPU of model T4 on each of 3 nodes"),
        (Wishes(gpus=2, nodes=2, memory_mb=8192), "2 GPUs with 8 GB each on each of 2 nodes"),
    ],
)
def test_what_a_gang_wants_can_be_said(wishes: Wishes, text: str) -> None:
    assert str(wishes) == text


# Placement


def test_a_gang_gets_its_gpus_on_different_nodes() -> None:
    box = fleet(a=2, b=2, c=2)

    box.ask("gang", gpus=2, nodes=2)

    assert box.gpus_of("gang") == keys(a=(0, 1), b=(0, 1))


@pytest.mark.parametrize(("drained", "nodes"), [("a", "bd"), ("b", "ad"), ("d", "ab")])
def test_the_node_of_the_holder_is_one_of_a_gang_if_it_has_room(drained: str, nodes: str) -> None:
    box = fleet(a=2, b=2, c=2, d=2)
    box.exclude(key(0, drained), "repair")
    box.ask("before", nodes=3, gpus=2)
    asked = request(pid=7, gpus=2, nodes=2)
    box.do(cmd.RequestLease("gang", replace(asked, holder=replace(asked.holder, node="d"))))
    box.do(cmd.Release("before"))

    assert box.gpus_of("gang") == keys(**dict.fromkeys(nodes, (0, 1)))


def test_a_gang_gets_all_or_nothing() -> None:
    box = fleet(a=2, b=2)
    box.ask("one", among=("GPU-b-0",))

    box.ask("gang", gpus=2, nodes=2)

    assert box.stage("gang") == "queued"
    box.release("one")
    assert box.gpus_of("gang") == keys(a=(0, 1), b=(0, 1))


def test_a_gang_takes_the_nodes_with_the_fewest_open_gpus() -> None:
    box = fleet(a=4, b=3, c=2, d=1)

    box.ask("gang", gpus=2, nodes=2)

    assert box.gpus_of("gang") == keys(b=(0, 1), c=(0, 1))


def test_a_gang_of_single_gpus_takes_the_least_used_of_each_node() -> None:
    loads = {("a", 0): 20, ("a", 1): 5, ("b", 0): 0, ("b", 1): 1}
    box = Box(*(reading(index, node=node, utilization=load) for (node, index), load in loads.items()))

    box.ask("gang", nodes=2)

    assert box.gpus_of("gang") == keys(a=(1,), b=(0,))


def test_shares_of_a_gang_join_other_shares() -> None:
    box = fleet(a=2, b=2)
    box.ask("share", memory_mb=8_000, among=("GPU-b-1",))

    box.ask("gang", nodes=2, memory_mb=8_000)

    assert box.gpus_of("gang") == keys(a=(0,), b=(1,))


def test_a_gang_keeps_to_the_gpus_asked_for() -> None:
    box = Box(*(reading(index, node=node, name=T4) for node in "ab" for index in (0, 1)), reading(0, node="c"))

    box.ask("gang", nodes=2, model="T4", among=("1", "GPU-c-0"))

    assert box.gpus_of("gang") == keys(a=(1,), b=(1,))


# Refusals


def test_a_gang_for_which_there_are_too_few_nodes_is_refused() -> None:
    box = fleet(a=8, b=4)

    why = refusal(box.ask("gang", gpus=8, nodes=2))

    assert why == "8 GPUs on each of 2 nodes were asked for; only 1 node has as many"
    assert "only 2 nodes have as many such GPUs" in refusal(box.ask("many", gpus=2, nodes=3, model="A100"))
    assert "no node has more than 8 GPUs" in refusal(box.ask("wide", gpus=9, nodes=2))
    assert "only 1 node has as many such GPUs" in refusal(box.ask("few", nodes=2, among=("7",)))


def test_a_gang_with_more_gpus_than_the_quota_is_refused() -> None:
    box = fleet(a=2, b=2)
    box.set_quota("ada", Quota(gpus=3))

    why = refusal(box.ask("gang", gpus=2, nodes=2, owner="ada"))

    assert why == "4 GPUs were asked for; the quota of ada allows at most 3"


def test_all_gpus_of_a_gang_count_against_the_quota() -> None:
    box = fleet(a=2, b=2, c=2)
    box.set_quota("ada", Quota(gpus=4))

    box.ask("one", owner="ada")
    box.ask("gang", gpus=2, nodes=2, owner="ada")

    assert (box.stage("one"), box.stage("gang")) == ("active", "queued")
    assert "its owner has 1 of at most 4 GPUs" in str(box.explain("gang"))


def test_all_gpus_of_a_gang_weigh() -> None:
    box = fleet(a=2, b=2)

    box.ask("gang", gpus=2, nodes=2, owner="ada")

    assert box.state.usage["ada"].held == 4000


# Fences


def test_the_fence_of_a_gang_is_above_that_of_each_of_its_nodes() -> None:
    box = fleet(a=1, b=1, c=1)
    for _ in range(3):
        box.ask("first", among=("GPU-b-0",))
        box.release("first")
        box.state.ended.clear()

    box.ask("gang", nodes=2, among=("GPU-a-0", "GPU-b-0"))

    assert box.fence_of("gang") == 4
    assert box.state.fences == {"a": 4, "b": 4}
    box.release("gang")
    box.ask("next", among=("GPU-a-0",))
    box.ask("other", among=("GPU-c-0",))
    assert (box.fence_of("next"), box.fence_of("other")) == (5, 1)


def test_fences_and_the_order_on_a_gpu_outlive_a_compaction() -> None:
    box = fleet(a=1, b=1)
    box.ask("early", memory_mb=8_000, among=("GPU-b-0",))
    box.ask("gang", memory_mb=8_000, nodes=2)
    box.ask("late", memory_mb=8_000, among=("GPU-b-0",))

    condensed = replay(PoolState(settings=box.settings), condense(box.state))

    assert condensed.fences == box.state.fences == {"a": 2, "b": 3}
    assert [*condensed.slots[key(0, "b")].occupants] == ["early", "gang", "late"]
    assert condensed.leases == box.state.leases


# Reservations


def test_a_gang_reserves_the_nodes_where_it_can_run_soonest() -> None:
    box = fleet(a=1, b=1, c=1)
    for node, limit_s in (("a", 300.0), ("b", 100.0), ("c", 200.0)):
        box.ask(f"on {node}", among=(f"GPU-{node}-0",), time_limit_s=limit_s)

    box.ask("gang", nodes=2)

    reservation = box.state.reservation
    assert reservation is not None
    assert (reservation.gpus, reservation.date, reservation.after) == (keys(b=(0,), c=(0,)), START + 200.0, "on c")
    assert expected_starts(box.state, box.now)["gang"].at == START + 200.0


def test_the_reservation_of_a_gang_keeps_to_its_nodes() -> None:
    box = fleet(a=1, b=1, c=1)
    for node, limit_s in (("a", 300.0), ("b", 100.0), ("c", 200.0)):
        box.ask(f"on {node}", among=(f"GPU-{node}-0",), time_limit_s=limit_s)
    box.ask("gang", nodes=2)

    box.release("on a")  # sooner than c, and yet

    assert box.stage("gang") == "queued"
    box.ask("late")
    assert box.gpus_of("late") == keys(a=(0,))
    box.run_to(START + 200.0)
    assert (box.now, box.gpus_of("gang")) == (START + 200.0, keys(b=(0,), c=(0,)))


def test_a_gang_reserves_other_nodes_when_one_of_its_own_is_out_of_service() -> None:
    box = fleet(a=1, b=1, c=1)
    for node, limit_s in (("a", 300.0), ("b", 100.0), ("c", 200.0)):
        box.ask(f"on {node}", among=(f"GPU-{node}-0",), time_limit_s=limit_s)
    box.ask("gang", nodes=2)

    box.exclude(key(0, "b"), "repair")

    reservation = box.state.reservation
    assert reservation is not None
    assert (reservation.gpus, reservation.date) == (keys(a=(0,), c=(0,)), START + 300.0)


def test_what_ends_before_the_date_of_a_gang_is_served_meanwhile() -> None:
    box = fleet(a=1, b=1)
    box.ask("holder", among=("GPU-a-0",), time_limit_s=100.0)
    box.ask("gang", nodes=2)

    box.ask("long")
    box.ask("short", time_limit_s=90.0)

    assert (box.stage("long"), box.gpus_of("short")) == ("queued", keys(b=(0,)))
    assert "1 kept for gang, ahead in the queue" in str(box.explain("long")) or box.stage("short") == "active"
    box.run_to(START + 100.0)
    assert box.stage("gang") == "active"


def test_a_waiting_gang_is_told_how_many_nodes_it_lacks() -> None:
    box = fleet(a=2, b=2)
    box.ask("holder", among=("GPU-b-0",))

    box.ask("gang", gpus=2, nodes=2)

    assert str(box.explain("gang")) == (
        "Position 1 of 1, waiting for 2 GPUs on each of 2 nodes: 3 available; 1 leased by holder; "
        "it needs 2 nodes with 2 GPUs each at once; 1 node has as many"
    )


def test_one_that_failed_says_nothing_of_a_gang_and_a_gang_nothing_of_one() -> None:
    box = fleet(a=1, b=1)
    box.ask("holder")
    box.ask("gang", nodes=2)
    box.ask("single", time_limit_s=1.0)

    box.pass_time(0.1)

    assert box.stage("gang") == "queued"
    assert box.stage("single") in {"active", "queued"}


# Ends


def test_a_gang_drains_on_each_node_by_itself() -> None:
    box = Box(reading(0, node="a"), reading(0, node="b"), stale_after_s=1e9)
    box.ask("gang", nodes=2)
    box.now += 1.0
    box.release("gang")

    box.observe_now(reading(0, node="a"))

    assert box.stage("gang") == "draining"
    assert (box.verdict(0, "a").code, box.verdict(0, "b").code) == ("eligible", "draining")
    box.observe_now(reading(0, node="b"))
    assert box.stage("gang") == "released"


def test_a_gang_ends_on_all_its_nodes_at_its_time_limit() -> None:
    box = fleet(a=1, b=1)
    box.ask("gang", nodes=2, time_limit_s=100.0)
    box.ask("next", nodes=2)

    box.run_to(START + 100.0)

    assert (box.stage("gang"), box.gpus_of("next")) == ("time_limit", keys(a=(0,), b=(0,)))


def test_a_gang_expires_as_a_whole() -> None:
    box = fleet(a=1, b=1)
    box.ask("gang", nodes=2, ttl_s=60.0)

    box.pass_time(60.0)

    assert (box.stage("gang"), box.verdict(0, "a").code, box.verdict(0, "b").code) == (
        "expired",
        "eligible",
        "eligible",
    )


def test_a_gang_is_idle_only_if_it_is_known_to_be_idle_on_all_its_nodes() -> None:
    box = Box(reading(0, node="a"), reading(0, node="b"), idle_after_s=60.0, idle_reclaim=True, stale_after_s=30.0)
    box.ask("gang", nodes=2)
    for _ in range(7):
        box.pass_time(10.0)
        assert not of_kind(box.observe_now(reading(0, node="a")), ev.LeaseWarned)  # b has not been read for long
    assert not of_kind(box.observe_now(reading(0, node="b", utilization=50.0)), ev.LeaseWarned)

    events: list[ev.Event] = []
    for _ in range(6):
        box.pass_time(10.0)
        events = box.observe_now(reading(0, node="a")) + box.observe_now(reading(0, node="b"))

    assert of_kind(events, ev.LeaseWarned) == [ev.LeaseWarned(box.now, "gang", EndReason.IDLE, box.now + 60.0)]
    assert of_kind(box.observe_now(reading(0, node="b", utilization=50.0)), ev.LeaseWarned)


def test_a_gang_takes_nothing_back_that_its_process_left() -> None:
    box = Box(reading(0, node="a"), reading(0, node="b"), stale_after_s=1e9)
    box.ask("one", pid=7, among=("GPU-a-0",))
    left = reading(0, node="a", processes=(process(7, 16_000),), used_mb=16_000)
    box.observe_now(left)
    box.release("one")

    box.ask("gang", pid=7, nodes=2)

    assert (box.stage("one"), box.stage("gang")) == ("draining", "queued")


# Preemption


def warned(events: list[ev.Event]) -> list[str]:
    return [event.lease_id for event in events if isinstance(event, ev.LeaseWarned)]


def test_the_youngest_leases_make_room_for_a_gang_on_the_cheapest_nodes() -> None:
    box = fleet(a=1, b=1, c=1)
    for node in "abc":
        box.ask(f"on {node}", among=(f"GPU-{node}-0",), preemptible=True)
        box.pass_time(1.0)

    assert warned(box.ask("gang", nodes=2)) == ["on c", "on b"]
    box.release("on c")
    box.release("on b")
    assert box.gpus_of("gang") == keys(b=(0,), c=(0,))


def test_a_lease_that_makes_room_on_two_nodes_counts_once() -> None:
    box = fleet(a=1, b=1, c=1, d=1)
    for node in "cd":
        box.ask(f"on {node}", among=(f"GPU-{node}-0",), preemptible=True)
        box.pass_time(1.0)
    box.ask("both", nodes=2, among=("GPU-a-0", "GPU-b-0"), preemptible=True)

    assert warned(box.ask("gang", nodes=2)) == ["both"]


def test_free_nodes_are_used_before_a_lease_makes_room_for_a_gang() -> None:
    box = fleet(a=2, b=2, c=2)
    box.ask("x", among=("GPU-b-0",), preemptible=True)
    box.pass_time(1.0)
    box.ask("y", gpus=2, among=("GPU-c-0", "GPU-c-1"))

    assert warned(box.ask("gang", gpus=2, nodes=2)) == ["x"]
    box.ask("late")
    assert (box.stage("late"), set(box.state.claims)) == ("queued", set(keys(a=(0, 1), b=(0, 1))))


# Bookings


def test_a_booking_is_of_one_node() -> None:
    box = fleet(a=1, b=1)
    booking = Booking("b1", (), START + WALL_OFFSET_S, START + WALL_OFFSET_S + 60.0, "ada", "a course")

    (event,) = refusals(box.do(cmd.BookGpus(booking, Wishes(nodes=2))), ev.RefusalCode.BOOKING)

    assert (
        event.why == "1 GPU on each of 2 nodes was asked for; a booking has GPUs of one node. Book each node by itself"
    )
