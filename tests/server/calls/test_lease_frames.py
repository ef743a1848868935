"""Leases in lists are encoded once a change, and look as if each were encoded again for every answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.queue.explain import Explainer
from gpu_worker_pool.core.queue.start_times import expected_starts
from gpu_worker_pool.server.calls.lease_frames import LeaseFrames
from gpu_worker_pool.server.calls.lease_view import lease_view, moving_of_queued, queued_view
from gpu_worker_pool.server.http.loop_share import LoopShare
from gpu_worker_pool.server.http.response import encode
from gpu_worker_pool.server.streams.events import EventStream
from gpu_worker_pool.server.streams.listener import Listener
from tests.core.build import Box, process, reading, request
from tests.server.box_pool import pool_of

# Labels that look like what the frames are cut at.
TRICKY = (("expires_in_s", "null"), ("idle_s", '"idle_s":null'), ("reason", "null"), ("position", "null"))


async def listed(frames: LeaseFrames) -> dict[str, bytes]:
    return {lease.id: view async for lease, view in frames.encode(frames.pool.state.leases, LoopShare())}


def plainly(box: Box) -> dict[str, bytes]:
    """All leases, each encoded as a whole."""
    state, now = box.state, box.now
    starts, explainer = expected_starts(state, now), Explainer(state, now)
    return {
        id_: encode(
            queued_view(lease, **moving_of_queued(state, lease, now, explainer, starts))
            if isinstance(lease, QueuedLease)
            else lease_view(state, lease, now)
        )
        for id_, lease in state.leases.items()
    }


async def test_what_is_kept_of_a_lease_shows_in_no_answer() -> None:
    box = Box(reading(0), reading(1), idle_after_s=30.0)
    frames = LeaseFrames(pool_of(box))
    asked = replace(request(worker="w", ttl_s=90.0, time_limit_s=100.0), labels=TRICKY)
    steps: list[Callable[[], object]] = [
        lambda: box.do(cmd.RequestLease("limited", asked)),
        lambda: box.ask("watched", pid=7),
        lambda: box.do(cmd.RequestLease("waiter", replace(asked, time_limit_s=None))),
        lambda: box.pass_time(20.0),
        lambda: box.renew("limited", "waiter"),
        lambda: box.pass_time(25.0),  # warned of its time limit
        lambda: box.observe_now(reading(0, name="renamed"), reading(1, processes=(process(7, 100.0),))),
        lambda: box.release("watched"),
        lambda: box.observe_now(reading(0), reading(1)),
    ]
    for step in steps:
        step()
        assert await listed(frames) == plainly(box)
    assert {"limited", "waiter"} <= box.state.leases.keys()


@pytest.mark.parametrize("leases", [5, 60])
@pytest.mark.parametrize("listeners", [1, 20])
async def test_a_change_of_one_lease_is_encoded_once_however_many_leases_and_streams_there_are(
    leases: int, listeners: int
) -> None:
    box = Box(*(reading(index) for index in range(leases // 2)), awaits_reading_after_release=False)
    pool = pool_of(box)
    frames, events = LeaseFrames(pool), EventStream(pool)
    for number in range(leases):
        box.ask(f"lease-{number}", ttl_s=60.0 + number)
    streams = [events.messages(Listener()) for _ in range(listeners)]
    for stream in streams:
        await anext(stream)
    await listed(frames)
    assert repr(frames) == f"<LeaseFrames: {leases} kept, {leases} made>"

    pool.tell(box.release("lease-0"))  # the first waiter gets its GPU
    told = [await anext(stream) for stream in streams]
    for _ in range(5):
        await listed(frames)
    assert repr(frames) == f"<LeaseFrames: {leases - 1} kept, {leases + 1} made>"
    assert repr(events) == f"<EventStream: {listeners} listeners, 3 events>", "ended, granted, queue"
    assert set(told) == {told[0]}

    box.pass_time(20.0)
    box.renew(*box.state.leases)
    box.observe_now(*(reading(index, used_mb=5.0) for index in range(leases // 2)))
    await listed(frames)
    assert repr(frames) == f"<LeaseFrames: {leases - 1} kept, {leases + 1} made>", "none changed, though time went on"
    for stream in streams:
        await stream.aclose()


async def test_leases_that_ended_leave_nothing_behind() -> None:
    box = Box(reading(0), reading(1))
    pool = pool_of(box)
    frames = LeaseFrames(pool)
    for number in range(6):
        pool.tell(box.ask(f"lease-{number}"))
    await listed(frames)
    for number in reversed(range(6)):  # waiters that leave the queue, and leases whose GPUs drain
        pool.tell(box.release(f"lease-{number}"))
        await listed(frames)
        assert repr(frames) == f"<LeaseFrames: {number} kept, 6 made>"


async def test_another_state_starts_over() -> None:
    """A candidate that follows another history is told no ends of the leases that it had."""
    box = Box(reading(0), reading(1))
    frames = LeaseFrames(pool_of(box))
    box.ask("here")
    box.ask("there")
    await listed(frames)
    box.release("here")
    box.restart()
    assert await listed(frames) == plainly(box)
    assert repr(frames).startswith("<LeaseFrames: 1 kept")
