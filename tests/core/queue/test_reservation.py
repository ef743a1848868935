"""One reservation: who has it, of which GPUs, and who may use them meanwhile."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.model.lease import Basis, Reservation
from gpu_worker_pool.core.model.request import MAX_GPUS, Wishes
from gpu_worker_pool.core.queue.planner import MOST_GPUS, TRY_AGAIN_S, TRY_NEXT_S
from tests.core.build import START, T4, Box, key, reading
from tests.core.queue.boxes import free_at_once

HOUR_S = 3600.0


def reserved(box: Box) -> Reservation:
    assert box.state.reservation is not None
    return box.state.reservation


def two_gpus(**settings: float) -> Box:
    return free_at_once(reading(0), reading(1), stale_after_s=1e9, **settings)


# --- who has it ----------------------------------------------------------------------------------------------------


def test_nothing_is_kept_before_a_waiter_has_waited_long() -> None:
    box = two_gpus()
    box.ask("one", time_limit_s=HOUR_S)
    box.ask("wide", gpus=2)

    box.ask("late")

    assert (box.state.reservation, box.stage("late")) == (None, "active")


def test_the_first_waiter_has_a_reservation_once_it_has_waited_long() -> None:
    box = two_gpus()
    box.ask("one", time_limit_s=HOUR_S)
    box.ask("wide", gpus=2)

    box.pass_time(600.0)

    assert reserved(box) == Reservation("wide", (key(0), key(1)), START + HOUR_S, Basis.DECLARED, "one")
    box.ask("late")
    assert box.stage("late") == "queued"


def test_the_pool_wakes_up_for_it() -> None:
    box = two_gpus()
    box.ask("one", time_limit_s=HOUR_S)
    box.ask("wide", gpus=2)

    assert box.state.next_due_at() == pytest.approx(START + 600.0)


def test_only_the_first_that_cannot_be_served_has_one() -> None:
    box = free_at_once(reading(0), reading(1), reading(2), stale_after_s=1e9, reserve_after_s=0.0)
    box.ask("one", time_limit_s=HOUR_S)
    box.ask("wide", gpus=3)
    box.ask("wider", gpus=2, model=None, priority=-1)

    assert reserved(box).lease_id == "wide"
    box.release("one")
    box.release("wide")
    assert box.stage("wider") == "active"


def test_a_waiter_for_which_nothing_tells_a_date_is_passed_over() -> None:
    box = free_at_once(reading(0), reading(1, name=T4), reading(2, name=T4), stale_after_s=1e9, reserve_after_s=0.0)
    box.ask("for ever", model="A100")
    box.ask("short", model="T4", time_limit_s=HOUR_S)
    box.ask("never", model="A100")

    box.ask("wide", model="T4", gpus=2)

    assert reserved(box).lease_id == "wide"


def test_a_pass_in_a_large_pool_looks_for_few_dates() -> None:
    """Each takes a look at all GPUs, and no caller is answered meanwhile. The waiters behind are tried a moment later."""
    box = free_at_once(*map(reading, range(MOST_GPUS // 2 + 1)), stale_after_s=1e9)
    box.ask("for ever", gpus=MAX_GPUS)
    box.ask("for ever too", gpus=MOST_GPUS // 2 + 1 - MAX_GPUS)
    box.ask("one")
    box.ask("two", gpus=2)
    box.ask("share", memory_mb=1.0)

    box.pass_time(600.0)

    now, tried = START + 600.0, box.state.no_date_until
    assert tried == {Wishes(): now + TRY_AGAIN_S}
    box.run_to(now + TRY_NEXT_S)
    assert box.state.no_date_until.keys() == {Wishes(), Wishes(2)}, "the next one is not tried instead of the first"
    box.run_to(now + 2 * TRY_NEXT_S)
    assert box.state.no_date_until.keys() == {Wishes(), Wishes(2), Wishes(memory_mb=1.0)}


def test_a_higher_priority_takes_the_reservation_over() -> None:
    box = two_gpus(reserve_after_s=0.0)
    box.ask("one", time_limit_s=HOUR_S)
    box.ask("wide", gpus=2)

    box.ask("urgent", gpus=2, priority=1)

    assert reserved(box).lease_id == "urgent"


def test_a_reservation_ends_with_its_waiter() -> None:
    box = two_gpus(reserve_after_s=0.0)
    box.ask("one", time_limit_s=HOUR_S)
    box.ask("wide", gpus=2)
    box.ask("late")

    box.release("wide")

    assert (box.state.reservation, box.stage("late")) == (None, "active")


# --- where, and when -----------------------------------------------------------------------------------------------


def test_it_is_on_the_node_where_the_waiter_can_start_soonest() -> None:
    gpus = [reading(index, node=node) for node in ("x", "y") for index in (0, 1)]
    box = free_at_once(*gpus, stale_after_s=1e9, reserve_after_s=0.0)
    box.ask("long", gpus=2, time_limit_s=2 * HOUR_S)
    box.ask("short", time_limit_s=HOUR_S)

    box.ask("wide", gpus=2)

    assert (reserved(box).nodes, reserved(box).date) == ({"y"}, START + HOUR_S)


def test_it_stays_on_its_node_though_another_would_be_sooner_later() -> None:
    gpus = [reading(index, node=node) for node in ("x", "y") for index in (0, 1)]
    box = free_at_once(*gpus, stale_after_s=1e9, reserve_after_s=0.0)
    for lease_id, hours in (("x0", 3), ("x1", 3), ("y0", 2), ("y1", 2)):
        box.ask(lease_id, time_limit_s=hours * HOUR_S)
    box.ask("wide", gpus=2)
    assert reserved(box).nodes == {"y"}

    box.release("x0")
    box.ask("short", time_limit_s=HOUR_S)
    box.release("x1")

    assert (box.gpus_of("short"), reserved(box).nodes) == ((key(0, "x"),), {"y"})


def test_what_was_granted_a_moment_ago_is_not_taken_for_free() -> None:
    """The next waiter in line would keep to a node that has only just been taken, and for long."""
    gpus = [reading(index, node=node) for node in ("x", "y") for index in (0, 1)]
    box = free_at_once(*gpus, stale_after_s=1e9, reserve_after_s=0.0)
    box.ask("short", gpus=2, time_limit_s=HOUR_S)
    box.ask("longer", gpus=2, time_limit_s=2 * HOUR_S)
    box.ask("first", gpus=2, time_limit_s=10 * HOUR_S)
    box.ask("second", gpus=2)

    box.release("short")

    assert box.stage("first") == "active"
    assert reserved(box) == Reservation(
        "second", (key(0, node="y"), key(1, node="y")), START + 2 * HOUR_S, Basis.DECLARED, "longer"
    )


def test_a_lease_that_ends_early_brings_the_date_forward() -> None:
    box = free_at_once(reading(0), reading(1), reading(2), stale_after_s=1e9, reserve_after_s=0.0)
    for lease_id, hours in (("a", 1), ("b", 2), ("c", 3)):
        box.ask(lease_id, time_limit_s=hours * HOUR_S)
    box.ask("wide", gpus=2)
    assert reserved(box).date == START + 2 * HOUR_S

    box.release("c")

    assert (reserved(box).date, reserved(box).gpus) == (START + HOUR_S, (key(0), key(2)))


def test_a_lease_without_a_limit_is_predicted_from_the_last_two_of_its_owner() -> None:
    box = two_gpus(reserve_after_s=0.0)
    for number, lasts_s in enumerate((100.0, 300.0)):
        box.ask(f"past{number}", owner="ada")
        box.pass_time(lasts_s)
        box.release(f"past{number}")
    box.ask("now", owner="ada")

    box.ask("wide", gpus=2, owner="bob")

    assert (reserved(box).date, reserved(box).basis) == (box.now + 200.0, Basis.PREDICTED)


def test_a_prediction_is_doubled_when_it_is_overrun() -> None:
    box = two_gpus(reserve_after_s=0.0)
    box.ask("past", owner="ada")
    box.pass_time(100.0)
    box.release("past")
    box.ask("now", owner="ada")
    granted = box.now
    box.ask("wide", gpus=2, owner="bob")
    assert reserved(box).date == granted + 100.0

    box.pass_time(100.0)

    assert reserved(box).date == granted + 200.0


def test_a_predicted_date_more_than_an_hour_away_reserves_nothing_yet() -> None:
    box = two_gpus(reserve_after_s=0.0)
    box.ask("past", owner="ada")
    box.pass_time(2 * HOUR_S)
    box.release("past")
    box.ask("now", owner="ada")
    box.ask("wide", gpus=2, owner="bob")
    assert box.state.reservation is None

    for _ in range(61):
        box.pass_time(60.0)

    assert reserved(box).lease_id == "wide"


def test_a_gpu_out_of_service_is_not_reserved() -> None:
    box = free_at_once(reading(0), reading(1), reading(2), stale_after_s=1e9, reserve_after_s=0.0)
    box.ask("one", time_limit_s=HOUR_S)
    box.ask("wide", gpus=3)
    assert reserved(box).gpus == (key(0), key(1), key(2))

    box.exclude(key(2), "repair")

    assert box.state.reservation is None


# --- who may use it meanwhile --------------------------------------------------------------------------------------


def test_a_request_that_ends_before_the_date_may_use_a_reserved_gpu() -> None:
    box = two_gpus(reserve_after_s=0.0)
    box.ask("one", time_limit_s=HOUR_S)
    box.ask("wide", gpus=2)

    box.ask("too long", time_limit_s=HOUR_S + 1)
    box.ask("in time", time_limit_s=HOUR_S)

    assert (box.stage("too long"), box.gpus_of("in time")) == ("queued", (key(1),))


def test_a_prediction_admits_nobody() -> None:
    box = two_gpus(reserve_after_s=0.0)
    box.ask("past", owner="ada")
    box.pass_time(1.0)
    box.release("past")
    box.ask("one", owner="bob", time_limit_s=HOUR_S)
    box.ask("wide", gpus=2, owner="bob")

    box.ask("always quick", owner="ada")

    assert box.stage("always quick") == "queued"


def test_a_gpu_that_is_not_reserved_is_free_to_all() -> None:
    box = free_at_once(reading(0), reading(1), reading(2, name=T4), stale_after_s=1e9, reserve_after_s=0.0)
    box.ask("one", model="A100", time_limit_s=HOUR_S)
    box.ask("wide", model="A100", gpus=2)

    box.ask("any")

    assert box.gpus_of("any") == (key(2),)


def test_a_stream_of_small_shares_does_not_keep_an_exclusive_waiter_out() -> None:
    box = free_at_once(reading(0), stale_after_s=1e9)
    box.ask("share0", memory_mb=8_000, time_limit_s=HOUR_S)
    box.ask("alone")

    box.pass_time(600.0)
    box.ask("share1", memory_mb=8_000)
    box.ask("share2", memory_mb=8_000, time_limit_s=60.0)

    assert [box.stage(id_) for id_ in ("share1", "share2")] == ["queued", "active"]
    box.run_to(START + HOUR_S)
    assert box.stage("alone") == "active"


def test_the_waiter_starts_at_its_date() -> None:
    box = two_gpus(reserve_after_s=0.0)
    box.ask("one", time_limit_s=HOUR_S)
    box.ask("wide", gpus=2)
    for number in range(20):
        box.ask(f"narrow{number}", time_limit_s=300.0 + 100.0 * number)
    date = reserved(box).date

    box.run_to(date)

    assert box.stage("wide") == "active"
