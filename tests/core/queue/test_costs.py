"""What decisions cost, however many waiters, GPUs and wishes there are: counted in calls and in lines of the core that are run, and not in time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from gpu_worker_pool.core.decider import decide, evolve
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import facts
from gpu_worker_pool.core.model.configured import Booking, Quota
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import MAX_GPUS, Wishes
from gpu_worker_pool.core.queue import eligibility, placement, planner, preemption, serve
from gpu_worker_pool.core.queue.bookings import MOST_BOOKINGS
from gpu_worker_pool.core.queue.explain import explain
from gpu_worker_pool.core.queue.planner import MOST_GPUS
from tests.core.build import T4, WALL_OFFSET_S, Box, expected_starts, free_at_once, key, reading

PASS = serve.serve_queue.__code__
PLACE = placement.Placer.place.__code__
CLAIM = preemption.find_claim.__code__
PLAN = planner.Planner.plan.__code__
WAITERS = 120


def calls(run: Callable[[], Any]) -> Counter[object]:
    """How often each function was called."""
    found: Counter[object] = Counter()

    def note(frame: Any, kind: str, _: object) -> None:
        if kind == "call":
            found[frame.f_code] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def wants(number: int) -> dict[str, Any]:
    """Wishes that differ from those of each other number."""
    return {
        "gpus": 1 + number % 4,
        "priority": number % 50,
        "time_limit_s": 1000.0 + 7.3 * number,
        "preemptible": bool(number % 2),
        "memory_mb": 100.0 + number if number % 3 == 0 else None,
    }


def full_box(*, preemptible: int, **settings: float) -> Box:
    """Eight leased GPUs, this many of them under preemptible leases; and many waiters with different wishes."""
    box = free_at_once(*map(reading, range(8)), stale_after_s=1e9, **settings)
    for number in range(8):
        box.ask(f"holder{number}", preemptible=number < preemptible)
    for number in range(WAITERS):
        box.ask(f"waiter{number}", **wants(number))
    assert len(box.state.queue) == WAITERS
    return box


@pytest.mark.parametrize("preemptible", [0, 1, 8])
def test_a_pass_over_many_different_waiters_tries_few_wishes(preemptible: int) -> None:
    box = full_box(preemptible=preemptible)

    box.state.unsettle()
    found = calls(lambda: box.pass_time(0.0))

    assert found[PASS] == 1
    # Exclusive or shared, and the number of GPUs, before and after each claim: it does not grow with the waiters.
    assert found[PLACE] <= 20
    assert found[CLAIM] <= 20


def test_a_wish_that_is_kept_from_less_is_tried_though_another_failed() -> None:
    box = free_at_once(reading(0), reading(1), stale_after_s=1e9, reserve_after_s=0.0)
    box.ask("holder", time_limit_s=100.0)
    box.ask("wide", gpus=2)
    box.ask("long", time_limit_s=1000.0)
    assert box.stage("long") == "queued"

    box.ask("short", time_limit_s=50.0)

    assert box.stage("short") == "active"


def test_few_dates_are_looked_for_when_all_wait_for_holders_without_a_limit() -> None:
    box = full_box(preemptible=0, reserve_after_s=10.0)
    different = len({box.state.queued(lease_id).request.wishes for lease_id in box.state.queue})

    found = calls(lambda: box.run_to(box.now + 10.0))

    assert box.state.reservation is None
    assert 0 < found[PLAN] <= different < WAITERS


def test_a_pass_in_a_large_pool_looks_for_few_dates() -> None:
    """Each takes a look at all GPUs, and no caller is answered meanwhile."""
    box = free_at_once(*map(reading, range(MOST_GPUS // 2 + 1)), stale_after_s=1e9)
    box.ask("for ever", gpus=MAX_GPUS)
    box.ask("for ever too", gpus=MOST_GPUS // 2 + 1 - MAX_GPUS)
    box.ask("one")
    box.ask("two", gpus=2)
    box.ask("share", memory_mb=1.0)

    assert calls(lambda: box.pass_time(600.0))[PLAN] == 1


COUNTED: dict[str, Any] = {
    "decided": decide.decide,
    "replayed": evolve.replay,
    "passes": serve.serve_queue,
    "placed": placement.Placer.place,
    "judged": eligibility.judge,
    "derived": facts.facts_of,
}
SMALL, LARGE = 50, 500
# What is fixed is most of the cost of a small pool; what is linear grows as the pool does, and what is quadratic much more.
LINEAR = 1.3
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


def test_a_lease_cycle_serves_the_queue_once() -> None:
    box = Box(*map(reading, range(8)))

    asked = counts(lambda: box.ask("one"))
    gpus = box.gpus_of("one")
    released = counts(lambda: box.release("one"))
    seen = counts(lambda: see(box, gpus))

    # Only the GPU that is granted is judged.
    assert asked == {"decided": 1, "replayed": 1, "passes": 1, "placed": 1, "judged": 1, "derived": 1}
    # No request waits, so the queue is not served.
    assert released == seen == {"decided": 1, "replayed": 1, "derived": 1}


def test_a_reading_that_says_the_same_derives_nothing_and_causes_no_pass() -> None:
    box = Box(*map(reading, range(8)))
    box.ask("one")
    see(box, [key(index) for index in range(8)])

    seen = counts(lambda: see(box, [key(index) for index in range(8)]))

    assert seen == {"decided": 1, "replayed": 1}


# Pools of which one number grows.


def one_node(size: int) -> Box:
    """GPUs of one node, all used a little, and no two alike."""
    return Box(*(reading(index, used_mb=float(index)) for index in range(size)), stale_after_s=1e9)


def many_nodes(size: int) -> Box:
    nodes = [f"node{number:04}" for number in range(size // 5)]
    return Box(*(reading(index, node=node) for node in nodes for index in range(5)), stale_after_s=1e9)


def full(*, reserve_after_s: float = 1e9) -> Box:
    """Three of eight GPUs are free, and one of them is a T4."""
    gpus = [*map(reading, range(7)), reading(7, name=T4, total_mb=15_000.0)]
    box = Box(*gpus, **ROOMY, stale_after_s=1e9, reserve_after_s=reserve_after_s)
    box.ask("held", gpus=5, time_limit_s=100_000.0)
    return box


def alike(size: int) -> Box:
    box = full()
    for number in range(size):
        box.ask(f"waiter{number}", gpus=4)
    return box


def of_many_kinds(size: int) -> Box:
    """Waiters for more GPUs than are free; no two of those that share GPUs need as much, and each less than those before."""
    box = full()
    for number in range(0, size, 2):
        box.ask(f"waiter{number}", gpus=4 + number % 4)
        box.ask(f"waiter{number + 1}", gpus=8, memory_mb=12_000.0 - number)
    return box


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


@pytest.mark.parametrize("wishes", [{}, {"memory_mb": 1000.0}, {"gpus": 2}], ids=["whole", "share", "two"])
@pytest.mark.parametrize("pool", [one_node, many_nodes, alike, of_many_kinds, behind_a_reservation])
def test_a_lease_cycle_grows_no_faster_than_the_pool(pool: Callable[[int], Box], wishes: dict[str, Any]) -> None:
    small, large = (lines(partial(cycle, pool(size), **wishes)) for size in (SMALL, LARGE))

    assert large <= LINEAR * small * LARGE / SMALL


# What callers are told.


def waiting(gpus: int, bookings: int = 0, **wishes: Any) -> Box:
    """A waiter for more GPUs than are free, where others have booked these one after the other."""
    box = Box(*map(reading, range(gpus)), stale_after_s=1e9)
    box.ask("holder")
    for number in range(bookings):
        starts_at = WALL_OFFSET_S + 1e6 + 10.0 * number
        gpu = key(1 + number % (gpus - 1))
        booking = Booking(f"b{number}", (gpu,), starts_at, starts_at + 5.0, f"owner{number % 8}", "a course")
        box.do(cmd.BookGpus(booking, Wishes()))
    box.ask("waiter", owner="bob", **{"gpus": gpus, **wishes})
    assert len(box.state.bookings) == bookings
    assert box.stage("waiter") == "queued"
    return box


def explaining(box: Box) -> int:
    return lines(lambda: explain(box.state, "waiter", box.now))


def test_a_booking_costs_an_explanation_as_much_however_many_gpus_there_are() -> None:
    """Each GPU is held against its own bookings, and not against all: 256 of them took 12.6 ms with 64 GPUs."""
    few, many = (explaining(waiting(gpus, MOST_BOOKINGS)) - explaining(waiting(gpus, 64)) for gpus in (8, 64))

    assert many <= 2 * few


def test_an_explanation_under_a_quota_grows_no_faster_than_the_pool() -> None:
    """How much a share weighs is found out for each GPU once."""
    costs = []
    for gpus in (8, 64):
        small = (reading(index, total_mb=20_000.0) for index in range(1, gpus))
        box = Box(reading(0, total_mb=80_000.0), *small, stale_after_s=1e9)
        box.set_quota("ada", Quota(gpus=1))
        box.ask("half", owner="ada", memory_mb=40_000.0)
        box.ask("rest", owner="bob", memory_mb=20_000.0, among=("0",))
        box.ask("waiter", owner="ada", memory_mb=15_000.0)
        assert f"{gpus - 1} its owner's quota is 1 GPU, 0.5 in use" in str(box.explain("waiter"))
        costs.append(explaining(box))

    assert costs[1] <= LINEAR * costs[0] * 64 / 8


def test_a_forecast_grows_no_faster_than_the_leases_that_share_a_gpu() -> None:
    """Each lease is taken off the GPU once: with 64 of them, 2,080 sums of memory took 1.2 ms for each GPU."""
    costs = []
    for sharers in (8, 64):
        box = Box(reading(0), stale_after_s=1e9)
        for number in range(sharers):
            box.ask(f"share{number}", memory_mb=100.0, time_limit_s=3600.0 + number)
        box.ask("whole")
        assert expected_starts(box.state, box.now)["whole"].after == f"share{sharers - 1}"
        costs.append(lines(partial(expected_starts, box.state, box.now)))

    assert costs[1] <= LINEAR * costs[0] * 64 / 8
