"""Bad input is told the parameter, the value and the range; models are matched as people mean them."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.core.model.bounds import Thresholds
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.request import Holder, Request, Wishes, matches_model
from gpu_worker_pool.core.model.settings import PoolSettings

NAN = float("nan")
INF = float("inf")

# --- validation ----------------------------------------------------------------------------------------------------

WHOLE, MB, PERCENT = "a whole number from 1 to 1024", "a number from 1 to 1000000000", "a number from 0 to 100"
TTL, PRIORITY = "a number from 0.1 to 604800", "a whole number from -1000000 to 1000000"
# What is made with each of these values, and what it must be.
BAD: list[tuple[Any, str, list[Any], str]] = [
    (Wishes, "gpus", [0, -1, 1025, 1.0, True, "2", None, 10**400], WHOLE),
    (Wishes, "memory_mb", [0, -5, NAN, INF, -INF, True, "8000", 1e10, 10**400], MB),
    (Wishes, "memory_threshold_percent", [-0.1, 100.1, NAN, 10**400], PERCENT),
    (Wishes, "utilization_threshold_percent", [101, INF, False], PERCENT),
    (Request, "ttl_s", [0, -5, NAN, INF, 604_801, True, None], TTL),
    (Request, "priority", [1_000_001, -1_000_001, 0.5, True], PRIORITY),
    (PoolSettings, "stale_after_s", [NAN], "a number from 0 to 1000000000"),
    (PoolSettings, "drain_limit_s", [-1], "a number from 0 to 1000000000"),
    (PoolSettings, "remembered_ended_leases", [-1], "a whole number from 0 to 10000000"),
]


@pytest.mark.parametrize(
    ("kind", "name", "value", "allowed"),
    [(kind, name, value, allowed) for kind, name, values, allowed in BAD for value in values],
)
def test_a_value_out_of_range_is_told_its_name_value_and_range(kind: Any, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=r"^\w+ is ") as caught:
        kind(**{name: value})

    assert str(caught.value) == f"{name} is {value!r}; it must be {allowed}"


@pytest.mark.parametrize(
    ("name", "thresholds"),
    [
        ("memory_threshold_percent", Thresholds(101.0, 90.0)),
        ("utilization_threshold_percent", Thresholds(80.0, NAN)),
    ],
)
def test_a_pool_threshold_out_of_range_is_told_its_name(name: str, thresholds: Thresholds) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*; it must be a number from 0 to 100"):
        PoolSettings(thresholds=thresholds)


@pytest.mark.parametrize("model", ["", "  ", "\t"])
def test_an_empty_model_is_refused_with_what_to_do(model: str) -> None:
    with pytest.raises(ValueError, match="model is empty; leave it out to take any model"):
        Wishes(model=model)


ENDS = {
    "gpus": (1, 1024),
    "memory_mb": (1, 1e9),
    "memory_threshold_percent": (0, 100),
    "utilization_threshold_percent": (0.0, 100.0),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, ends in ENDS.items() for value in ends])
def test_the_ends_of_a_range_belong_to_it(name: str, value: Any) -> None:
    assert getattr(Wishes(**{name: value}), name) == value


def test_a_request_without_any_wish_is_for_one_gpu_alone() -> None:
    request = Request()

    assert (request.wishes.gpus, request.wishes.is_shared, request.ttl_s) == (1, False, 60.0)


# --- thresholds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, (80.0, 90.0)),
        ({"memory_threshold_percent": 50}, (50, 90.0)),
        ({"utilization_threshold_percent": 20}, (80.0, 20)),
        ({"memory_threshold_percent": 0}, (0, 90.0)),  # not taken for none
    ],
)
def test_a_threshold_that_a_request_has_not_is_the_pools(own: dict[str, Any], expected: tuple[float, float]) -> None:
    assert PoolSettings().thresholds_for(Wishes(**own)) == Thresholds(*expected)


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not_fit"),
    [
        ("A10", ["NVIDIA A10"], ["NVIDIA A100-SXM4-80GB", "NVIDIA A10G"]),
        ("A100", ["NVIDIA A100-SXM4-80GB", "nvidia a100"], ["Tesla T4"]),
        (" a100 ", ["NVIDIA A100-SXM4-80GB", "NVIDIA A100"], []),
        ("100", [], ["NVIDIA A100"]),
        ("T4", ["Tesla T4"], ["NVIDIA T400"]),
        ("A100-SXM4", ["NVIDIA A100-SXM4-80GB"], []),
        ("RTX 4090", ["NVIDIA GeForce RTX 4090"], []),
        ("*a100*80gb", ["NVIDIA A100-SXM4-80GB"], []),
        ("A100*", [], ["NVIDIA A100-SXM4-80GB"]),
        ("*A100", [], ["NVIDIA A100-SXM4-80GB"]),
        ("A.00", [], ["NVIDIA A100"]),
        ("Tesla ?4", ["Tesla T4"], []),
        ("Tesla [TP]4", ["Tesla P4"], ["Tesla V4"]),
        ("tesla [!P]4", ["Tesla T4"], ["Tesla P4"]),
        (None, ["anything"], []),
    ],
)
def test_a_pattern_fits_a_name(pattern: str | None, fits: list[str], does_not_fit: list[str]) -> None:
    assert [matches_model(pattern, name) for name in fits] == [True] * len(fits)
    assert not any(matches_model(pattern, name) for name in does_not_fit)


# --- in words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (Wishes(), "1 GPU"),
        (Wishes(gpus=4), "4 GPUs on one node"),
        (Wishes(memory_mb=8000), "1 GPU with 8000 MB"),
        (Wishes(memory_mb=12 * 1024**2), "1 GPU with 12288 GB"),
        (Wishes(gpus=2, memory_mb=8000, model="A100"), "2 GPUs on one node with 8000 MB each of model A100"),
    ],
)
def test_wishes_read_as_people_say_them(wishes: Wishes, words: str) -> None:
    assert str(wishes) == words


@pytest.mark.parametrize(
    ("holder", "words"),
    [
        (Holder(worker_id="w1", owner="ann", pid=7), "ann"),
        (Holder(worker_id="w1"), "w1"),
        (Holder(owner="ann"), "ann"),
        (Holder(pid=7), "pid 7"),
        (Holder(), "an unnamed holder"),
    ],
)
def test_a_holder_is_named_by_the_best_that_is_known(holder: Holder, words: str) -> None:
    assert str(holder) == words


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ((), "ann"),
        ((("command", "python train.py"), ("name", "second")), "ann (python train.py)"),
        ((("name", "resnet"),), "ann (resnet)"),
        ((("command", ""), ("job", "line 3")), "ann"),
        ((("command", "x" * 200),), f"ann ({'x' * 59}…)"),
    ],
)
def test_a_request_names_the_person_and_the_task_not_the_worker(
    labels: tuple[tuple[str, str], ...], words: str
) -> None:
    assert Request(holder=Holder(worker_id="w1", owner="ann"), labels=labels).who == words


def test_a_holder_is_local_if_its_process_was_found_here_and_is_the_same_holder_all_the_same() -> None:
    told, found = Holder(pid=7, pid_started=1.0), Holder(pid=7, pid_started=1.0, process=ProcessId(7, 1.0))

    assert (told.is_local, found.is_local) == (False, True)
    assert told == found


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (ProcessId(7, 1.0), ProcessId(7, 1.0), True),
        (ProcessId(7, 1.0), ProcessId(7, 2.0), False),
        (ProcessId(7, 1.0), ProcessId(8, 1.0), False),
        (ProcessId(7, None), ProcessId(7, 2.0), True),
        (ProcessId(7, 1.0), ProcessId(7, None), True),
    ],
)
def test_two_processes_are_the_same_unless_pid_or_start_time_tell_them_apart(
    one: ProcessId, other: ProcessId, is_same: bool
) -> None:
    assert one.is_same(other) is is_same
