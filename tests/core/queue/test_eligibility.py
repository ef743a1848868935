"""May this GPU be granted to this request? Yes, or exactly why not."""

from __future__ import annotations

from itertools import product

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.bounds import Thresholds
from gpu_worker_pool.core.queue.verdicts import Verdict, verdict
from tests.core.build import A100, START, T4, WALL_OFFSET_S, Box, key, process, reading

# --- measured ------------------------------------------------------------------------------------------------------


def test_an_idle_gpu_is_eligible_with_what_is_used_of_it_as_its_score() -> None:
    box = Box(reading(used_mb=8_000, utilization=5))

    assert box.verdict() == verdict("eligible", score=15.0)


def test_memory_at_the_threshold_is_over_it() -> None:
    assert Box(reading(used_mb=64_000)).verdict() == verdict("over_memory", memory_percent=80.0, threshold_percent=80.0)


def test_utilization_at_the_threshold_is_over_it() -> None:
    assert Box(reading(utilization=90)).verdict() == verdict(
        "over_utilization", utilization_percent=90, threshold_percent=90.0
    )


def test_a_request_may_be_stricter_than_the_pool() -> None:
    box = Box(reading(used_mb=24_000, utilization=40))

    assert box.verdict(memory_threshold_percent=30) == verdict("over_memory", memory_percent=30.0, threshold_percent=30)
    assert box.verdict(utilization_threshold_percent=40) == verdict(
        "over_utilization", utilization_percent=40, threshold_percent=40
    )


def test_a_request_may_be_laxer_than_the_pool() -> None:
    box = Box(reading(used_mb=72_000, utilization=95))

    box.ask("a", memory_threshold_percent=95, utilization_threshold_percent=99)

    assert box.stage("a") == "active"


def test_a_pool_has_the_thresholds_its_operator_set() -> None:
    box = Box(reading(used_mb=24_000), thresholds=Thresholds(30.0, 90.0))

    assert box.verdict() == verdict("over_memory", memory_percent=30.0, threshold_percent=30.0)


# --- unknown is not zero -------------------------------------------------------------------------------------------


def test_unknown_memory_is_not_taken_for_none_used() -> None:
    assert Box(reading(used_mb=None)).verdict() == verdict("reading_unknown", what="memory")


def test_unknown_utilization_is_not_taken_for_idle() -> None:
    assert Box(reading(utilization=None)).verdict() == verdict("reading_unknown", what="utilization")


def test_a_total_of_nothing_is_unknown_memory() -> None:
    assert Box(reading(total_mb=0)).verdict() == verdict("reading_unknown", what="memory")


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_utilization_that_is_not_a_number_is_never_granted(gpus: int) -> None:
    box = Box(reading(0, utilization=float("nan")), reading(1, utilization=float("nan")))

    box.ask("a", gpus=gpus, utilization_threshold_percent=95)

    assert box.stage("a") == "queued"


def test_readings_that_are_not_numbers_do_not_break_the_pool() -> None:
    box = Box(reading(0), reading(1), reading(2))
    for looks in product((float("nan"), 91.0, 95.0, 99.0), repeat=3):
        box.observe_now(*(reading(index, utilization=utilization) for index, utilization in enumerate(looks)))
    box.observe_now(reading(0), reading(1), reading(2))

    for lease_id in ("a", "b", "c"):
        box.ask(lease_id)

    assert {box.gpus_of(lease_id) for lease_id in ("a", "b", "c")} == {(key(0),), (key(1),), (key(2),)}


def test_a_gpu_that_answers_with_an_error_is_unhealthy() -> None:
    box = Box(reading(fault="fell off the bus"))

    assert box.verdict() == verdict("unhealthy", fault="fell off the bus")


def test_a_reading_is_good_for_as_long_as_the_pool_says() -> None:
    box = Box(reading(), stale_after_s=15.0)
    box.pass_time(15.0)

    assert box.verdict().is_eligible


def test_a_reading_older_than_that_is_stale() -> None:
    box = Box(reading(), stale_after_s=15.0)
    box.pass_time(15.5)

    assert box.verdict() == verdict("reading_stale", age_s=15.5)


def test_a_shared_gpu_that_nobody_has_looked_at_since_the_start_is_unknown() -> None:
    box = Box(reading())
    box.ask("a", memory_mb=1_000)

    box.restart()

    assert box.verdict(memory_mb=1_000) == verdict("reading_unknown", what="state")


# --- occupied ------------------------------------------------------------------------------------------------------


def test_a_leased_gpu_names_its_holder_and_since_when() -> None:
    box = Box(reading())
    box.ask("a", owner="ann", worker="w1")

    assert box.verdict() == verdict("leased", lease_ids=("a",), holders=("ann",), since_at=START + WALL_OFFSET_S)


