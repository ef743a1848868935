"""Time limits: a warning a minute before, the end at the limit, through restarts and reboots."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Quota
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason
from gpu_worker_pool.core.queue.planner import NEVER, Planner
from gpu_worker_pool.core.queue.withheld import Withheld
from tests.core.build import START, Box, of_kind, reading, refusals

HOUR_S = 3600.0


def box_with(**settings: float) -> Box:
    return Box(reading(0), reading(1), stale_after_s=1e9, **settings)


def limit_of(box: Box, lease_id: str) -> float | None:
    lease = box.state.leases[lease_id]
    assert isinstance(lease, ActiveLease)
    return lease.limit


def test_a_holder_that_ends_after_the_warning_is_known_to_have_obeyed() -> None:
    box = box_with()
    box.ask("a", time_limit_s=HOUR_S)
    box.ask("b", time_limit_s=HOUR_S)
    box.release("b")
    box.run_to(START + HOUR_S - 30)
    box.release("a")

    ended = (box.state.find(id_) for id_ in ("a", "b"))
    assert [(lease.reason, lease.warned) for lease in ended if isinstance(lease, EndedLease)] == [
        (EndReason.RELEASED, EndReason.TIME_LIMIT),
        (EndReason.RELEASED, None),
    ]


@pytest.mark.parametrize("is_by_quota", [False, True])
def test_more_than_the_longest_limit_is_refused(is_by_quota: bool) -> None:
    box = box_with() if is_by_quota else box_with(max_time_limit_s=HOUR_S)
    if is_by_quota:
        box.set_quota("*", Quota(max_time_limit_s=HOUR_S))

    (refused,) = refusals(box.ask("a", time_limit_s=2 * HOUR_S), ev.RefusalCode.UNSERVABLE)

    assert "a time limit of 2h was asked for; the longest allowed is 1h" in str(refused)


def test_a_reboot_leaves_a_remote_holder_the_rest_of_its_time() -> None:
    box = box_with()
    box.ask("a", time_limit_s=HOUR_S)

    box.now += 595.0
    box.reboot()

    assert limit_of(box, "a") == START + HOUR_S
    box.observe_now(reading(0))
    (ended,) = of_kind(box.run_to(START + 2 * HOUR_S), ev.LeaseEnded)
    assert ended.at == START + HOUR_S


def test_a_limit_that_came_after_the_grant_says_nothing_of_its_end() -> None:
    box = box_with()
    box.ask("a", owner="ada")

    box.set_quota("ada", Quota(max_time_limit_s=150.0))

    assert Planner(box.state, box.now, Withheld(box.state, box.now)).end_of("a") == NEVER
