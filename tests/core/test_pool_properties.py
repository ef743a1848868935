"""The promises, over histories of which some are the same in every run and a few are random. `make soak-core` plays many more.

When a history fails, hypothesis prints its steps. They are a test: paste what begins with `state = ` into a function, import
the machine that it names, and keep it beside its fix.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.mutant import Mutant, loaded
from tests.core.pool_machine import PoolMachine
from tests.core.queue_machine import PLAIN, QueueMachine

POOL = settings(
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # An explanation would stand between the lines of the program.
    phases=[phase for phase in Phase if phase is not Phase.explain],
    print_blob=True,
)
QUEUE = settings(POOL, stateful_step_count=30)


class FixedPoolMachine(PoolMachine):
    """The same histories in every run."""


class FixedQueueMachine(QueueMachine):
    """The same histories in every run."""


TestFixedPool = FixedPoolMachine.TestCase
TestFixedPool.settings = settings(POOL, max_examples=100, derandomize=True, database=None)
TestFixedQueue = FixedQueueMachine.TestCase
TestFixedQueue.settings = settings(QUEUE, max_examples=100, derandomize=True, database=None)

TestPool = PoolMachine.TestCase
TestPool.settings = settings(POOL, max_examples=60, derandomize=False)
TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(QUEUE, max_examples=60, derandomize=False)


@pytest.mark.parametrize("machine", [PoolMachine, QueueMachine])
def test_a_history_that_fails_is_printed_as_a_program(machine: type[PoolMachine]) -> None:
    until_found = settings(POOL, derandomize=True, database=None, report_multiple_bugs=False)
    with loaded(Mutant("fences grow", "decide", "fence = 1 + max(", "fence = 0 * max(")) as core:
        broken = type("BrokenMachine", (machine,), {"core": core})
        with pytest.raises(AssertionError) as failed:
            run_state_machine_as_test(broken, settings=until_found)
        printed = "\n".join(failed.value.__notes__)
        program = printed[printed.index("state = BrokenMachine()") :].partition("\n\nYou can reproduce")[0]

        with pytest.raises(AssertionError, match="a fence that does not grow"):
            exec(program, {"BrokenMachine": broken})  # noqa: S102 - it is what one would paste


# Histories that failed.


def test_a_process_that_uses_two_gpus_gets_one_of_them() -> None:
    state = PoolMachine()
    settings = {"max_sharers": 64, "awaits_reading_after_release": False, "outsiders": "avoid"}
    state.start(settings={**settings, "remembered_ended_leases": 0, "reserve_after_s": 0.0}, size=2)
    state.observe(
        age_s=0.0,
        looks=[(0, 0.69, 0.0, False, "own", "ok", False), (1, 0.0, 0.0, False, "own", "ok", False)],
    )
    state.request_in_a_program(program=901)
    assert state.pool.state.active("lease1")
    state.teardown()


def test_a_lease_that_ends_tells_how_long_the_next_will_last_before_a_booking() -> None:
    state = QueueMachine()
    terms = {"reserve_after_s": 0.0, "preempt_grace_s": 10.0, "awaits_reading_after_release": True}
    state.start(settings=terms, size=2)
    state.book(begins=20.0, gpu=None, gpus=1, lasts_s=None, number=1, owner="ada")
    plain = {"is_local": False, "priority": 0, "program": None, "time_limit_s": None, "ttl_s": 10.0, "wishes": PLAIN}
    first, _ = state.request(**plain), state.request(**plain)
    state.end(how="leave", lease=first)
    # It lasted for less than a second: another like it has ended when the booking begins.
    assert state.pool.state.active("lease2")
    state.teardown()


def test_a_lease_that_is_granted_when_a_booking_begins_is_not_queued_first() -> None:
    state = QueueMachine()
    state.start(settings={"reserve_after_s": 0.0, "preempt_grace_s": 10.0}, size=2)
    terms = {"preemptible": True, "priority": 0, "time_limit_s": None}
    state.request_on_terms(owner="ada", wishes=PLAIN, **terms)
    state.book(begins=-5.0, gpu=0, gpus=1, lasts_s=None, number=1, owner="bob")
    # In this step the lease on the booked GPU is warned first.
    state.request_a_share(memory_mb=8000)
    assert state.pool.state.active("lease2")
    state.teardown()


def test_a_preemptible_request_is_not_granted_what_a_booking_is_about_to_need() -> None:
    """That its owner's leases were short so far does not end it before the booking begins."""
    state = QueueMachine()
    state.start(
        settings={"reserve_after_s": 0.0, "preempt_grace_s": 60.0, "awaits_reading_after_release": False}, size=2
    )
    state.book(begins=20.0, gpu=None, gpus=1, lasts_s=None, number=1, owner="bob")
    short = state.request_a_share(memory_mb=8000)
    state.end(how="leave", lease=short)
    terms = {"owner": "ada", "priority": 0, "wishes": PLAIN}
    state.request_on_terms(preemptible=False, time_limit_s=40.0, **terms)
    state.request_on_terms(preemptible=True, time_limit_s=None, **terms)
    assert state.pool.state.queued("lease3")
    state.teardown()


