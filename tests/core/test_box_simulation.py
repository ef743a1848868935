"""A day on a box with eight GPUs. The simulation itself asserts at every grant that nobody else is on the GPU."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndReason
from tests.core.box_simulation import Box, digest, restored, simulate

HOUR_S = 3600.0


@pytest.fixture(scope="module")
def box() -> Box:
    """A whole day, to be looked at only."""
    return simulate(seed=1)


def test_a_day_ends_with_everybody_served_or_gone_and_every_gpu_free(box: Box) -> None:
    assert box.state.leases == {}
    assert len(box.state.queue) == 0
    ends = {reason: box.counts[reason] for reason in EndReason}
    assert sum(ends.values()) + box.counts["refused"] == len(box.workers)
    # A day in which nothing went wrong would show nothing.
    assert min(ends[reason] for reason in EndReason if reason is not EndReason.REVOKED) > 2, ends
    assert min(box.counts["warnings"], box.counts["bookings"]) > 10
    assert box.counts["granted"] > 400
    assert box.counts["strangers"] > 10


def test_a_day_can_be_restored_from_its_journal(box: Box) -> None:
    state = restored(box)

    assert state.ended == box.state.ended
    assert state.fences == box.state.fences
    assert (state.usage, state.last_durations_s) == (box.state.usage, box.state.last_durations_s)
    assert (state.quotas, state.bookings) == (box.state.quotas, box.state.bookings)


def test_fences_grow_all_day(box: Box) -> None:
    fences = [event.fence for event in box.log if isinstance(event, ev.LeaseGranted)]

    assert fences == sorted(set(fences))


def test_the_same_seed_gives_the_same_day_and_another_seed_another() -> None:
    days = [digest(simulate(seed, HOUR_S)) for seed in (5, 5, 6)]

    assert days[0] == days[1]
    assert days[0] != days[2]
