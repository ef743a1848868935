"""One reservation: who has it, of which GPUs, and who may use them meanwhile."""

from __future__ import annotations

from gpu_worker_pool.core.model.lease import Reservation
from gpu_worker_pool.core.model.request import MAX_GPUS
from gpu_worker_pool.core.queue.planner import MOST_GPUS, Planner
from tests.core.build import START, Box, reading
from tests.core.queue.boxes import free_at_once
from tests.core.queue.test_many_waiters import calls

HOUR_S = 3600.0


def reserved(box: Box) -> Reservation:
    assert box.state.reservation is not None
    return box.state.reservation


def two_gpus(**settings: float) -> Box:
    return free_at_once(reading(0), reading(1), stale_after_s=1e9, **settings)


# --- who has it ----------------------------------------------------------------------------------------------------


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
