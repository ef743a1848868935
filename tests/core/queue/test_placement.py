"""Which of the eligible GPUs is taken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.model.gpu import Reading
from tests.core.build import A100, T4, Box, key, process, reading

Gpus = list[Reading]


def node(on: str, gpus: int, **facts: Any) -> Gpus:
    return [reading(index, node=on, **facts) for index in range(gpus)]


def islands(*positions: int | None, busy: tuple[int, ...] = ()) -> Gpus:
    """GPUs with fast links: the position of each, by index."""
    return [reading(i, position=each, utilization=95 if i in busy else 0) for i, each in enumerate(positions)]


def granted(box: Box, lease_id: str) -> str:
    """The GPUs of a lease, by index; behind the name of their node, where that is not the only one."""
    gpus = box.gpus_of(lease_id)
    nodes = sorted({gpu.node for gpu in gpus} - {"box"})
    return "".join(nodes) + "".join(gpu.uuid.rpartition("-")[2] for gpu in gpus)


ONE: dict[str, Any] = {"gpus": 1}
SHARE: dict[str, Any] = {"memory_mb": 4_000}
SMALL_T4: dict[str, Any] = {"name": T4, "total_mb": 16_000}
X_AND_Y = [*node("x", 4), *node("y", 4)]
# The GPUs, the requests in the order in which they come, and what each is granted.
CASES: dict[str, tuple[Gpus, list[dict[str, Any]], list[str]]] = {
    # one GPU
    "the one with the least memory and utilization together": (
        [reading(0, utilization=50), reading(1, used_mb=16_000, utilization=10), reading(2, used_mb=40_000)],
        [ONE],
        ["1"],
    ),
    "of equals on the node with the fewest open": ([*node("large", 3), *node("small", 2)], [ONE], ["small0"]),
    "of equals on one node the first by index": ([reading(9), reading(8), reading(2)], [ONE], ["2"]),
    "of equals on nodes alike the first by name": ([*node("y", 1), *node("x", 1)], [ONE], ["x0"]),
    "only the model that is asked for": (
        [reading(0, name=A100), reading(1, name="NVIDIA A10", utilization=50)],
        [{"model": "A10"}],
        ["1"],
    ),
    "below the pool's thresholds before others that would do": (
        [reading(0, utilization=95), reading(1, utilization=80)],
        [{"utilization_threshold_percent": 99}],
        ["1"],
    ),
    "as many different GPUs as there are": (node("box", 3), [ONE] * 5, ["0", "1", "2", "", ""]),
    # one share
    "a share goes where it fits tightest": (
        [reading(0), reading(1), reading(2, total_mb=40_000)],
        [{"memory_mb": 40_000}, {"memory_mb": 10_000}],  # the second leaves 14,000 beside the first, 22,000 on GPU 2
        ["0", "0"],
    ),
    "a share that does not fit beside others takes a whole GPU": (
        node("box", 2),
        [{"memory_mb": 40_000}, {"memory_mb": 30_000}],
        ["0", "1"],
    ),
    "a share breaks no whole GPU while it fits beside others, however loosely": (
        [reading(0, **SMALL_T4), reading(1)],
        [{"memory_mb": 20_000}, SHARE],  # the second leaves 40,000 beside the first, 8,800 on the T4
        ["1", "1"],
    ),
    "a share breaks a whole GPU on the node with the fewest open": (
        [*node("large", 3), *node("small", 2)],
        [{"memory_mb": 40_000}],
        ["small0"],
    ),
    "shares fill a node before they break into the next": (
        X_AND_Y,
        [{"memory_mb": 40_000}] * 5,
        ["x0", "x1", "x2", "x3", "y0"],
    ),
    "a small share goes on a small GPU": ([reading(0), reading(1, **SMALL_T4)], [SHARE], ["1"]),
    "a share of a model skips tighter fits of another": (
        [reading(0), reading(1, **SMALL_T4)],
        [{**SHARE, "model": "A100"}],
        ["0"],
    ),
    # several GPUs
    "several GPUs are all on one node": ([*node("x", 1), *node("y", 2)], [{"gpus": 2}], ["y01"]),
    "several GPUs are granted all or none": (node("box", 2), [ONE, {"gpus": 2}], ["0", ""]),
    "several GPUs are on the node with the fewest that has enough": (
        [*node("large", 4), *node("middle", 2), *node("small", 1)],
        [{"gpus": 2}],
        ["middle01"],
    ),
    "several GPUs are of one model where possible": (
        [reading(0, name=T4), reading(1, utilization=50), reading(2, utilization=50), reading(3, name="L4")],
        [{"gpus": 2}],
        ["12"],
    ),
    "several GPUs are of the model with the fewest": (
        [reading(0), reading(1), reading(2), reading(3, name=T4), reading(4, name=T4)],
        [{"gpus": 2}],
        ["34"],
    ),
    "of two models with as many the less used is taken": (
        [reading(0, utilization=20), reading(1), reading(2, name=T4, utilization=10), reading(3, name=T4)],
        [{"gpus": 2}],
        ["23"],
    ),
    "models are mixed where none has enough": (
        [reading(0), reading(1, name=T4), reading(2, name="L4", utilization=50)],
        [{"gpus": 2}],
        ["01"],
    ),
    "the least used are taken, by index": (
        [reading(0, utilization=5), reading(1, utilization=50), reading(2), reading(3, utilization=60)],
        [{"gpus": 2}],
        ["02"],
    ),
    "several shares go where the least room is left": (
        node("box", 3),
        [{"memory_mb": 8_000}, {"gpus": 2, "memory_mb": 8_000}],
        ["0", "01"],
    ),
    "a node with enough open but too few of them usable is passed over": (
        [reading(0, node="x"), reading(1, node="x", utilization=50), *node("y", 3)],
        [{"gpus": 2, "utilization_threshold_percent": 40}],
        ["y01"],
    ),
    "several busy GPUs will do for a request that says so": (
        node("box", 2, utilization=95),
        [{"gpus": 2, "utilization_threshold_percent": 99}],
        ["01"],
    ),
    "a node whose open GPUs are of another model is passed over": (
        [*node("x", 2, name=T4), *node("y", 3)],
        [{"gpus": 2, "model": "A100"}],
        ["y01"],
    ),
    # neighbours
    "the longest row stays whole": (  # 5 to 7 are just enough; 0 to 3 stay together
        node("box", 8),
        [{"among": ("4",)}, {"gpus": 3}, {"gpus": 4}],
        ["4", "567", "0123"],
    ),
    "a GPU in use is no better for being a neighbour": (
        [reading(0), reading(1, used_mb=40_000, processes=None), reading(2), reading(3)],
        [{"gpus": 2}],
        ["23"],
    ),
    "several GPUs are on one island": (islands(0, 1, 0, 1, 0, 1, 0, 1), [{"gpus": 4}], ["0246"]),
    "they are on the island with the fewest free GPUs that has enough": (
        islands(0, 1, 0, 1, 0, 1, 0, 1, busy=(3,)),
        [{"gpus": 3}, {"gpus": 4}],
        ["157", "0246"],
    ),
    "a GPU in use between two of an island does not part them": (
        islands(0, 0, 0, 1, 1, 1, busy=(1,)),
        [{"gpus": 2}],
        ["02"],
    ),
    # Pairs on a PCIe switch, two of them on a NUMA node; one GPU of each pair is in use, and a whole pair.
    "islands of an island are closer than others": (
        islands(0, 0, 1, 1, 3, 3, 4, 4, busy=(0, 2, 3)),
        [{"gpus": 3}],
        ["456"],
    ),
    "more than an island has come from the nearest ones": (
        islands(0, 0, 1, 1, 3, 3, 4, 4),
        [{"gpus": 4}, {"gpus": 3}],
        ["0123", "456"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_best_gpus_are_taken(case: str) -> None:
    gpus, requests, expected = CASES[case]
    box = Box(*gpus)

    for number, wishes in enumerate(requests):
        box.ask(f"w{number}", **wishes)

    assert [granted(box, f"w{number}") for number in range(len(requests))] == expected


def test_ignored_memory_does_not_count_as_use_in_the_choice() -> None:
    box = Box(
        reading(0, used_mb=8_000, processes=(process(66, 8_000),)),
        reading(1, used_mb=16_000, processes=(process(67, 16_000, name="Xorg"),)),
    )
    box.ignore("Xorg")

    box.ask("a")

    assert box.gpus_of("a") == (key(1),)


def test_several_gpus_are_neighbours() -> None:
    box = Box(*node("box", 8))
    for name in "abcdefgh":
        box.ask(name)
    for name in "bcefgh":  # 1, 2, 4, 5, 6, 7 are free
        box.release(name)
    box.pass_time(0.1)
    box.observe_now(*node("box", 8))

    box.ask("four", gpus=4)

    assert granted(box, "four") == "4567"


def test_positions_that_are_told_later_change_the_choice() -> None:
    box = Box(*islands(None, None, None, None))
    box.observe_now(*islands(0, 1, 0, 1))

    box.ask("two", gpus=2)

    assert granted(box, "two") == "02"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=24), st.sampled_from((8, 16, 32)))
def test_shares_are_placed_as_best_fit_places_them(asked_gb: list[int], total_gb: int) -> None:
    """Nowhere is a worse fit taken than there is, and no whole GPU while a shared one has the room."""
    box = Box(*(reading(index, total_mb=total_gb * 1_000) for index in range(8)))
    limit_gb = total_gb * 0.8
    bins: list[float] = []
    for number, gb in enumerate(asked_gb):
        box.ask(f"s{number}", memory_mb=gb * 1_000)
        granted = box.gpus_of(f"s{number}")
        if gb > limit_gb or box.state.queue:
            return  # from here on the line decides
        fits = [used for used in bins if used + gb <= limit_gb]
        beside = max(fits, default=0.0)
        there = sum(other for n, other in enumerate(asked_gb[:number]) if box.gpus_of(f"s{n}") == granted)
        assert there == beside
        if fits:
            bins.remove(beside)
        bins.append(beside + gb)