def test_a_lease_that_is_taken_up_by_its_processes_is_warned_of_its_limit_in_the_same_step() -> None:
    state = QueueMachine()
    terms = {"reserve_after_s": 0.0, "awaits_reading_after_release": False}
    state.start(settings={**terms, "default_time_limit_s": 90.0, "take_up_s": 5.0}, size=1)
    first = state.request_in_a_program(program=901)
    state.request_a_share(memory_mb=8000)
    state.end(how="leave", lease=first)
    state.observe(age_s=0.0, looks=[(0, 0.0, 0.0, True, None, "ok", False)])
    # Both are due: nobody has asked for the lease since it was granted, and its end is less than a minute away.
    state.let_time_pass(seconds=31.0)
    assert state.pool.state.active("lease2").ending is not None
    state.teardown()


def test_a_holder_is_not_idle_by_a_reading_that_took_long_to_arrive() -> None:
    state = QueueMachine()
    terms = {"reserve_after_s": 0.0, "preempt_grace_s": 10.0, "awaits_reading_after_release": False}
    state.start(settings={**terms, "idle_after_s": 10.0, "idle_reclaim": True}, size=1)
    state.let_time_pass(seconds=9.0)
    state.request_a_share(memory_mb=8000)
    state.let_time_pass(seconds=14.0)
    state.observe(age_s=16.0, looks=[(0, 0.0, 0.0, False, None, "ok", False)])
    assert state.pool.state.active("lease1").ending is None
    state.teardown()


def test_a_waiter_for_which_a_lease_makes_room_may_have_another_gpu_at_once() -> None:
    """The fault was in the check. The first waiter counts on a free GPU and on one that becomes free; when one more becomes free
    for the second waiter, the first counts on these two, and the second has the free one.
    """
    state = QueueMachine()
    state.start(
        settings={"reserve_after_s": 0.0, "preempt_grace_s": 10.0, "awaits_reading_after_release": False}, size=5
    )
    state.request_a_share(memory_mb=40000)
    terms = {"owner": "ada", "priority": 0, "time_limit_s": None}
    state.request_on_terms(preemptible=True, wishes={**PLAIN, "nodes": 2}, **terms)
    state.request_on_terms(preemptible=True, wishes=PLAIN, **terms)
    state.request_on_terms(preemptible=False, wishes={**PLAIN, "gpus": 2}, **terms)
    state.request_on_terms(preemptible=False, wishes={**PLAIN, "node": "beta"}, **terms)
    pool = state.pool.state
    assert [pool.active(f"lease{number}").ending is not None for number in (2, 3)] == [True, True]
    assert pool.queued("lease4")
    assert pool.active("lease5")
    state.teardown()


def test_a_forecast_counts_on_what_the_next_pass_keeps_for_others_also_for_an_owner_with_a_booking() -> None:
    """The owner of the booking would be granted one GPU at once. Two of them are after the first waiter, whose date has changed."""
    state = QueueMachine()
    terms = {"reserve_after_s": 0.0, "preempt_grace_s": 10.0, "awaits_reading_after_release": False}
    state.start(settings=terms, size=2)
    state.request_a_share(memory_mb=8000)
    state.restart(is_fleet=False, present=("alpha", "beta"), rebooted=("alpha",))
    state.book(begins=0.0, gpu=0, gpus=1, lasts_s=60.0, number=1, owner="ada")
    state.request_a_share(memory_mb=8000)
    wishes = {**PLAIN, "gpus": 2}
    state.request_on_terms(owner="bob", preemptible=False, priority=0, time_limit_s=None, wishes=wishes)
    state.be_away(seconds=40.0)
    state.run_on(seconds=15.0)
    for number in range(30):
        state.pool.check_forecast(number)
    state.teardown()
