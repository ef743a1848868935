"""Processes outside the pool: a GPU on which one computes or holds much memory is not granted to one lease alone."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.queue.verdicts import verdict
from tests.core.build import Box, key, process, reading

GIB = 1024.0
BOB = process(4711, 58 * GIB, name="train.py", user="bob")


def used_by(*processes: Any, utilization: float = 0, index: int = 0) -> Any:
    used_mb = sum(found.memory_mb or 0 for found in processes)
    return reading(index, used_mb=used_mb, utilization=utilization, processes=processes)


def test_a_gpu_on_which_a_stranger_holds_much_memory_is_not_granted_and_names_the_stranger() -> None:
    box = Box(used_by(BOB, utilization=60))

    box.ask("ada")

    assert box.stage("ada") == "queued"
    assert box.verdict() == verdict(
        "in_use_outside",
        pid=4711,
        user="bob",
        program="train.py",
        memory_mb=58 * GIB,
        utilization_percent=60.0,
        others=0,
    )
    assert "in use outside the pool: train.py of bob (pid 4711), 58.0 GiB, 60 % busy" in str(box.explain("ada"))


@pytest.mark.parametrize(
    ("memory_mb", "utilization", "is_in_use"),
    [(GIB, 4.9, False), (GIB + 1, 0, True), (300, 5, True), (0, 5, True), (None, 0, True)],
)
def test_in_use_is_more_than_a_gibibyte_or_five_percent_busy_or_unknown(
    memory_mb: float | None, utilization: float, is_in_use: bool
) -> None:
    box = Box(used_by(process(7, memory_mb), utilization=utilization))

    assert (box.verdict().code == "in_use_outside") == is_in_use


def test_the_memory_of_all_strangers_counts_and_the_largest_is_named() -> None:
    box = Box(used_by(process(7, 600), process(8, 700, user="eve"), process(9, 100)))

    assert str(box.verdict()) == "in use outside the pool: python of eve (pid 8) and 2 more, 1.4 GiB"


def test_strangers_that_the_operator_ignores_do_not_count() -> None:
    box = Box(used_by(process(7, 5 * GIB, name="Xorg"), utilization=20))
    box.ignore("Xorg")

    box.ask("ada")

    assert box.stage("ada") == "active"


def test_without_a_process_list_the_thresholds_decide() -> None:
    box = Box(reading(used_mb=20_000, utilization=50, processes=None))

    assert box.verdict().is_eligible


def test_load_without_a_process_is_left_to_the_thresholds() -> None:
    box = Box(reading(used_mb=20_000, utilization=50, processes=()))

    assert box.verdict().is_eligible


def test_a_shared_request_reckons_with_the_memory_of_strangers() -> None:
    box = Box(used_by(BOB, utilization=60))

    box.ask("fits", memory_mb=4_000)
    box.ask("does-not", memory_mb=10_000)

    assert (box.stage("fits"), box.stage("does-not")) == ("active", "queued")


@pytest.mark.parametrize("asked", [{"memory_threshold_percent": 80.0}, {"utilization_threshold_percent": 90.0}])
def test_a_request_with_thresholds_of_its_own_has_said_what_in_use_means(asked: dict[str, float]) -> None:
    box = Box(used_by(BOB, utilization=60), reading(1, used_mb=70_000, processes=()))

    box.ask("two", gpus=2, **asked)
    box.ask("ada", **asked)

    assert box.stage("two") == "queued"
    assert box.gpus_of("ada") == (key(0),)


@pytest.mark.parametrize(
    ("outsiders", "asked", "is_granted"),
    [
        ("avoid", {"memory_threshold_percent": 95.0}, False),
        ("thresholds", {}, True),
        ("by_request", {}, False),
    ],
)
def test_the_operator_may_force_either_rule(outsiders: str, asked: dict[str, float], is_granted: bool) -> None:
    box = Box(used_by(BOB, utilization=60), outsiders=outsiders)

    box.ask("ada", **asked)

    assert (box.stage("ada") == "active") == is_granted


def test_a_waiter_is_served_when_the_stranger_goes() -> None:
    box = Box(used_by(BOB, utilization=60))
    box.ask("ada")

    box.observe_now(reading(processes=()))

    assert box.stage("ada") == "active"


def test_a_stranger_is_noticed_that_comes_without_more_memory_or_load() -> None:
    box = Box(reading(used_mb=2 * GIB, utilization=3, processes=()))
    box.ask("first")
    box.release("first")

    box.observe_now(used_by(process(7, 2 * GIB), utilization=3))
    box.ask("ada")

    assert box.stage("ada") == "queued"


def test_processes_of_an_ended_lease_drain_first_and_are_strangers_after_the_drain_limit() -> None:
    box = Box(reading(), drain_limit_s=20.0, stale_after_s=1000.0)
    box.ask("job", pid=10)
    box.observe_now(used_by(process(10, 9 * GIB)))
    box.revoke("job")
    box.ask("ada", ttl_s=1000.0)
    assert box.verdict().code == "draining"

    box.pass_time(20.0)

    assert (box.stage("job"), box.stage("ada")) == ("revoked", "queued")
    assert box.verdict().code == "in_use_outside"


def test_a_process_is_no_stranger_to_itself() -> None:
    """A notebook that used the GPU an hour ago, and keeps its cache there, gets that GPU again."""
    box = Box(used_by(process(20, 9 * GIB, parents=(10,), user="ada"), utilization=50))

    box.ask("other", pid=30, owner="bob")
    box.ask("own", pid=10, owner="ada")
    box.ask("claimed", pid=10, owner="bob")
    assert (box.stage("other"), box.stage("own")) == ("queued", "queued"), "nobody overtakes a waiter ahead"

    box.release("other")

    assert (box.stage("own"), box.stage("claimed")) == ("active", "queued")


def test_a_process_is_a_stranger_to_others_even_if_their_users_are_the_same() -> None:
    box = Box(used_by(process(20, 9 * GIB, user="ada"), process(21, 9 * GIB, user="ada")))

    box.ask("own", pid=20, owner="ada")

    assert box.stage("own") == "queued"


def test_a_gpu_of_another_server_is_never_granted_and_what_only_it_could_serve_is_refused() -> None:
    theirs = "held by the server of bob (pid 7)"
    box = Box(reading(0, other_server=theirs), reading(1))

    assert box.verdict(0, memory_threshold_percent=100.0) == verdict("other_server", server=theirs)
    box.ask("one")
    assert box.gpus_of("one") == (key(1),)
    for wishes in ({"gpus": 2}, {"among": ("0",)}):
        (refused,) = box.ask("two", **wishes)
        assert isinstance(refused, ev.Refused)
        assert theirs in refused.why
