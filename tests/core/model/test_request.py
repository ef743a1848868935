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

BAD_WISHES = [
    ("gpus", 0, "a whole number from 1 to 1024"),
    ("gpus", -1, "a whole number from 1 to 1024"),
    ("gpus", 1025, "a whole number from 1 to 1024"),
    ("gpus", 1.0, "a whole number from 1 to 1024"),
    ("gpus", True, "a whole number from 1 to 1024"),
    ("gpus", "2", "a whole number from 1 to 1024"),
    ("gpus", None, "a whole number from 1 to 1024"),
    ("gpus", 10**400, "a whole number from 1 to 1024"),
    ("memory_mb", 0, "a number from 1 to 1000000000"),
    ("memory_mb", -5, "a number from 1 to 1000000000"),
    ("memory_mb", NAN, "a number from 1 to 1000000000"),
    ("memory_mb", INF, "a number from 1 to 1000000000"),
    ("memory_mb", -INF, "a number from 1 to 1000000000"),
    ("memory_mb", True, "a number from 1 to 1000000000"),
    ("memory_mb", "8000", "a number from 1 to 1000000000"),
    ("memory_mb", 1e10, "a number from 1 to 1000000000"),
    ("memory_threshold_percent", -0.1, "a number from 0 to 100"),
    ("memory_threshold_percent", 100.1, "a number from 0 to 100"),
    ("memory_threshold_percent", NAN, "a number from 0 to 100"),
    ("utilization_threshold_percent", 101, "a number from 0 to 100"),
    ("utilization_threshold_percent", INF, "a number from 0 to 100"),
    ("utilization_threshold_percent", False, "a number from 0 to 100"),
]
BAD_REQUESTS = [
    ("ttl_s", 0, "a number from 0.1 to 604800"),
    ("ttl_s", -5, "a number from 0.1 to 604800"),
    ("ttl_s", NAN, "a number from 0.1 to 604800"),
    ("ttl_s", INF, "a number from 0.1 to 604800"),
    ("ttl_s", 604_801, "a number from 0.1 to 604800"),
    ("ttl_s", True, "a number from 0.1 to 604800"),
    ("ttl_s", None, "a number from 0.1 to 604800"),
    ("priority", 1_000_001, "a whole number from -1000000 to 1000000"),
    ("priority", -1_000_001, "a whole number from -1000000 to 1000000"),
    ("priority", 0.5, "a whole number from -1000000 to 1000000"),
    ("priority", True, "a whole number from -1000000 to 1000000"),
]
BAD_SETTINGS = [
    ("stale_after_s", NAN, "a number from 0 to 1000000000"),
    ("drain_limit_s", -1, "a number from 0 to 1000000000"),
    ("remembered_ended_leases", -1, "a whole number from 0 to 10000000"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_WISHES)
def test_a_wish_out_of_range_is_told_its_name_value_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=r"^\w+ is ") as caught:
        Wishes(**{name: value})

    assert str(caught.value) == f"{name} is {value!r}; it must be {allowed}"


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_REQUESTS)
def test_a_request_out_of_range_is_told_its_name_value_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=r"^\w+ is ") as caught:
        Request(**{name: value})

    assert str(caught.value) == f"{name} is {value!r}; it must be {allowed}"


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_SETTINGS)
def test_a_setting_out_of_range_is_told_its_name_value_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=r"^\w+ is ") as caught:
        PoolSettings(**{name: value})

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


@pytest.mark.parametrize("name", ["memory_mb", "memory_threshold_percent"])
def test_a_whole_number_too_large_for_a_float_is_out_of_range_like_any_other(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is 1000.*it must be a number from"):
        Wishes(**{name: 10**400})  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["", "  ", "\t"])
def test_an_empty_model_is_refused_with_what_to_do(model: str) -> None:
    with pytest.raises(ValueError, match="model is empty; leave it out to take any model"):
        Wishes(model=model)


@pytest.mark.parametrize(
    "wishes",
    [
        {"gpus": 1024},
        {"memory_mb": 1},
        {"memory_mb": 1e9},
        {"memory_threshold_percent": 0},
        {"memory_threshold_percent": 100},
        {"utilization_threshold_percent": 0.0},
        {"utilization_threshold_percent": 100.0},
    ],
)
def test_the_ends_of_a_range_belong_to_it(wishes: dict[str, Any]) -> None:
    assert Wishes(**wishes) == Wishes(**wishes)


def test_a_request_without_any_wish_is_for_one_gpu_alone() -> None:
    request = Request()

    assert (request.wishes.gpus, request.wishes.is_shared, request.ttl_s) == (1, False, 60.0)


# --- thresholds ----------------------------------------------------------------------------------------------------


def test_a_request_without_thresholds_has_the_pools() -> None:
    assert PoolSettings().thresholds_for(Wishes()) == Thresholds(80.0, 90.0)


def test_one_threshold_of_its_own_leaves_the_other_to_the_pool() -> None:
    settings = PoolSettings()

    assert settings.thresholds_for(Wishes(memory_threshold_percent=50)) == Thresholds(50, 90.0)
    assert settings.thresholds_for(Wishes(utilization_threshold_percent=20)) == Thresholds(80.0, 20)


def test_a_threshold_of_zero_is_not_taken_for_none() -> None:
    assert PoolSettings().thresholds_for(Wishes(memory_threshold_percent=0)) == Thresholds(0, 90.0)


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("A10", "NVIDIA A10"),
        ("A100", "NVIDIA A100-SXM4-80GB"),
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("A100", "nvidia a100"),
        (" A100 ", "NVIDIA A100"),
        ("A100-SXM4", "NVIDIA A100-SXM4-80GB"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("*A100*", "NVIDIA A100-SXM4-80GB"),
        ("*a100*80gb", "NVIDIA A100-SXM4-80GB"),
        ("Tesla ?4", "Tesla T4"),
        ("Tesla [TP]4", "Tesla P4"),
        ("tesla [!P]4", "Tesla T4"),
        (None, "anything"),
    ],
)
def test_a_pattern_fits_a_name(pattern: str | None, name: str) -> None:
    assert matches_model(pattern, name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("A10", "NVIDIA A100-SXM4-80GB"),
        ("A10", "NVIDIA A10G"),
        ("100", "NVIDIA A100"),
        ("T4", "NVIDIA T400"),
        ("A100", "Tesla T4"),
        ("A100*", "NVIDIA A100-SXM4-80GB"),
        ("*A100", "NVIDIA A100-SXM4-80GB"),
        ("A.00", "NVIDIA A100"),
        ("Tesla [TP]4", "Tesla V4"),
    ],
)
def test_a_pattern_does_not_fit_a_name(pattern: str, name: str) -> None:
    assert not matches_model(pattern, name)


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


def test_a_pid_from_another_machine_is_no_process_here() -> None:
    assert not Holder(pid=7, pid_started=1.0).is_local


def test_a_holder_whose_process_was_found_on_this_node_is_local() -> None:
    assert Holder(pid=7, process=ProcessId(7, 1.0)).is_local


def test_what_was_found_out_about_the_asker_is_no_part_of_what_he_asked() -> None:
    assert Holder(pid=7) == Holder(pid=7, process=ProcessId(7, 1.0))


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
