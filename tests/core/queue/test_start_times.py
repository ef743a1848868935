"""When waiters will probably start: as if each were placed by looking at every GPU again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.decider.forecast import StartTimes
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.owners import Order
from gpu_worker_pool.core.queue.planner import NEVER, FreeAt, Planner, together
from gpu_worker_pool.core.queue.withheld import Withheld
from tests.core.build import START, WALL_OFFSET_S, Box, expected_starts, key, reading

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
