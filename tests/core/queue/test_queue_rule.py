"""The queue's rule: who is served next, and who may pass."""

from __future__ import annotations

from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import Box, key, reading, request


def test_a_queue_settled_now_is_settled_at_this_very_instant() -> None:
    # The reading is as old as it may be, to the last bit: its age is 15 s and not more, but 15 s after it was taken is
    # before now, both for rounding. `step` would go on settling the queue for ever.
    now, taken_at = 15.5 + 2**-49, 0.5 + 2**-50
    assert now - taken_at <= 15.0
    state = PoolState(settings=PoolSettings(stale_after_s=15.0))
    for opening in (cmd.TakeOver(0, "boot"), cmd.AnnounceNode("box", "boot")):
        step(state, opening, 0.0)
    looked = cmd.Observe((reading(0, at=taken_at), reading(1, at=taken_at, utilization=95)))
    for command in (looked, cmd.RequestLease("wide", request(gpus=2)), cmd.ServeQueue()):
        replay(state, decide(state, command, now))

    assert state.slots[key(0)].reading is not None
    assert decide(state, cmd.ServeQueue(), now) == []


def test_an_owner_who_has_enough_waiting_is_refused_and_others_are_not() -> None:
    box = Box(reading(0), max_queued_per_owner=2)
    box.ask("holder", owner="ann")
    for number in range(2):
        box.ask(f"ann{number}", owner="ann")
    (refusal,) = box.ask("ann2", owner="ann")
    why = "2 requests of ann wait already, which is the limit; ask later"
    assert refusal == ev.Refused(box.now, ev.RefusalCode.OWNERS_QUEUE_FULL, "ann2", why)
    assert box.stage("ann2") == "unknown"
    box.ask("bob0", owner="bob")
    assert box.stage("bob0") == "queued"
    box.release("ann0")
    box.ask("ann2", owner="ann")
    assert box.stage("ann2") == "queued"


def test_a_full_queue_refuses_everybody_but_those_who_ask_again() -> None:
    box = Box(reading(0), max_queued=1)
    box.ask("holder")
    box.ask("first")
    (refusal,) = box.ask("second", owner="bob")
    why = "1 requests wait already, which is the limit; ask later"
    assert refusal == ev.Refused(box.now, ev.RefusalCode.QUEUE_FULL, "second", why)
    box.ask("first")
    assert box.stage("first") == "queued"
