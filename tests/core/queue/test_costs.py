"""What decisions cost, counted in passes, placements, entries of the indexes and lines of the core, and not in time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from gpu_worker_pool.core.decider import decide, evolve
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.queue import assignment, eligibility, node_index, placement
from tests.core.build import T4, Box, key, reading
from tests.core.queue.test_many_waiters import calls

COUNTED: dict[str, Any] = {
    "decided": decide.decide,
    "replayed": evolve.replay,
    "passes": assignment._pass_over_queue,
    "placed": placement.Survey.place,
    "judged": eligibility.judge,
    "indexed": node_index.NodeIndex.replace,
    "relisted": node_index.NodeIndex.list_again,
}
SMALL, LARGE, HELD = 100, 3_000, 50
# A logarithm grows so much from the one to the other; what goes through all of them, 30 times.
MOST_GROWTH = 1.5
ROOMY = {"max_queued": 10_000, "max_queued_per_owner": 10_000, "max_leases_per_owner": 10_000}


def counts(run: Callable[[], Any]) -> dict[str, int]:
    found = calls(run)
    return {name: found[function.__code__] for name, function in COUNTED.items() if found[function.__code__]}


def lines(run: Callable[[], Any]) -> int:
    """How many lines of the core are run; a loop counts in each of its rounds."""
    number = 0

    def trace(frame: Any, kind: str, _: object) -> Any:
        nonlocal number
        number += kind == "line"
        return trace if "gpu_worker_pool" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return number


def see(box: Box, gpus: Sequence[GpuKey]) -> None:
    """Look at these GPUs again."""
    known = (box.state.slots[gpu].reading for gpu in gpus)
    box.now += 0.1
    box.observe_now(*filter(None, known))


def test_a_lease_cycle_causes_no_pass_and_no_tick() -> None:
    box = Box(*map(reading, range(8)))

    asked = counts(lambda: box.ask("one"))
    gpus = box.gpus_of("one")
    released = counts(lambda: box.release("one"))
    seen = counts(lambda: see(box, gpus))

    # The request, and its admission.
    assert asked == {
        "decided": 2, "replayed": 2, "placed": 1, "judged": 1, "indexed": 1, "relisted": 1,
    }  # fmt: skip
    # The GPU drains: no waiter can have it before the next reading.
    assert released == {"decided": 1, "replayed": 1}
    # The reading, and that no waiter is there.
    assert seen == {"decided": 2, "replayed": 2, "indexed": 1}


def test_a_reading_that_says_the_same_touches_no_index() -> None:
    box = Box(*map(reading, range(8)))
    box.ask("one")
    see(box, [key(index) for index in range(8)])

    seen = counts(lambda: see(box, [key(index) for index in range(8)]))

    assert seen == {"decided": 1, "replayed": 1}


# Pools of which one number grows.


@cache
def one_node(size: int) -> Box:
    """All GPUs on one node, some of them leased, used in many ways."""
    box = Box(*(reading(index, used_mb=float(index % 700)) for index in range(size)), **ROOMY, stale_after_s=1e9)
    for number in range(HELD):
        box.ask(f"holder{number}")
    return box


@cache
def many_nodes(size: int) -> Box:
    nodes = [f"node{number:04}" for number in range(size // 8)]
    box = Box(*(reading(index, node=node) for node in nodes for index in range(8)), **ROOMY, stale_after_s=1e9)
    for number in range(HELD):
        box.ask(f"holder{number}")
    return box


def full(*, reserve_after_s: float = 1e9) -> Box:
    """Three of eight GPUs are free, and one of them is a T4."""
    gpus = [*map(reading, range(7)), reading(7, name=T4, total_mb=15_000.0)]
    box = Box(*gpus, **ROOMY, stale_after_s=1e9, reserve_after_s=reserve_after_s)
    box.ask("held", gpus=5, time_limit_s=100_000.0)
    return box


@cache
def alike(size: int) -> Box:
    box = full()
    for number in range(size):
        box.ask(f"waiter{number}", gpus=4)
    return box


@cache
def of_many_kinds(size: int) -> Box:
    """Waiters for more GPUs than are free; no two of those that share GPUs need as much, and each less than those before."""
    box = full()
    for number in range(0, size, 2):
        box.ask(f"waiter{number}", gpus=4 + number % 4)
        box.ask(f"waiter{number + 1}", gpus=8, memory_mb=12_000.0 - number)
    return box


@cache
def behind_a_reservation(size: int) -> Box:
    """The first waiter has a reservation. Of the others, no two need as much, and each needs more GPUs than are free."""
    box = full(reserve_after_s=0.0)
    for number in range(size):
        box.ask(f"waiter{number}", gpus=8 if number == 0 else 6, memory_mb=None if number == 0 else 9000.0 + number)
    assert box.state.reservation is not None
    return box


def cycle(box: Box, **wishes: Any) -> None:
    """An urgent request comes, is served, and goes; its GPUs are seen to be free."""
    box.ask("urgent", priority=9, time_limit_s=1000.0, **wishes)
    gpus = box.gpus_of("urgent")
    assert gpus
    box.now += 0.1
    box.release("urgent")
    see(box, gpus)
    # So that it may come again.
    box.state.ended.clear()


def turn_over(box: Box) -> None:
    """A holder ends, the next waiter is served, and another one comes."""
    gpus = box.gpus_of("held")
    box.now += 0.1
    box.release("held")
    see(box, gpus)
    box.ask("newcomer", gpus=4)


def grown(pool: Callable[[int], Box], happens: Callable[[Box], None]) -> float:
    """How many times as many lines a large pool takes for it."""
    small, large = pool(SMALL), pool(LARGE)
    return lines(lambda: happens(large)) / lines(lambda: happens(small))


@pytest.mark.parametrize("wishes", [{}, {"memory_mb": 1000.0}], ids=["whole", "share"])
@pytest.mark.parametrize("pool", [one_node, many_nodes, alike, of_many_kinds, behind_a_reservation])
def test_a_lease_cycle_does_not_grow(pool: Callable[[int], Box], wishes: dict[str, Any]) -> None:
    assert grown(pool, lambda box: cycle(box, **wishes)) <= MOST_GROWTH


def test_several_gpus_do_not_cost_more_on_more_nodes() -> None:
    assert grown(many_nodes, lambda box: cycle(box, gpus=2)) <= MOST_GROWTH


@pytest.mark.parametrize("pool", [alike, of_many_kinds])
def test_a_turn_over_does_not_grow(pool: Callable[[int], Box]) -> None:
    """This is the last that uses these pools."""
    assert grown(pool, turn_over) <= MOST_GROWTH
