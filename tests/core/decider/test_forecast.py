"""When waiters will probably start, and a request that is not made yet: as if each were placed by looking at every GPU again."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.decider.forecast import MOST_WAITERS, Forecast, StartTimes, When, usual_wishes
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.configured import Booking, Quota
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import Basis
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.owners import Order
from gpu_worker_pool.core.queue.planner import NEVER, FreeAt, Planner, together
from gpu_worker_pool.core.queue.withheld import Withheld
from tests.core.build import A100, START, T4, WALL_OFFSET_S, Box, expected_starts, forecast, key, reading


def told(box: Box, owner: str | None = None, **wishes: object) -> Forecast:
    """The forecast; the question changes nothing."""
    before = pickle.dumps(box.state)
    (found,) = forecast(box.state, box.now, [Wishes(**wishes)], owner)  # type: ignore[arg-type]
    assert pickle.dumps(box.state) == before
    return found


def test_free_gpus_are_had_now_more_at_a_declared_end_and_what_no_node_has_never() -> None:
    box = Box(*map(reading, range(4)), stale_after_s=1e9)
    box.ask("one", gpus=2, time_limit_s=600.0)
    found = forecast(box.state, box.now, usual_wishes(box.state))
    assert [each.wishes.gpus for each in found] == [1, 2, 4, 8]
    assert [each.when for each in found] == [When.NOW, When.NOW, When.LATER, When.NEVER]
    assert found[2].start == FreeAt(box.now + 600.0, Basis.DECLARED, "one")
    assert found[3].why == "8 GPUs on one node were asked for; this box has 4 GPUs"


def test_a_lease_without_a_limit_is_predicted_to_last_as_long_as_those_before() -> None:
    box = Box(reading(), stale_after_s=1e9)
    box.ask("first")
    assert told(box).when is When.UNKNOWN, "no lease has ended yet"
    box.now += 300.0
    box.release("first")
    box.observe_now(reading())
    box.ask("second")
    assert told(box) == Forecast(Wishes(), When.LATER, FreeAt(box.now + 300.0, Basis.PREDICTED, "second"))


def test_it_is_behind_those_that_wait() -> None:
    box = Box(reading(), stale_after_s=1e9)
    for number in range(3):
        box.ask(f"lease{number}", time_limit_s=100.0)
    start = told(box).start
    assert start is not None
    assert start.at == pytest.approx(box.now + 300.0)
    for number in range(MOST_WAITERS):
        box.ask(f"more{number}", time_limit_s=100.0)
    assert told(box).when is When.UNKNOWN, "there are too many ahead"


def test_it_knows_what_the_next_pass_would_reserve_for_those_ahead() -> None:
    """The GPU that is reserved drains, so the waiter starts sooner than was said when it was reserved."""
    box = Box(reading(), stale_after_s=1e9, reserve_after_s=0.0)
    for lease_id, lasted_s in (("first", 300.0), ("second", 100.0)):
        box.ask(lease_id)
        if lease_id == "second":
            box.ask("waiter")
        box.now += lasted_s
        box.release(lease_id)
        if lease_id == "first":
            box.observe_now(reading())
    assert told(box).start == FreeAt(box.now + 200.0, Basis.PREDICTED, "waiter")


def test_each_model_is_told_where_there_are_several() -> None:
    box = Box(reading(0), reading(1, name=T4), stale_after_s=1e9)
    box.ask("held", model="T4", time_limit_s=600.0)
    wishes = usual_wishes(box.state, sizes=(1,))
    assert [each.model for each in wishes] == [None, A100, T4]
    assert [each.when for each in forecast(box.state, box.now, wishes)] == [When.NOW, When.NOW, When.LATER]


def test_what_others_make_room_on_is_had_when_they_have_left() -> None:
    box = Box(reading(), stale_after_s=1e9, preempt_grace_s=60.0)
    box.ask("preemptible", preemptible=True)
    assert told(box) == Forecast(Wishes(), When.LATER, FreeAt(box.now + 60.0, Basis.DECLARED, "preemptible"))


def test_an_owner_is_told_of_its_quota() -> None:
    box = Box(*map(reading, range(4)), stale_after_s=1e9)
    box.set_quota("ada", Quota(gpus=1))
    box.ask("held", owner="ada")
    assert told(box, "ada").when is When.UNKNOWN
    assert told(box, "ada", gpus=2).why == "2 GPUs were asked for; the quota of ada allows at most 1"
    assert told(box, "bob").when is When.NOW


# GPUs on each node, nodes, MB of a share, and a time limit of each request.
requests = st.tuples(
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([None, None, 20_000.0]),
    st.sampled_from([None, 20.0, 300.0, 300.0, 5000.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(requests, min_size=4, max_size=20), st.sampled_from([(4,), (3, 3)]), st.booleans())
def test_starts_are_those_of_a_look_at_every_gpu_for_every_waiter(
    asked: list[tuple[int, int, float | None, float | None]], nodes: tuple[int, ...], is_booked: bool
) -> None:
    readings = [reading(index, node=f"node{node}") for node, gpus in enumerate(nodes) for index in range(gpus)]
    box = Box(*readings, stale_after_s=1e9)
    if is_booked:
        starts_at = START + WALL_OFFSET_S + 100.0
        booking = Booking("night", (key(0, "node0"),), starts_at, starts_at + 1000.0, None, "repair")
        box.do(cmd.BookGpus(booking, Wishes()))
    for number, (gpus, on_nodes, memory_mb, limit_s) in enumerate(asked):
        box.ask(f"lease-{number}", gpus=gpus, nodes=on_nodes, memory_mb=memory_mb, time_limit_s=limit_s)
    assert expected_starts(box.state, box.now) == plain_starts(box.state, box.now)


def test_the_pool_may_go_on_between_two_steps() -> None:
    """A server works them out in turns of its event loop. Holders, waiters and whole nodes leave meanwhile."""
    box = Box(*(reading(index, node=node) for node in ("a", "b") for index in range(3)), stale_after_s=1e9)
    for number in range(12):
        box.ask(f"lease-{number}", time_limit_s=100.0 + number, node="a" if number % 2 else "b")
    waiting = list(box.state.queue)
    happens: Iterator[Callable[[], object]] = iter(
        [
            lambda: box.release("lease-0"),
            lambda: box.release(waiting[0]),
            lambda: box.observe_now(reading(0, node="a"), reading(0, node="b")),
            lambda: box.release(waiting[-1]),
            lambda: [box.release(f"lease-{number}") for number in range(0, 6, 2)],
            lambda: box.do(cmd.SilenceNode("b")),
            lambda: box.do(cmd.ForgetNode("b")),
        ]
    )
    times = StartTimes(box.state, box.now)
    for _ in times.steps():
        next(happens, lambda: None)()
    assert waiting[-1] not in times.starts, "it had left before its turn"
    assert set(times.starts) & set(box.state.queue), "others are told"
    assert times.starts.keys() <= set(waiting)
    box.pass_time(1.0)
    assert expected_starts(box.state, box.now) == plain_starts(box.state, box.now)


def plain_starts(state: PoolState, now: float) -> dict[str, FreeAt]:
    planner = Planner(state, now, Withheld(state, now))
    taken_until: dict[GpuKey, FreeAt] = {}
    starts: dict[str, FreeAt] = {}
    for lease_id in Order(state, now).lease_ids():
        lease = state.queued(lease_id)
        wishes, kept = lease.request.wishes, state.reservation
        by_node: dict[str, list[tuple[FreeAt, int, GpuKey]]] = {}
        for slot in state.slots_on(wishes.node):
            assert slot.reading is not None
            at = planner.usable_from(slot, wishes)
            later = max(at, taken_until.get(slot.key, at), key=lambda time: time.at)
            later = later._replace(basis=max(at.basis, later.basis))
            by_node.setdefault(slot.key.node, []).append((later, slot.reading.gpu.index, slot.key))
        found = [planner.soonest(gpus, state.queue.class_of[lease_id]) for gpus in by_node.values()]
        plan = together(filter(None, found), wishes.nodes)
        start, gpus = (plan.start, plan.gpus) if plan else (NEVER, ())
        if kept is not None and kept.lease_id == lease_id:
            start, gpus = FreeAt(max(kept.date, now), kept.basis, kept.after), kept.gpus
        if start.at < inf:
            starts[lease_id] = start
            if not wishes.is_shared:
                lasts = planner.duration_of(lease.request.holder.owner, lease.request.time_limit_s)
                end = FreeAt(start.at + lasts.at, max(start.basis, lasts.basis), lease_id)
                taken_until |= dict.fromkeys(gpus, end)
    return starts
