"""Only these GPUs: how they are named, who is given which, who waits, and who is not kept from the others."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.queue.verdicts import verdict
from tests.core.build import A100, START, T4, Box, free_at_once, key, reading, refusals


def four(**settings: float) -> Box:
    return free_at_once(*map(reading, range(4)), **settings)


def named(uuid: str, index: int) -> Reading:
    return Reading(Gpu(GpuKey("box", uuid), index, A100), START, 80_000, 0, 0, processes=())


# --- the wish ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (["0"], ("0",)),
        ((2, "10", "1"), ("1", "2", "10")),
        (["007", 7, "7", "00"], ("0", "7")),
        (["GPU-8f", "3", "gpu-8F", "MIG-GPU-1/2/0"], ("3", "GPU-8f", "MIG-GPU-1/2/0")),
        ([str(number) for number in range(128)], tuple(str(number) for number in range(128))),
        (["GPU-" + "a" * 60], ("GPU-" + "a" * 60,)),
    ],
)
def test_the_same_gpus_are_the_same_wish(given: Any, taken: tuple[str, ...]) -> None:
    wishes = Wishes(among=given)

    assert wishes.among == taken
    assert wishes == Wishes(among=taken)
    assert hash(wishes) == hash(Wishes(among=tuple(reversed(taken))))
    assert wishes != Wishes()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([], "among is empty; leave it out to take any GPU"),
        (range(129), "among has more than 128 GPUs; it must be 1 to 128"),
        ("0,1", "among is '0,1'; it must be a list"),
        (5, "among is 5; it must be a list"),
        (["-1"], "among has '-1'; each must be a GPU's index, its UUID"),
        ([-1], "among has -1; each"),
        ([True], "among has True; each"),
        ([None], "among has None; each"),
        ([1.0], r"among has 1\.0; each"),
        (["GPU-"], "among has 'GPU-'; each"),
        (["0 "], "among has '0 '; each"),
        (["٣"], r"among has '\\u0663'; each"),
        (["box:0"], "among has 'box:0'; each"),
        (["1" * 65], "at most 64 characters"),
        ([10**5000], "among has a value of type int; each"),
        ([["0"]], "among has a value of type list; each"),
    ],
)
def test_a_name_that_is_none_is_told_what_is_possible(given: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Wishes(among=given)


def test_the_wish_reads_as_people_say_it() -> None:
    assert str(Wishes(2, model="A100", among=("0", "2"))) == "2 GPUs on one node of model A100 among 0, 2"
    many = Wishes(among=tuple(map(str, range(12))))
    assert str(many) == "1 GPU among 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("among", "fitting"),
    [
        (("1",), {1}),
        (("0", "2"), {0, 2}),
        (("9",), set()),
        (("GPU-a1b2",), {0}),
        (("gpu-A1B2",), {0}),
        (("GPU-a1",), {0}),
        (("GPU-b",), set()),  # it could be either of two
        (("GPU-b1",), {1}),  # all of a name, and the beginning of another
        (("GPU-b10", "2"), {2}),
        (("MIG-0f",), {3}),
    ],
)
def test_a_gpu_goes_by_its_index_its_uuid_and_how_no_other_begins(among: tuple[str, ...], fitting: set[int]) -> None:
    uuids = ("GPU-a1b2", "GPU-b1", "GPU-b10", "MIG-0f3e")
    box = Box(*(named(uuid, index) for index, uuid in enumerate(uuids)))
    for lease_id in uuids:
        box.ask(lease_id, among=among)

    assert {uuids.index(gpu.uuid) for lease_id in uuids for gpu in box.gpus_of(lease_id)} == fitting


def test_the_verdict_names_the_gpus_asked_for() -> None:
    box = four()
    box.exclude(key(1), "new fan")
    box.exclude(key(2), "new fan")

    assert box.verdict(3, among=("0", "2")) == verdict("not_among", wanted="0, 2")
    assert box.verdict(0, among=("0", "2")).is_eligible
    assert box.verdict(1, among=("0", "2")) == verdict("not_among", wanted="0, 2")
    assert box.verdict(2, among=("0", "2")) == verdict("excluded", reason="new fan")
    assert str(verdict("not_among", wanted="0, 2")) == "not among the GPUs asked for: 0, 2"


# --- who is given which --------------------------------------------------------------------------------------------


# --- wishes beside the names ---------------------------------------------------------------------------------------


def test_a_gpu_that_is_left_out_is_not_granted_and_says_so() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a", exclude=("0",))
    box.ask("b", exclude=("0",))
    assert box.gpus_of("a") == (key(1),)
    assert str(box.verdict(0, exclude=("0",))) == "not among the GPUs asked for: all but 0"
    assert "1 not asked for" in str(box.explain("b"))


def test_all_that_begin_like_a_gpu_that_is_left_out_are_left_out() -> None:
    """To name one of several is unsure: then none of them is granted."""
    refused = refusals(Box(reading(0), reading(1)).ask("a", exclude=("GPU-box",)), ev.RefusalCode.UNSERVABLE)
    assert refused[0].why == "1 GPU among all but GPU-box was asked for; this box has the GPUs 0, 1"


def test_one_of_several_models_will_do() -> None:
    box = Box(reading(0, name=T4), reading(1, name="NVIDIA L40S"), reading(2))
    box.ask("a", model="H100, A100")
    assert box.gpus_of("a") == (key(2),)
    refused = refusals(box.ask("b", model="H100,H200"), ev.RefusalCode.UNSERVABLE)
    assert refused[0].why.startswith("1 GPU of model H100 or H200 was asked for; this box has 1 Tesla T4")


@pytest.mark.parametrize(("sold_mb", "seen_mb"), [(24_576, 23_034), (16_384, 15_360), (81_920, 81_559)])
def test_a_gpu_has_what_it_is_sold_with(sold_mb: float, seen_mb: float) -> None:
    box = Box(reading(0, total_mb=11_264.0), reading(1, total_mb=seen_mb))
    box.ask("a", min_memory_mb=sold_mb)
    assert box.gpus_of("a") == (key(1),)


def test_what_is_smaller_than_it_must_be_says_so() -> None:
    box = Box(reading(0, total_mb=16_384.0), reading(1, total_mb=None))
    assert str(box.verdict(0, min_memory_mb=40_960.0)) == "too small: 40 GB or more asked, and it has 16 GB"
    assert str(box.verdict(1, min_memory_mb=40_960.0)) == "its memory size is unknown"
    refused = refusals(Box(reading()).ask("a", min_memory_mb=92_160.0), ev.RefusalCode.UNSERVABLE)
    assert refused[0].why == "1 GPU of 90 GB or more was asked for; the largest GPU here has 78.1 GB"
