"""Only these GPUs: how they are named, who is given which, who waits, and who is not kept from the others."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.queue.verdicts import verdict
from tests.core.build import A100, START, T4, Box, key, process, reading, refusals
from tests.core.queue.boxes import free_at_once


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


def test_every_node_has_names_of_its_own() -> None:
    box = Box(*(reading(index, node=node) for node in ("a", "b") for index in (0, 1)))
    for lease_id in "123":
        box.ask(lease_id, among=("1",))

    assert {*box.gpus_of("1"), *box.gpus_of("2")} == {key(1, "a"), key(1, "b")}
    assert box.stage("3") == "queued"


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


def test_only_those_are_granted_and_one_waits_for_those_only() -> None:
    box = four()
    for lease_id in "abc":
        box.ask(lease_id, among=("1", "3"))

    assert {*box.gpus_of("a"), *box.gpus_of("b")} == {key(1), key(3)}
    assert box.stage("c") == "queued"
    assert str(box.explain("c")) == (
        "Position 1 of 1, waiting for 1 GPU among 1, 3: 2 leased by a, b; 2 not among the GPUs asked for: 1, 3"
    )
    freed = box.gpus_of("b")
    box.release("b")
    assert box.gpus_of("c") == freed


def test_who_waits_for_some_keeps_nobody_from_the_others() -> None:
    box = four()
    box.ask("holder", among=("1",))
    box.ask("picky", among=("1",))
    box.ask("later")
    box.ask("wide", gpus=2)

    assert box.stage("picky") == "queued"
    assert box.gpus_of("later") == (key(0),)
    assert box.gpus_of("wide") == (key(2), key(3))


def test_only_gpus_that_were_asked_for_are_reserved() -> None:
    box = four(reserve_after_s=0.0)
    box.ask("holder", among=("1",), time_limit_s=3600.0)
    box.ask("pair", gpus=2, among=("0", "1"))

    assert box.state.reservation is not None
    assert box.state.reservation.gpus == (key(0), key(1))
    box.ask("later")
    assert box.gpus_of("later") == (key(2),)
    box.ask("zero", among=("0",))
    assert box.stage("zero") == "queued"
    box.release("holder")
    assert box.gpus_of("pair") == (key(0), key(1))


def test_no_share_is_kept_from_gpus_that_the_reservation_is_not_of() -> None:
    box = free_at_once(reading(0), reading(1), reserve_after_s=0.0)
    box.ask("small", memory_mb=1_000, among=("0",))
    box.ask("large", memory_mb=60_000, among=("1",), time_limit_s=3600.0)
    box.ask("alone", among=("1",))

    assert box.state.reservation is not None
    assert box.state.reservation.gpus == (key(1),)
    box.ask("more", memory_mb=1_000)
    assert box.gpus_of("more") == (key(0),)


def test_what_ones_own_process_has_left_is_had_again_only_if_it_was_asked_for() -> None:
    box = Box(reading(0), reading(1))
    box.ask("mine", pid=7, among=("0",))
    box.ask("other", among=("1",))
    left = reading(0, used_mb=9_000, processes=(process(7, 9_000),))
    box.observe_now(left, reading(1))
    box.release("mine")
    box.now += 1
    box.observe_now(left, reading(1))

    box.ask("elsewhere", pid=7, among=("1",))
    assert (box.stage("mine"), box.stage("elsewhere")) == ("draining", "queued")
    box.ask("again", pid=7, among=("GPU-box-0",))
    assert box.gpus_of("again") == (key(0),)


@pytest.mark.parametrize(
    ("wishes", "is_refused"),
    [
        ({"among": ("2",)}, True),
        ({"among": ("GPU-box",)}, True),
        ({"among": ("0", "2"), "gpus": 2}, True),
        ({"among": ("1",), "model": "A100"}, True),
        ({"among": ("1",), "memory_mb": 20_000}, True),
        ({"among": ("1",), "model": "T4"}, False),
        ({"among": ("0", "1"), "gpus": 2}, False),
        ({"among": ("0", "7")}, False),
    ],
    ids=str,
)
def test_what_no_gpu_could_ever_satisfy_is_refused_at_once(wishes: dict[str, Any], is_refused: bool) -> None:
    box = Box(reading(0), reading(1, name=T4, total_mb=16_000))
    box.ask("holder", gpus=2)

    refused = refusals(box.ask("a", **wishes), ev.RefusalCode.UNSERVABLE)

    assert bool(refused) == is_refused
    assert box.stage("a") == ("unknown" if is_refused else "queued")


def test_an_index_follows_the_gpu_that_has_it() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("holder", among=("0",))
    box.ask("waiter", among=("0",))

    box.observe_now(named("GPU-box-0", 1), named("GPU-box-1", 0))

    assert box.gpus_of("waiter") == (key(1),)


def test_before_anybody_has_looked_it_waits_and_after_a_restart_it_is_as_before() -> None:
    box = Box()
    box.ask("a", among=("1",))
    assert box.stage("a") == "queued"
    box.restart()
    box.observe_now(reading(0), reading(1))

    assert box.gpus_of("a") == (key(1),)