def test_a_gpu_with_a_leases_processes_left_names_the_heaviest() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    crowd = (process(7, 512), process(8, 9_420.8, parents=(7,)), process(9, None, parents=(7,)))
    box.observe_now(reading(used_mb=10_000, processes=crowd))
    box.release("a")

    assert box.verdict() == verdict("draining", lease_id="a", pid=8, memory_mb=9_420.8)


def test_a_process_left_is_named_even_where_its_memory_is_unknown() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    box.observe_now(reading(processes=(process(7, None),)))
    box.release("a")

    assert box.verdict() == verdict("draining", lease_id="a", pid=7, memory_mb=None)


def test_a_process_left_is_named_even_after_a_look_without_a_process_list() -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    box.observe_now(reading(processes=(process(7, 512),)))
    box.release("a")
    box.observe_now(reading(processes=None))

    assert box.verdict() == verdict("draining", lease_id="a", pid=7, memory_mb=None)


# --- shared and busy -----------------------------------------------------------------------------------------------


def test_a_busy_shared_gpu_without_a_process_list_is_not_trusted() -> None:
    box = Box(reading())
    box.ask("a", memory_mb=8_000)
    box.observe_now(reading(used_mb=8_000, utilization=100, processes=None))

    assert box.verdict(memory_mb=8_000).code == "over_utilization"


# --- in words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "code", "words"),
    [
        (verdict("eligible", score=3.0), "eligible", "available"),
        (verdict("excluded", reason="new fan"), "excluded", "taken out of service: new fan"),
        (verdict("wrong_model", name=T4, wanted="A100"), "wrong_model", "Tesla T4, not A100"),
        (
            verdict("too_small", limit_mb=64_000, asked_mb=70_000),
            "too_small",
            "too small: 68.4 GB asked, 62.5 GB below the memory threshold when empty",
        ),
        (verdict("leased", lease_ids=("a", "b"), holders=("ann", "ben"), since_at=0.0), "leased", "leased by ann, ben"),
        (
            verdict("draining", lease_id="a", pid=None, memory_mb=None),
            "draining",
            "just released; the next reading will tell whether it is free",
        ),
        (
            verdict("draining", lease_id="a", pid=123, memory_mb=9420.8),
            "draining",
            "draining: pid 123 still holds 9.2 GiB",
        ),
        (
            verdict("draining", lease_id="a", pid=123, memory_mb=None),
            "draining",
            "draining: pid 123 still holds memory",
        ),
        (verdict("unhealthy", fault="fell off the bus"), "unhealthy", "unhealthy: fell off the bus"),
        (verdict("reading_unknown", what="memory"), "reading_unknown", "its memory is unknown"),
        (verdict("reading_stale", age_s=16.4), "reading_stale", "its last reading is 16 s old"),
        (
            verdict("over_memory", memory_percent=85.04, threshold_percent=80.0),
            "over_memory",
            "memory at 85.0 %, threshold 80 %",
        ),
        (
            verdict("over_utilization", utilization_percent=97.0, threshold_percent=90.0),
            "over_utilization",
            "utilization at 97 %, threshold 90 %",
        ),
        (
            verdict("no_room", committed_mb=60_000, asked_mb=8_000, limit_mb=64_000, holders=()),
            "no_room",
            "less than 8000 MB left: 4000 MB of 62.5 GB",
        ),
        (
            verdict("no_room", committed_mb=70_000, asked_mb=8_000, limit_mb=64_000, holders=()),
            "no_room",
            "less than 8000 MB left: 0 MB of 62.5 GB",
        ),
        (
            verdict("held", for_lease_id="a", for_holder="ann", from_at=None),
            "held",
            "reserved for ann, who is ahead in the queue",
        ),
    ],
)
def test_a_verdict_reads_as_a_sentence(verdict: Verdict, code: str, words: str) -> None:
    assert (verdict.code, str(verdict)) == (code, words)


def test_a_gpu_is_named_by_its_node_and_index() -> None:
    assert str(reading(2).gpu) == "box:2"
    assert reading(2).gpu.name == A100


def test_a_device_whose_hardware_knows_no_utilization_is_judged_by_memory_alone() -> None:
    box = Box(reading(utilization=None, has_utilization=False))
    assert box.verdict().is_eligible
    box.ask("a")
    assert box.gpus_of("a") == (key(),)
    full = Box(reading(utilization=None, has_utilization=False, used_mb=70_000))
    assert full.verdict().code == "over_memory"


def test_a_gpu_of_a_box_that_is_not_heard_of_says_so() -> None:
    box = Box(reading(node="gpu-07"))

    box.do(cmd.TakeOver(1, "boot"))

    assert str(box.verdict(node="gpu-07")) == "its box, gpu-07, is not heard of, so its state is unknown"
