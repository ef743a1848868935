"""A reservation holds: while GPUs drain, over a restart, with bookings, and while readings do not tell."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.lease import Basis, Reservation
from gpu_worker_pool.core.model.request import Wishes
from tests.core.build import START, WALL_OFFSET_S, Box, key, process, reading
from tests.core.queue.boxes import free_at_once

HOUR_S = 3600.0


def reserved(box: Box) -> Reservation:
    assert box.state.reservation is not None
    return box.state.reservation


def wait_for_two(**settings: float) -> Box:
    """GPU 0 is held for an hour, and the first waiter needs both. A released GPU must be looked at."""
    box = Box(reading(0), reading(1), stale_after_s=1e9, reserve_after_s=0.0, **settings)
    box.ask("one", time_limit_s=HOUR_S, among=("0",))
    box.ask("wide", gpus=2, time_limit_s=HOUR_S)
    return box


def two(*more: Reading) -> tuple[Reading, ...]:
    seen = {each.gpu.key: each for each in more}
    return tuple(seen.get(key(index), reading(index)) for index in (0, 1))


# --- draining ------------------------------------------------------------------------------------------------------


def test_a_gpu_that_stays_in_use_outside_the_pool_is_given_up_in_the_end() -> None:
    box = wait_for_two(drain_limit_s=60.0)
    box.run_to(START + HOUR_S)
    box.ask("late")
    used = reading(0, utilization=90, used_mb=9_000, processes=(process(9, 9_000),))
    box.observe_now(*two(used))
    assert box.stage("late") == "queued"

    box.run_to(box.now + 61.0)

    assert (box.state.reservation, box.gpus_of("late")) == (None, (key(1),))


# --- a restart, and readings that come late --------------------------------------------------------------------------


def test_a_restart_does_not_give_away_what_is_reserved() -> None:
    box = wait_for_two()
    box.ask("narrow", time_limit_s=2 * HOUR_S)
    told = reserved(box)
    box.run_to(START + 900.0)

    box.restart()
    box.observe_now(*two())

    assert (reserved(box), box.stage("narrow")) == (told, "queued")
    box.run_to(told.date)
    box.observe_now(*two())
    assert box.stage("wide") == "active"


def test_a_waiter_without_a_date_is_looked_at_again_when_something_happens() -> None:
    box = free_at_once(reading(0), reading(1), stale_after_s=1e9, reserve_after_s=0.0)
    box.ask("for ever")
    box.ask("one", time_limit_s=HOUR_S)
    box.ask("wide", gpus=2)
    assert box.state.reservation is None

    box.pass_time(1.0)
    box.release("for ever")
    box.ask("narrow")

    assert (reserved(box).lease_id, box.stage("narrow")) == ("wide", "queued")


def test_a_lease_that_is_warned_late_ends_late_and_so_the_date_says() -> None:
    """The server was away over its limit. The holder has some time all the same."""
    box = wait_for_two()
    box.now = START + HOUR_S + 5.0
    box.restart()
    box.observe_now(*two())

    assert reserved(box).date == box.now + 10.0


# --- bookings ------------------------------------------------------------------------------------------------------


def book(box: Box, index: int, starts: float, ends: float | None, owner: str | None = None) -> None:
    ends_at = None if ends is None else ends + WALL_OFFSET_S
    booking = Booking(f"booking{index}", (key(index),), starts + WALL_OFFSET_S, ends_at, owner, "a course")
    box.do(cmd.BookGpus(booking, Wishes()))


def test_the_leases_of_a_bookings_owner_may_last_for_longer() -> None:
    box = free_at_once(reading(0), reading(1), stale_after_s=1e9, reserve_after_s=0.0)
    book(box, 0, START, START + 100.0, owner="ada")

    box.ask("wide", gpus=2, owner="bob")

    assert (reserved(box).date, reserved(box).basis) == (START + 100.0, Basis.PREDICTED)


def test_all_gpus_must_be_free_of_bookings_at_the_same_time() -> None:
    """GPU 0 could be had at once, but not any more when GPU 1 is free."""
    box = free_at_once(reading(0), reading(1), stale_after_s=1e9, reserve_after_s=0.0)
    book(box, 0, START + 200.0, START + 1000.0)
    box.ask("one", time_limit_s=150.0, among=("1",))

    box.ask("wide", gpus=2, time_limit_s=100.0)

    assert (reserved(box).date, reserved(box).after) == (START + 1000.0, None)
