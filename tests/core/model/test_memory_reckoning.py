"""Sharing without double counting: each lease counts as what it asked for or what it uses, whichever is more."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.slot import MemoryUse, memory_use, used_percent
from gpu_worker_pool.core.queue.verdicts import verdict
from tests.core.build import Box, key, process, reading


def use_of(box: Box) -> MemoryUse:
    use = memory_use(box.state.slots[key()], box.state.ignored_processes)
    assert use is not None
    return use


ONE: list[dict[str, Any]] = [{"pid": 7}]
REMOTE: list[dict[str, Any]] = [{"pid": None}]
CASES: dict[str, tuple[list[dict[str, Any]], Reading, dict[str, float], float]] = {
    # The sharers of 10,000 MB each, what is read, what each lease is put down, and what is outside.
    "processes that account for more than is used make no room": (
        ONE,
        reading(used_mb=5_000, processes=(process(7, 6_000),)),
        {"0": 10_000},
        0,
    ),
    "two leases of one process are not counted twice": (
        ONE * 2,
        reading(used_mb=20_000, processes=(process(7, 20_000),)),
        {"0": 10_000, "1": 10_000},
        0,
    ),
    "a process belongs to its own lease before that of its parent": (
        [{"pid": 7}, {"pid": 8}],
        reading(used_mb=15_000, processes=(process(7, 5_000), process(8, 10_000, parents=(7,)))),
        {"0": 10_000, "1": 10_000},
        0,
    ),
    # Where it cannot be told whose it is
    "without a process list memory is the lease's": (ONE, reading(used_mb=9_000, processes=None), {"0": 10_000}, 0),
    "what is more than was asked for is outside": (ONE, reading(used_mb=15_000, processes=None), {"0": 10_000}, 5_000),
    "several leases explain what all asked for": (
        ONE * 2,
        reading(used_mb=25_000, processes=None),
        {"0": 10_000, "1": 10_000},
        5_000,
    ),
    "a process of unknown memory explains what its lease asked for": (
        ONE,
        reading(used_mb=9_000, processes=(process(7, None),)),
        {"0": 10_000},
        0,
    ),
    "it explains only what the others do not hold already": (
        ONE,
        reading(used_mb=13_000, processes=(process(7, 8_000), process(8, None, parents=(7,)))),
        {"0": 10_000},
        3_000,
    ),
    "an outsider of unknown memory explains nothing of a lease": (
        ONE,
        reading(used_mb=9_000, processes=(process(66, None),)),
        {"0": 10_000},
        9_000,
    ),
    "a lease from another machine may own what nobody accounts for": (
        REMOTE,
        reading(used_mb=9_000, processes=(process(66, 9_000),)),
        {"0": 10_000},
        0,
    ),
    "an exclusive lease is put down what nobody else accounts for": (
        [{"memory_mb": None}],
        reading(used_mb=9_000, processes=None),
        {"0": 9_000},
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_is_split_between_leases_and_others(case: str) -> None:
    sharers, seen, by_lease, outside_mb = CASES[case]
    box = Box(reading())
    for number, wants in enumerate(sharers):
        box.ask(str(number), **{"memory_mb": 10_000, **wants})
    box.pass_time(1.0)  # what is read from now on may be their own

    box.observe_now(seen)

    assert use_of(box) == MemoryUse(by_lease, outside_mb)


def test_the_memory_of_a_gpu_that_was_not_read_is_unknown() -> None:
    box = Box(reading())
    box.ask("a", memory_mb=10_000, pid=7)
    box.restart()

    assert memory_use(box.state.slots[key()], frozenset()) is None
    assert used_percent(box.state.slots[key()], frozenset()) is None


# --- processes that do not count -----------------------------------------------------------------------------------


def test_ignoring_a_process_changes_nothing_without_a_process_list() -> None:
    box = Box(reading(used_mb=70_000, processes=None))

    box.ignore("Xorg")

    assert box.verdict(memory_threshold_percent=80.0) == verdict(
        "over_memory", memory_percent=87.5, threshold_percent=80.0
    )


# --- statistics only -----------------------------------------------------------------------------------------------


def test_measured_megabytes_are_believed_before_a_reported_percentage() -> None:
    assert reading(used_mb=8_000, percent=99.0).memory_percent == 10.0


def test_ignoring_a_process_does_not_make_a_reported_percentage_unknown() -> None:
    box = Box(reading(used_mb=None, percent=12.5, processes=()))

    box.ignore("Xorg")

    assert box.verdict() == verdict("eligible", score=12.5)


def test_memory_that_was_read_before_the_grant_is_not_the_leases() -> None:
    box = Box(reading(used_mb=24_000, processes=(process(77, 24_000),)))

    box.ask("from elsewhere", memory_mb=40_000)

    assert box.verdict(memory_mb=1).code == "no_room", "24,000 outside and 40,000 leased are the limit of 64,000"
    box.pass_time(1.0)
    box.observe_now(reading(used_mb=64_000, processes=(process(77, 24_000), process(88, 40_000))))
    assert box.verdict(memory_mb=1).code == "no_room"
    box.observe_now(reading(used_mb=40_000, processes=(process(88, 40_000),)))
    assert box.verdict(memory_mb=1).is_eligible, "of what is read later, as much as it asked for may be its own"


def test_after_a_reboot_a_lease_may_own_what_is_read() -> None:
    box = Box(reading())
    box.ask("from elsewhere", memory_mb=40_000)

    box.reboot()
    box.observe_now(reading(used_mb=40_000, processes=(process(88, 40_000),)))

    assert use_of(box) == MemoryUse({"from elsewhere": 40_000}, outside_mb=0.0)
