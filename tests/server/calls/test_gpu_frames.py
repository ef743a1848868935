"""GPUs in lists: only those that changed are encoded, and all look as if they were encoded again for every answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.server.calls.gpu_frames import GpuFrames
from gpu_worker_pool.server.calls.gpu_view import gpu_view
from gpu_worker_pool.server.http.response import encode
from tests.core.build import START, WALL_OFFSET_S, Box, key, process, reading
from tests.server.box_pool import pool_of


def listed(frames: GpuFrames, box: Box) -> list[bytes]:
    return [frames.encode(slot) for slot in box.state.slots.values()]


def plainly(box: Box) -> list[bytes]:
    pool = pool_of(box)
    return [encode(gpu_view(pool, slot)) for slot in box.state.slots.values()]


def test_what_is_kept_of_a_gpu_shows_in_no_answer() -> None:
    box = Box(reading(0), reading(1), stale_after_s=60.0)
    frames = GpuFrames(pool_of(box))
    booking = Booking("night", (key(1),), START + WALL_OFFSET_S + 40.0, None, None, "repair")
    trainer = process(7, 100.0, name="train")
    steps: list[Callable[[], object]] = [
        lambda: box.ask("shared", memory_mb=100.0, pid=7),
        lambda: box.ask("too", memory_mb=200.0, worker="w"),
        lambda: box.observe_now(reading(0, used_mb=100.0, processes=(trainer,))),
        lambda: box.ignore("train"),
        lambda: box.do(cmd.Configure("excluded", key(1), "dust")),
        lambda: box.do(cmd.Configure("excluded", key(1))),
        lambda: box.do(cmd.BookGpus(booking, Wishes())),
        lambda: box.release("shared"),
        lambda: box.observe_now(reading(0), reading(1)),
        lambda: box.pass_time(45.0),  # the booking has begun
        lambda: box.pass_time(45.0),  # the readings are stale
        box.restart,
    ]
    for step in steps:
        step()
        assert listed(frames, box) == plainly(box)


@pytest.mark.parametrize("gpus", [4, 60])
def test_only_gpus_that_changed_are_encoded_however_many_there_are(gpus: int) -> None:
    box = Box(*(reading(index) for index in range(gpus)))
    frames = GpuFrames(pool_of(box))
    for _ in range(3):
        listed(frames, box)
        assert repr(frames) == f"<GpuFrames: {gpus} kept, {gpus} made>"
    box.ask("lease")
    listed(frames, box)
    assert repr(frames) == f"<GpuFrames: {gpus} kept, {gpus + 1} made>", "the one that it got"
    box.observe_now(reading(1, used_mb=5.0))
    listed(frames, box)
    assert repr(frames) == f"<GpuFrames: {gpus} kept, {gpus + 2} made>", "the one that was read"


def test_a_gpu_that_is_gone_leaves_nothing_behind() -> None:
    box = Box(reading(0, node="a"), reading(0, node="b"))
    frames = GpuFrames(pool_of(box))
    listed(frames, box)
    box.do(cmd.SilenceNode("b"))
    box.do(cmd.ForgetNode("b"))
    assert list(box.state.slots) == [key(0, "a")]
    box.observe_now(reading(0, node="a", used_mb=5.0))
    listed(frames, box)
    assert repr(frames).startswith("<GpuFrames: 1 kept")
