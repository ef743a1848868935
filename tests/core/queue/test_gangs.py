"""Gangs: so many GPUs on each of several nodes, all or nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Booking, Quota
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes
from tests.core.build import START, WALL_OFFSET_S, Box, free_at_once, key, reading, refusals, request


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


@pytest.mark.parametrize(("drained", "nodes"), [("a", "bd"), ("b", "ad"), ("d", "ab")])
def test_the_node_of_the_holder_is_one_of_a_gang_if_it_has_room(drained: str, nodes: str) -> None:
    box = fleet(a=2, b=2, c=2, d=2)
    box.exclude(key(0, drained), "repair")
    box.ask("before", nodes=3, gpus=2)
    asked = request(pid=7, gpus=2, nodes=2)
    box.do(cmd.RequestLease("gang", replace(asked, holder=replace(asked.holder, node="d"))))
    box.do(cmd.Release("before"))

    assert box.gpus_of("gang") == keys(**dict.fromkeys(nodes, (0, 1)))


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


# Fences


# Reservations


def test_a_waiting_gang_is_told_how_many_nodes_it_lacks() -> None:
    box = fleet(a=2, b=2)
    box.ask("holder", among=("GPU-b-0",))

    box.ask("gang", gpus=2, nodes=2)

    assert str(box.explain("gang")) == (
        "Position 1 of 1, waiting for 2 GPUs on each of 2 nodes: 3 available; 1 leased by holder; "
        "it needs 2 nodes with 2 GPUs each at the same time; 1 node has that many"
    )


# Ends


# Preemption


# Bookings


def test_a_booking_is_of_one_node() -> None:
    box = fleet(a=1, b=1)
    booking = Booking("b1", (), START + WALL_OFFSET_S, START + WALL_OFFSET_S + 60.0, "ada", "a course")

    (event,) = refusals(box.do(cmd.BookGpus(booking, Wishes(nodes=2))), ev.RefusalCode.BOOKING)

    assert (
        event.why
        == "1 GPU on each of 2 nodes was asked for; a booking is for GPUs of one node; book each node by itself"
    )
