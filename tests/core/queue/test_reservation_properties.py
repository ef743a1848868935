"""What a reservation promises, over random loads."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.request import Wishes
from tests.core.build import START, WALL_OFFSET_S, Box, key, reading

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
            st.sampled_from([0.0, 1.0, 15.0, 50.0, 400.0]),
            st.sampled_from([1, 1, 2, 3]),
            st.sampled_from([20.0, 60.0, 300.0, 1000.0, 5000.0]),
            st.sampled_from([0.1, 0.5, 1.0, 1.0]),
            st.sampled_from(priorities),
        ),
        min_size=6,
        max_size=30,
    )


class Terms(NamedTuple):
    """How a box is run. A look at the GPUs comes so long after a lease ends, and after each of these restarts. The GPUs
    are booked, and out of service, in some spans of time.
    """

    lag_s: float = 0.0
    restarts_after: tuple[int, ...] = ()
    booked: tuple[tuple[int, float, float], ...] = ()


terms = st.builds(
    Terms,
    st.sampled_from([0.0, 0.5, 5.0]),
    st.lists(st.integers(0, 29), max_size=3).map(tuple),
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([0.0, 200.0, 3000.0]), st.sampled_from([100.0, 2000.0])),
        max_size=2,
    ).map(tuple),
)


def readings_of(*nodes: int) -> list[Reading]:
    return [reading(index, node=f"node{node}") for node, gpus in enumerate(nodes) for index in range(gpus)]


def box_of(*nodes: int, **options: float) -> Box:
    return Box(*readings_of(*nodes), stale_after_s=1e9, **options)


class Play:
    """Jobs come, run and leave on a box. Those that take less than they declared are released by their holders. The
    others end by their time limit. An ended lease drains until a look shows that it has left.
    """

    def __init__(self, box: Box, *nodes: int, lag_s: float = 0.0) -> None:
        self.box = box
        self.leaves: dict[str, float] = {}
        self.jobs: dict[str, Job] = {}
        self._lag_s = lag_s
        self._readings = readings_of(*nodes)
        self._looks: list[float] = []
        self._seen = 0

    def come(self, lease_id: str, job: Job, *, declares: bool = True) -> None:
        self.jobs[lease_id] = job
        limit_s = job.limit_s if declares else None
        self.box.ask(lease_id, gpus=job.gpus, priority=job.priority, time_limit_s=limit_s)
        self._note_events()

    def restart(self) -> None:
        self.box.restart()
        self._looks.append(self.box.now + self._lag_s)
        self._note_events()

    def next_at(self) -> float:
        """When a holder releases, a look comes, or the pool does something by itself."""
        return min([*self.leaves.values(), *self._looks, max(self.box.state.next_due_at(), self.box.now)])

    def run_to(self, at: float) -> None:
        while (due := min([*self.leaves.values(), *self._looks, self.box.state.next_due_at()])) <= at:
            # One at a time: what the pool does meanwhile may call for a look.
            self.box.now = max(due, self.box.now)
            leaving = [lease_id for lease_id, leaves in self.leaves.items() if leaves <= self.box.now]
            if leaving:
                del self.leaves[leaving[0]]
                self.box.release(leaving[0])
            elif any(look <= self.box.now for look in self._looks):
                self._looks = [look for look in self._looks if look > self.box.now]
                self.box.observe_now(*self._readings)
            else:
                self.box.pass_time(0.0)
            self._note_events()
        self.box.now = max(at, self.box.now)

    def _note_events(self) -> None:
        for event in self.box.log[self._seen :]:
            if isinstance(event, ev.LeaseGranted):
                job = self.jobs[event.lease_id]
                if job.part < 1.0:
                    self.leaves[event.lease_id] = event.at + job.part * job.limit_s
            elif isinstance(event, ev.LeaseEnded) and event.draining:
                self._looks.append(event.at + self._lag_s)
        self._seen = len(self.box.log)


@settings(max_examples=120, deadline=None)
@example(
    [
        *(
            Job(gap_s, gpus, limit_s, 0.1, 0)
            for gap_s, gpus, limit_s in ((1.0, 3, 1e3), (15.0, 1, 20.0), (50.0, 1, 20.0))
        ),
        *(Job(gap_s, 1, 20.0, 0.1, 0) for gap_s in (50.0, 400.0)),
        *(
            Job(0.0, 1, limit_s, part, 0)
            for limit_s, part in ((300.0, 0.5), (300.0, 1.0), (20.0, 0.1), (60.0, 0.5), (1e3, 1.0))
        ),
        Job(0.0, 2, 300.0, 1.0, 0),
    ],
    (3,),
    Terms(0.5, (), ((0, 0.0, 2000.0), (0, 3000.0, 100.0))),
)
@given(jobs(0), st.sampled_from([(3,), (4,), (3, 3)]), terms)
def test_the_head_of_the_line_starts_no_later_than_it_was_first_told(
    load: list[Job], nodes: tuple[int, ...], terms: Terms
) -> None:
    play = Play(box_of(*nodes, reserve_after_s=0.0), *nodes, lag_s=terms.lag_s)
    for number, (index, after_s, lasts_s) in enumerate(terms.booked):
        starts_at = START + WALL_OFFSET_S + after_s
        booking = Booking(f"b{number}", (key(index, "node0"),), starts_at, starts_at + lasts_s, None, "repair")
        play.box.do(cmd.BookGpus(booking, Wishes()))
    for number, job in enumerate(load):
        play.come(f"job{number}", job)
        play.run_to(play.box.now + job.gap_s)
        if number in terms.restarts_after and len(nodes) == 1:
            play.restart()
    play.run_to(play.box.now + 100 * HOUR_S)

    told: dict[str, float] = {}
    for event in play.box.log:
        if isinstance(event, ev.QueueSettled) and event.reservation is not None:
            told.setdefault(event.reservation.lease_id, event.reservation.date)
        elif isinstance(event, ev.LeaseGranted):
            # It starts later by what its GPUs drain.
            assert event.at <= told.get(event.lease_id, event.at) + terms.lag_s
    assert not len(play.box.state.queue)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([45.0, 300.0, 900.0, 1800.0]), st.booleans()), min_size=4, max_size=12),
    st.sampled_from([0.0, 600.0]),
    st.sampled_from([0.0, 0.5, 30.0]),
)
def test_no_wide_request_starves_in_an_endless_stream_of_narrow_ones(
    stream: list[tuple[float, bool]], reserve_after_s: float, lag_s: float
) -> None:
    """More narrow requests wait than there are GPUs, at all times. Some declare a limit and use all of it, some do not."""
    play = Play(box_of(4, reserve_after_s=reserve_after_s), 4, lag_s=lag_s)
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
        play.run_to(play.next_at())
        assert play.box.now < asked_at + 8 * HOUR_S, "it starves"
