"""One reservation: who has it, of which GPUs, and who may use them meanwhile."""

from __future__ import annotations

from gpu_worker_pool.core.model.lease import Basis, Reservation
from gpu_worker_pool.core.model.request import MAX_GPUS
from gpu_worker_pool.core.queue.planner import MOST_GPUS, Planner
from tests.core.build import START, Box, key, reading
from tests.core.queue.boxes import free_at_once
from tests.core.queue.test_many_waiters import calls

HOUR_S = 3600.0


def reserved(box: Box) -> Reservation:
    assert box.state.reservation is not None
    return box.state.reservation


def two_gpus(**settings: float) -> Box:
    return free_at_once(reading(0), reading(1), stale_after_s=1e9, **settings)


# --- who has it ----------------------------------------------------------------------------------------------------


def test_the_first_waiter_has_a_reservation_once_it_has_waited_long() -> None:
    box = two_gpus()
    box.ask("one", time_limit_s=HOUR_S)
    box.ask("wide", gpus=2)

    box.pass_time(600.0)

    assert reserved(box) == Reservation("wide", (key(0), key(1)), START + HOUR_S, Basis.DECLARED, "one")
    box.ask("late")
    assert box.stage("late") == "queued"


def test_a_pass_in_a_large_pool_looks_for_few_dates() -> None:
    """Each takes a look at all GPUs, and no caller is answered meanwhile."""
    box = free_at_once(*map(reading, range(MOST_GPUS // 2 + 1)), stale_after_s=1e9)
    box.ask("for ever", gpus=MAX_GPUS)
    box.ask("for ever too", gpus=MOST_GPUS // 2 + 1 - MAX_GPUS)
    box.ask("one")
    box.ask("two", gpus=2)
    box.ask("share", memory_mb=1.0)

    assert calls(lambda: box.pass_time(600.0))[Planner.plan.__code__] == 1


# --- where, and when -----------------------------------------------------------------------------------------------


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


# --- who may use it meanwhile --------------------------------------------------------------------------------------


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
