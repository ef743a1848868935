"""A GPU of another model, too small, or out of service: it is not granted, and what no GPU could ever serve is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from tests.core.build import A100, START, T4, Box, key, reading, refusals

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
