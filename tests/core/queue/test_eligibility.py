"""May this GPU be granted to this request? Yes, or exactly why not: its readings, its model and size, and processes outside the pool."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.bounds import Thresholds
from gpu_worker_pool.core.model.gpu import GpuProcess, Reading
from gpu_worker_pool.core.queue.verdicts import Verdict, verdict
from tests.core.build import A100, START, T4, WALL_OFFSET_S, Box, key, process, reading, refusals

UNKNOWN_MEMORY = verdict("reading_unknown", what="memory")


@pytest.mark.parametrize(
    ("seen", "wishes", "expected"),
    [
        (reading(used_mb=8_000, utilization=5), {}, verdict("eligible", score=15.0)),
        (reading(used_mb=64_000), {}, verdict("over_memory", memory_percent=80.0, threshold_percent=80.0)),
        (
            reading(utilization=90),
            {},
            verdict("over_utilization", utilization_percent=90, threshold_percent=90.0),
        ),
        # A request may be stricter than the pool, and laxer.
        (
            reading(used_mb=24_000),
            {"memory_threshold_percent": 30},
            verdict("over_memory", memory_percent=30.0, threshold_percent=30),
        ),
        (
            reading(utilization=40),
            {"utilization_threshold_percent": 40},
            verdict("over_utilization", utilization_percent=40, threshold_percent=40),
        ),
        (
            reading(used_mb=72_000, utilization=95),
            {"memory_threshold_percent": 95, "utilization_threshold_percent": 99},
            verdict("eligible", score=185.0),
        ),
        # Unknown is not zero.
        (reading(used_mb=None), {}, UNKNOWN_MEMORY),
        (reading(total_mb=0), {}, UNKNOWN_MEMORY),
        (reading(utilization=None), {}, verdict("reading_unknown", what="utilization")),
        (reading(fault="fell off the bus"), {}, verdict("unhealthy", fault="fell off the bus")),
        # A device whose hardware knows no utilization is judged by memory alone.
        (reading(utilization=None, has_utilization=False), {}, verdict("eligible", score=0.0)),
        (
            reading(utilization=None, has_utilization=False, used_mb=80_000),
            {},
            verdict("over_memory", memory_percent=100.0, threshold_percent=80.0),
        ),
        # Statistics alone: a percentage will do for an exclusive lease, and is not enough to share by.
        (reading(total_mb=None, used_mb=None, processes=None, percent=12.5), {}, verdict("eligible", score=12.5)),
        (
            reading(total_mb=None, used_mb=None, processes=None, percent=85.0),
            {},
            verdict("over_memory", memory_percent=85.0, threshold_percent=80.0),
        ),
        (
            reading(total_mb=None, used_mb=None, processes=None, percent=12.5),
            {"memory_mb": 8_000},
            verdict("reading_unknown", what="memory size"),
        ),
    ],
)
def test_a_reading_is_judged(seen: Reading, wishes: dict[str, Any], expected: Verdict) -> None:
    assert Box(seen).verdict(**wishes) == expected


def test_a_pool_has_the_thresholds_its_operator_set() -> None:
    box = Box(reading(used_mb=24_000), thresholds=Thresholds(30.0, 90.0))

    assert box.verdict() == verdict("over_memory", memory_percent=30.0, threshold_percent=30.0)


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


def test_a_reading_is_good_for_as_long_as_the_pool_says() -> None:
    box = Box(reading(), stale_after_s=15.0)

    box.pass_time(15.0)
    assert box.verdict().is_eligible
    box.pass_time(0.5)
    assert box.verdict() == verdict("reading_stale", age_s=15.5)


def test_a_shared_gpu_that_was_not_read_since_the_start_is_unknown() -> None:
    box = Box(reading())
    box.ask("a", memory_mb=1_000)

    box.restart()

    assert box.verdict(memory_mb=1_000) == verdict("reading_unknown", what="state")


def test_a_leased_gpu_names_its_holder_and_since_when() -> None:
    box = Box(reading())
    box.ask("a", owner="ann", worker="w1")

    assert box.verdict() == verdict("leased", lease_ids=("a",), holders=("ann",), since_at=START + WALL_OFFSET_S)


CROWD = (process(7, 512), process(8, 9_420.8, parents=(7,)), process(9, None, parents=(7,)))


@pytest.mark.parametrize(
    ("processes", "pid", "memory_mb"),
    [(CROWD, 8, 9_420.8), ((process(7, None),), 7, None)],
    ids=["the largest process", "one whose memory is unknown"],
)
def test_a_gpu_that_drains_names_a_process_that_is_left(
    processes: tuple[GpuProcess, ...], pid: int, memory_mb: float | None
) -> None:
    box = Box(reading())
    box.ask("a", pid=7)
    box.observe_now(reading(used_mb=10_000, processes=processes))
    box.release("a")

    assert box.verdict() == verdict("draining", lease_id="a", pid=pid, memory_mb=memory_mb)
    box.observe_now(reading(processes=None))
    assert box.verdict() == verdict("draining", lease_id="a", pid=7, memory_mb=None)


def test_a_busy_shared_gpu_without_a_process_list_is_not_trusted() -> None:
    box = Box(reading())
    box.ask("a", memory_mb=8_000)
    box.observe_now(reading(used_mb=8_000, utilization=100, processes=None))

    assert box.verdict(memory_mb=8_000).code == "over_utilization"


@pytest.mark.parametrize(
    ("code", "facts", "words"),
    [
        ("eligible", {"score": 3.0}, "available"),
        ("excluded", {"reason": "new fan"}, "taken out of service: new fan"),
        ("wrong_model", {"name": T4, "wanted": "A100"}, "Tesla T4, not A100"),
        (
            "too_small",
            {"limit_mb": 64_000, "asked_mb": 70_000},
            "too small: 68.4 GB asked, 62.5 GB below the memory threshold when empty",
        ),
        ("leased", {"lease_ids": ("a", "b"), "holders": ("ann", "ben"), "since_at": 0.0}, "leased by ann, ben"),
        (
            "draining",
            {"lease_id": "a", "pid": None, "memory_mb": None},
            "just released; the next reading will tell whether it is free",
        ),
        (
            "draining",
            {"lease_id": "a", "pid": 123, "memory_mb": 9420.8},
            "draining: pid 123 still holds 9.2 GiB",
        ),
        ("draining", {"lease_id": "a", "pid": 123, "memory_mb": None}, "draining: pid 123 still holds memory"),
        ("unhealthy", {"fault": "fell off the bus"}, "unhealthy: fell off the bus"),
        ("reading_unknown", {"what": "memory"}, "its memory is unknown"),
        ("reading_stale", {"age_s": 16.4}, "its last reading is 16 s old"),
        ("over_memory", {"memory_percent": 85.04, "threshold_percent": 80.0}, "memory at 85.0 %, threshold 80 %"),
        (
            "over_utilization",
            {"utilization_percent": 97.0, "threshold_percent": 90.0},
            "utilization at 97 %, threshold 90 %",
        ),
        (
            "no_room",
            {"committed_mb": 60_000, "asked_mb": 8_000, "limit_mb": 64_000, "holders": ()},
            "less than 8000 MB left: 4000 MB of 62.5 GB",
        ),
        (
            "no_room",
            {"committed_mb": 70_000, "asked_mb": 8_000, "limit_mb": 64_000, "holders": ()},
            "less than 8000 MB left: 0 MB of 62.5 GB",
        ),
        (
            "held",
            {"for_lease_id": "a", "for_holder": "ann", "from_at": None},
            "reserved for ann, who is ahead in the queue",
        ),
        ("booked", {"owner": "ada", "reason": "a course", "within_s": 30.0}, "booked for ada (a course)"),
        (
            "booked",
            {"owner": None, "reason": "", "within_s": 5400.0},
            "to be taken out of service; a request with --time 90m or less could start now",
        ),
        (
            "first_right",
            {"group": "vision"},
            "kept for group vision, whose requests go first here; a preemptible one could start now",
        ),
    ],
)
def test_a_verdict_reads_as_a_sentence(code: str, facts: dict[str, Any], words: str) -> None:
    assert str(verdict(code, **facts)) == words


def test_a_gpu_of_a_box_that_is_not_heard_of_says_so() -> None:
    box = Box(reading(node="gpu-07"))

    box.do(cmd.TakeOver(1, "boot"))

    assert str(box.verdict(node="gpu-07")) == "its box, gpu-07, is not heard of, so its state is unknown"


# --- suitable ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [cmd.Configure("excluded", tuple(key(7)), "x"), cmd.Configure("excluded", tuple(key(7)))]
)
def test_a_gpu_that_was_never_seen_is_unknown_to_the_operators_commands(command: cmd.Command) -> None:
    why = "no GPU GPU-box-7 is known on node box"
    assert Box(reading()).do(command) == [ev.Refused(START, ev.RefusalCode.UNKNOWN_GPU, "GPU-box-7", why)]


def test_a_gpu_out_of_service_is_still_known_right_after_a_restart() -> None:
    box = Box(reading())
    box.exclude(key(), "new fan")
    box.restart()

    assert refusals(box.exclude(key(), "still no fan"), ev.RefusalCode.UNKNOWN_GPU) == []


# --- never ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"gpus": 3}, "3 GPUs on one node were asked for; this box has 2 GPUs"),
        ({"model": "H100"}, f"1 GPU of model H100 was asked for; this box has 1 {A100}, 1 {T4}"),
        ({"gpus": 2, "model": "T4"}, "2 GPUs on one node of model T4 were asked for; this box has 1 such GPU"),
        ({"among": (7,)}, "1 GPU among 7 was asked for; this box has the GPUs 0, 1"),
        (
            {"memory_mb": 12 * 1024.0**2},
            (
                "1 GPU with 12288 GB was asked for; the largest GPU here has 78.1 GB, of which 62.5 GB can be granted "
                "(memory threshold 80 %)"
            ),
        ),
        (
            {"memory_mb": 20_480, "model": "T4"},
            (
                "1 GPU with 20 GB of model T4 was asked for; the largest such GPU here has 15.6 GB, of which 12.5 GB can "
                "be granted (memory threshold 80 %)"
            ),
        ),
    ],
)
def test_a_refusal_says_what_was_wished_for_and_what_there_is(wishes: dict[str, Any], words: str) -> None:
    box = Box(reading(0), reading(1, name=T4, total_mb=16_000))

    (event,) = box.ask("a", **wishes)

    assert isinstance(event, ev.Refused)
    assert event.why == words


def test_a_pool_of_several_nodes_says_what_its_best_node_has() -> None:
    box = Box(reading(0), reading(1), reading(0, node="other"))

    (event,) = box.ask("a", gpus=3)

    assert isinstance(event, ev.Refused)
    assert event.why == "3 GPUs on one node were asked for; no node has more than 2 GPUs"


def test_a_pool_seen_to_have_no_gpu_refuses_everybody() -> None:
    box = Box()
    box.do(cmd.AnnounceNode("box", "boot1", ()))

    (event,) = box.ask("a")

    assert isinstance(event, ev.Refused)
    assert event.why == "this pool has no GPU"


def test_before_the_first_look_nobody_is_refused() -> None:
    box = Box()

    box.ask("a", gpus=1000)

    assert box.stage("a") == "queued"


def test_a_gpu_of_unknown_size_might_serve_any_share() -> None:
    box = Box(reading(total_mb=None, used_mb=None, percent=5))

    box.ask("a", memory_mb=1e6)

    assert box.stage("a") == "queued"


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
