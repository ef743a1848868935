"""EASY backfilling in the replay: no task that starts early delays the first waiter, checked the slow way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

import pytest

from benchmarks.replay.easy import EasyPool
from benchmarks.replay.fragmentation import Kind
from benchmarks.replay.openb import GPU_MILLI, MB_PER_MILLI, Node, Task, Trace, in_order
from benchmarks.replay.policies import BY_NAME, Policy
from benchmarks.replay.runs import TimedRun
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes

EASY = BY_NAME["EASY, exact limits"]


def task_of(name: str, gpus: int, milli: int, model: str | None, created_at: float, duration_s: float) -> Task:
    memory_mb = None if milli == GPU_MILLI else float(milli * MB_PER_MILLI)
    wishes = Wishes(gpus, memory_mb, model)
    models = (model,) if model else ()
    return Task(name, gpus, milli, models, wishes, created_at, duration_s, was_scheduled=True, owner="ada")


def random_load(seed: int) -> Trace:
    """Return tasks that come faster than a few small nodes can serve them."""
    rng = random.Random(seed)
    nodes = (Node("a", 2, "A"), Node("b", 4, "B"), Node("c", 1, "A"))
    tasks = []
    for number in range(40):
        gpus, milli, model = rng.choice(
            ((1, 1000, None), (1, 1000, "A"), (1, 470, None), (1, 300, "B"), (2, 1000, None), (4, 1000, None))
        )
        tasks.append(
            task_of(f"task-{number:02}", gpus, milli, model, float(rng.randrange(200)), float(rng.randrange(1, 90)))
        )
    return Trace(nodes, in_order(tasks))


class CheckedPool(EasyPool):
    """Finds the earliest start of the first waiter by trying every time at which a task ends."""

    def __init__(self, nodes: Sequence[Node], kinds: tuple[Kind, ...], policy: Policy, seed: int) -> None:
        super().__init__(nodes, kinds, policy, seed)
        self.early_starts = 0

    def begin(self, lease_id: str, gpus: tuple[GpuKey, ...], now: float) -> None:
        first_id, first = next(iter(self.line.items()))
        before = self.tried_out(first, now)
        assert self.earliest(first, now).at == before
        super().begin(lease_id, gpus, now)
        if lease_id == first_id:
            assert before == now
        else:
            assert now < before == self.tried_out(first, now), "it delays the first waiter"
            self.early_starts += 1

    def tried_out(self, task: Task, now: float) -> float:
        ends = {max(use.until, now) for uses in self.uses.values() for use in uses.values()}
        for at in sorted({now, *ends}):
            for node, keys in self.gpus_on.items():
                left = [sum(use.milli for use in self.uses[key].values() if max(use.until, now) > at) for key in keys]
                has_room = sum(GPU_MILLI - taken >= task.gpu_milli for taken in left) >= task.gpus
                if has_room and task.wishes.model in {None, self.nodes[node].model}:
                    return at
        return inf


@pytest.mark.parametrize("seed", range(6))
def test_a_task_that_starts_early_never_delays_the_first_waiter(seed: int) -> None:
    trace = random_load(seed)
    run = TimedRun(trace, EASY, seed)
    run.pool = pool = CheckedPool(trace.nodes, (), EASY, seed)

    run.run()

    began_at = {f"task-{number}": at for number, at in run.began_at.items()}
    assert len(began_at) == len(trace.tasks)
    assert pool.promised
    assert pool.early_starts
    assert all(began_at[lease_id] <= at for lease_id, at in pool.promised.items())


def test_a_task_starts_early_if_it_ends_in_time_or_takes_what_the_first_waiter_does_not_need() -> None:
    """One GPU of a is taken until 100, when the first waiter can have both. Of b, 30 % of a GPU is left."""
    tasks = (
        task_of("holder", 1, 1000, "A", 0.0, 100.0),
        task_of("share", 1, 700, "B", 1.0, 500.0),
        task_of("first", 2, 1000, "A", 2.0, 10.0),
        task_of("ends in time", 1, 1000, "A", 3.0, 97.0),
        task_of("too long", 1, 1000, "A", 4.0, 97.0),
        task_of("elsewhere", 1, 300, None, 5.0, 900.0),
    )
    run = TimedRun(Trace((Node("a", 2, "A"), Node("b", 1, "B")), tasks), EASY, seed=1)

    run.run()

    assert [run.began_at[number] for number in range(6)] == [0.0, 1.0, 100.0, 3.0, 110.0, 5.0]


def test_a_long_task_starts_at_once_where_the_first_waiter_finds_as_much_elsewhere_by_then() -> None:
    """The first waiter can have two thirds of one of two GPUs from 50 on; the long one takes a third of each that is left."""
    tasks = (
        task_of("short", 1, 600, None, 0.0, 50.0),
        task_of("other", 1, 600, None, 0.0, 50.0),
        task_of("first", 1, 700, None, 1.0, 10.0),
        task_of("long", 1, 300, None, 2.0, 900.0),
    )
    run = TimedRun(Trace((Node("a", 2, "A"),), tasks), EASY, seed=1)

    run.run()

    assert [run.began_at[number] for number in range(4)] == [0.0, 0.0, 50.0, 2.0]
