"""What a reservation promises, over random loads."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.queue.order import Order
from gpu_worker_pool.core.queue.placement import Survey
from tests.core.build import Box, reading
from tests.core.queue.boxes import free_at_once

HOUR_S = 3600.0


class Job(NamedTuple):
    """`part` of its time limit is what it really takes."""

    gap_s: float
    gpus: int
    limit_s: float
    part: float
    priority: int


def jobs(*priorities: int) -> st.SearchStrategy[list[Job]]:
    return st.lists(
        st.builds(
            Job,
            st.sampled_from([0.0, 1.0, 50.0, 400.0]),
            st.sampled_from([1, 1, 2, 3]),
            st.sampled_from([60.0, 300.0, 1000.0, 5000.0]),
            st.sampled_from([0.1, 0.5, 1.0, 1.0]),
            st.sampled_from(priorities),
        ),
        min_size=4,
        max_size=25,
    )


def box_of(*nodes: int, **options: float) -> Box:
    readings = [reading(index, node=f"node{node}") for node, gpus in enumerate(nodes) for index in range(gpus)]
    return free_at_once(*readings, stale_after_s=1e9, **options)


class Play:
    """Jobs come, run and leave on a box; those that take less than they declared are released by their holders."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.leaves: dict[str, float] = {}
        self.jobs: dict[str, Job] = {}
        self._seen = 0

    def come(self, lease_id: str, job: Job, *, declares: bool = True) -> None:
        self.jobs[lease_id] = job
        limit_s = job.limit_s if declares else None
        self.box.ask(lease_id, gpus=job.gpus, priority=job.priority, time_limit_s=limit_s)
        self._note_grants()

    def run_to(self, at: float) -> None:
        while self.leaves and min(self.leaves.values()) <= at:
            lease_id = min(self.leaves, key=lambda each: (self.leaves[each], each))
            self.box.run_to(self.leaves.pop(lease_id))
            self.box.release(lease_id)
            self._note_grants()
        self.box.run_to(at)
        self._note_grants()

    def _note_grants(self) -> None:
        for event in self.box.log[self._seen :]:
            if isinstance(event, ev.LeaseGranted):
                job = self.jobs[event.lease_id]
                self.leaves[event.lease_id] = event.at + job.part * job.limit_s
        self._seen = len(self.box.log)


@settings(max_examples=60, deadline=None)
@given(jobs(0), st.sampled_from([(3,), (4,), (3, 3)]))
def test_the_head_of_the_line_starts_no_later_than_it_was_first_told(load: list[Job], nodes: tuple[int, ...]) -> None:
    play = Play(box_of(*nodes, reserve_after_s=0.0))
    for number, job in enumerate(load):
        play.come(f"job{number}", job)
        play.run_to(play.box.now + job.gap_s)
    play.run_to(play.box.now + 100 * HOUR_S)

    told: dict[str, float] = {}
    for event in play.box.log:
        if isinstance(event, ev.QueueSettled) and event.reservation is not None:
            told.setdefault(event.reservation.lease_id, event.reservation.date)
        elif isinstance(event, ev.LeaseGranted):
            assert event.at <= told.get(event.lease_id, event.at)
    assert not len(play.box.state.queue)


@settings(max_examples=60, deadline=None)
@given(jobs(0, 0, 1), st.sampled_from([(3,), (3, 3)]))
def test_a_reservation_makes_no_earlier_waiter_wait(load: list[Job], nodes: tuple[int, ...]) -> None:
    play = Play(box_of(*nodes, reserve_after_s=0.0))
    for number, job in enumerate(load):
        play.come(f"job{number}", job)
        state = play.box.state
        if state.reservation is not None:
            line = Order(state, play.box.now).lease_ids()
            for lease_id in line[: line.index(state.reservation.lease_id)]:
                assert Survey(state, play.box.now).place(state.queued(lease_id).request.wishes) is None
        play.run_to(play.box.now + job.gap_s)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([300.0, 900.0, 1800.0]), st.booleans()), min_size=4, max_size=12),
    st.sampled_from([0.0, 600.0]),
)
def test_no_wide_request_starves_in_an_endless_stream_of_narrow_ones(
    stream: list[tuple[float, bool]], reserve_after_s: float
) -> None:
    """More narrow requests wait than there are GPUs, at all times. Some declare a limit, some do not."""
    play = Play(box_of(4, reserve_after_s=reserve_after_s))
    number = 0

    def keep_coming() -> None:
        nonlocal number
        while len(play.box.state.queue) < 6:
            lasts_s, declares = stream[number % len(stream)]
            play.come(f"narrow{number}", Job(0.0, 1, lasts_s, 1.0 if declares else 0.97, 0), declares=declares)
            number += 1

    keep_coming()
    play.come("wide", Job(0.0, 4, HOUR_S, 1.0, 0))
    asked_at = play.box.now
    while play.box.stage("wide") == "queued":
        keep_coming()
        play.run_to(min(play.leaves.values()))
        assert play.box.now < asked_at + 8 * HOUR_S, "it starves"
