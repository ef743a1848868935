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


def test_the_memory_of_all_strangers_counts_and_the_largest_is_named() -> None:
    box = Box(used_by(process(7, 600), process(8, 700, user="eve"), process(9, 100)))

    assert str(box.verdict()) == "in use outside the pool: python of eve (pid 8) and 2 more, 1.4 GiB"


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
