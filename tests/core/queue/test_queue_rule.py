"""The queue's rule: who is served next, and who may pass."""

from __future__ import annotations

from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import T4, Box, key, of_kind, process, reading, request
from tests.core.queue.boxes import free_at_once

# --- the order -----------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    box = free_at_once(reading())
    box.ask("holder")
    for lease_id in ("z", "m", "a"):
        box.ask(lease_id)

    served = []
    for previous in ("holder", "z", "m"):
        box.release(previous)
        served += [lease_id for lease_id in ("z", "m", "a") if box.gpus_of(lease_id)]

    assert served == ["z", "m", "a"]


def test_a_higher_priority_is_served_first() -> None:
    box = free_at_once(reading())
    box.ask("holder")
    box.ask("early")
    box.ask("urgent", priority=1)

    box.release("holder")

    assert (box.stage("early"), box.stage("urgent")) == ("queued", "active")


def test_a_lower_priority_is_served_last() -> None:
    box = free_at_once(reading())
    box.ask("holder")
    box.ask("patient", priority=-1)
    box.ask("late")

    box.release("holder")

    assert (box.stage("patient"), box.stage("late")) == ("queued", "active")


def test_of_one_priority_the_first_to_come_is_served_first() -> None:
    box = free_at_once(reading())
    box.ask("holder")
    box.ask("first", priority=3)
    box.ask("second", priority=3)

    box.release("holder")

    assert (box.stage("first"), box.stage("second")) == ("active", "queued")


def test_a_higher_priority_takes_nothing_from_who_has_it() -> None:
    box = free_at_once(reading())
    box.ask("holder")

    box.ask("urgent", priority=1_000_000)

    assert (box.stage("holder"), box.stage("urgent")) == ("active", "queued")


def test_waiters_of_different_wishes_stand_in_one_line() -> None:
    box = free_at_once(reading())
    box.ask("holder")
    box.ask("first", model="A100")
    box.ask("second")
    box.ask("third", memory_mb=1_000)

    box.release("holder")

    assert [box.stage(lease_id) for lease_id in ("first", "second", "third")] == [
        "active",
        "queued",
        "queued",
    ]


def test_one_look_serves_everybody_who_can_be() -> None:
    box = Box()
    for lease_id in ("a", "b", "c"):
        box.ask(lease_id)

    box.observe_now(reading(0), reading(1))

    assert [box.stage(lease_id) for lease_id in ("a", "b", "c")] == ["active", "active", "queued"]


def test_a_gpu_that_frees_on_any_node_serves_who_waits() -> None:
    box = free_at_once(reading(node="x"), reading(node="y"))
    box.ask("a")
    box.ask("b")
    box.ask("c")

    box.release("b")

    assert box.gpus_of("c") == (key(0, "y"),)


# --- others do not wait behind what they do not want ---------------------------------------------------------------


def test_who_wants_a_t4_does_not_wait_behind_who_wants_an_a100() -> None:
    box = free_at_once(reading(0), reading(1, name=T4))
    box.ask("holder", model="A100")
    box.ask("wants an A100", model="A100")

    box.ask("wants a T4", model="T4")

    assert box.gpus_of("wants a T4") == (key(1),)


def test_who_wants_a_t4_does_not_wait_behind_who_wants_two_a100s() -> None:
    box = free_at_once(reading(0), reading(1), reading(2, name=T4), reserve_after_s=0.0)
    box.ask("holder", model="A100", time_limit_s=3600.0)
    box.ask("wants two", model="A100", gpus=2)

    box.ask("wants a T4", model="T4")

    assert box.gpus_of("wants a T4") == (key(2),)


def test_who_takes_any_gpu_passes_onto_the_model_that_nobody_ahead_wants() -> None:
    box = free_at_once(reading(0), reading(1), reading(2, name=T4), reserve_after_s=0.0)
    box.ask("holder", model="A100", time_limit_s=3600.0)
    box.ask("wants two", model="A100", gpus=2)

    box.ask("any")

    assert box.gpus_of("any") == (key(2),)


def test_a_small_share_passes_a_large_one_onto_a_gpu_that_is_too_small_for_it() -> None:
    box = free_at_once(reading(0), reading(1, name=T4, total_mb=16_000))
    box.ask("holder", model="A100")
    box.ask("large", memory_mb=40_000)

    box.ask("small", memory_mb=4_000)

    assert box.gpus_of("small") == (key(1),)


def test_a_laxer_waiter_passes_a_stricter_one() -> None:
    box = free_at_once(reading(utilization=50))
    box.ask("strict", utilization_threshold_percent=30)

    box.ask("lax")

    assert box.stage("lax") == "active"


def test_a_newcomer_in_the_middle_of_the_line_is_served_if_nobody_ahead_can_use_it() -> None:
    box = free_at_once(reading(0), reading(1, name=T4))
    box.ask("on the T4", model="T4")
    box.ask("on the A100", model="A100")
    box.ask("front", model="A100", priority=9)
    box.ask("back", model="A100")
    box.observe_now(reading(2, name=T4))

    box.ask("middle", model="T4", priority=5)

    assert box.gpus_of("middle") == (key(2),)


# --- the pass after every change -----------------------------------------------------------------------------------


def test_a_busy_gpu_that_falls_idle_serves_who_waits() -> None:
    box = Box(reading(utilization=95))
    box.ask("a")

    box.observe_now(reading(utilization=5))

    assert box.stage("a") == "active"


def test_a_process_that_ends_outside_makes_room_for_who_waits() -> None:
    box = Box(reading(used_mb=60_000, processes=(process(66, 60_000),)))
    box.ask("a", memory_mb=8_000)

    box.observe_now(reading())

    assert box.stage("a") == "active"


def test_a_settled_queue_is_not_looked_through_again() -> None:
    box = Box(reading())
    box.ask("a")
    box.ask("b")

    assert of_kind(box.pass_time(1), ev.QueueSettled) == []


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


def test_a_waiter_shares_a_busy_gpu_once_a_newcomer_accounts_for_its_load() -> None:
    """The newcomer takes a GPU that was too busy for the waiter; from then on a lease stands for what computes there."""
    box = free_at_once(reading(utilization=95.0))
    box.ask("waiter", memory_mb=8_000)
    assert box.stage("waiter") == "queued"

    box.ask("newcomer", memory_mb=8_000, utilization_threshold_percent=99.0)

    assert (box.stage("newcomer"), box.stage("waiter")) == ("active", "active")
