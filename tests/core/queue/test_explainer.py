"""Many waiters explained at once are told what each would be told alone."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.queue.explain import MOST_GPUS, Explainer, explain
from tests.core.build import T4, Box, reading


def assert_told_as_alone(box: Box) -> None:
    explainer = Explainer(box.state, box.now)
    waiting = [lease for lease in box.state.leases.values() if isinstance(lease, QueuedLease)]
    assert len(waiting) > 2
    for lease in waiting:
        assert explainer.explain(lease) == explain(box.state, lease.id, box.now)


def test_those_who_wish_for_the_same_and_those_who_do_not() -> None:
    box = Box(reading(0), reading(1, name=T4), reading(2, utilization=95))
    for lease_id, model in (("a", None), ("b", None), ("c", None), ("d", "T4"), ("e", None), ("f", "A100")):
        box.ask(lease_id, model=model)

    assert_told_as_alone(box)


def test_those_who_are_kept_out_by_somebody_ahead_of_them() -> None:
    """A GPU that is reserved is free for the waiter that has it, and for none behind."""
    box = Box(reading(0), reading(1), reserve_after_s=0.0)
    box.ask("a", time_limit_s=3600.0)
    for lease_id in ("wide", "wide too"):
        box.ask(lease_id, gpus=2)
    for lease_id in ("b", "c"):
        box.ask(lease_id)

    assert box.state.reservation
    assert_told_as_alone(box)


def test_only_so_many_verdicts_are_made_for_one_list() -> None:
    box = Box(reading(0, utilization=100), reading(1, utilization=100))
    for number, memory_mb in enumerate((1_000, 2_000, 3_000, 1_000)):
        box.ask(f"w{number}", memory_mb=memory_mb)
    explainer = Explainer(box.state, box.now, most_verdicts=4)
    afforded = []
    for number in range(4):
        lease = box.state.queued(f"w{number}")
        afforded.append(explainer.can_afford(lease))
        if afforded[-1]:
            explainer.explain(lease)
    assert afforded == [True, True, False, True], "equal wishes share their verdicts"


def test_a_waiter_is_told_of_a_hundred_gpus_and_how_many_more_there_are() -> None:
    box = Box(*(reading(index, utilization=100) for index in range(MOST_GPUS + 7)))
    box.ask("waits")

    told = explain(box.state, "waits", box.now)

    assert told is not None
    assert len(told.verdicts) == MOST_GPUS
    assert str(told).endswith("; and 7 more GPUs")


def test_gpus_of_a_box_that_is_not_heard_of_are_counted_in_a_sentence() -> None:
    box = Box(*(reading(index, node="gpu-03") for index in range(3)))
    box.do(cmd.TakeOver(1, "boot"))
    box.ask("waits")

    told = explain(box.state, "waits", box.now)

    assert told is not None
    assert told.obstacles == "3 whose box, gpu-03, is not heard of, so its state is unknown"
