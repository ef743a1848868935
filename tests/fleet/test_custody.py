"""A box keeps its leases: what it does with each message, and when it ends a lease."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu_worker_pool.core.fleet.custody import Custody
from gpu_worker_pool.core.fleet.custody_actions import (
    CloseLink,
    Keep,
    RenewalState,
    Send,
    StopWatching,
    TellHolder,
    WatchProcess,
)
from gpu_worker_pool.core.fleet.messages import (
    Announce,
    ComingEnd,
    HolderIsDead,
    KeptLease,
    Orders,
    Rejected,
    Report,
    WatchOrder,
    Welcome,
)
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import Holder, Request
from tests.core.build import reading

REMOTE = Request(ttl_s=10.0)
LOCAL = Request(holder=Holder(process=ProcessId(7, 1.0), node="x"))


def kept(lease_id: str = "a", fence: int = 1, request: Request = REMOTE, **changed: Any) -> KeptLease:
    ttl_s = None if request is LOCAL else request.ttl_s
    lease = KeptLease(
        lease_id, fence, request, ("GPU-x-0",), ttl_s, is_custodian=True, requested_at=1.0, granted_at=2.0
    )
    return replace(lease, **changed)


def welcome(*leases: KeptLease, epoch: int = 3, time: float = 500.0, watches: tuple[WatchOrder, ...] = ()) -> Welcome:
    return Welcome(epoch, time, "pool", leases, watches, ())


def told_again(custody: Custody) -> Announce:
    """What it would tell another leader."""
    return custody.announce("http://x", "1", False, None)


def box(*leases: KeptLease, **known: Any) -> Custody:
    """A box that has just been welcomed, at 100 s on its clock."""
    custody = Custody("x", "machine", "boot", 100.0, **known)
    custody.announce("http://x", "1", False, None)
    custody.take(welcome(*leases), 100.0)
    return custody


def test_orders_before_the_welcome_and_a_rejection_close_the_link() -> None:
    custody = Custody("x", "machine", "boot", 100.0)
    custody.announce("http://x", "1", False, None)

    assert isinstance(custody.take(Orders(1, 5.0), 100.0)[0], CloseLink)
    assert custody.take(Rejected("another box has this name"), 100.0) == [CloseLink("another box has this name")]


def test_only_the_custodian_counts_heartbeats() -> None:
    custody = box(kept(is_custodian=False), kept("local", 2, LOCAL))

    states = [(each.state, each.expires_in_s) for each in custody.renew(["a", "local", "unknown"], 101.0)]
    assert states == [(RenewalState.ELSEWHERE, None), (RenewalState.RENEWED, None), (RenewalState.ELSEWHERE, None)]
    custody.disconnected()
    assert custody.tick(1000.0) == []


def test_a_holder_is_warned_and_the_warning_is_withdrawn() -> None:
    custody = box(kept())
    warned = ComingEnd("a", EndReason.PREEMPTED, 60.0)

    assert custody.take(Orders(3, 501.0, warnings=(warned,)), 101.0) == [TellHolder("a")]
    warning = custody.warning_of("a")
    assert warning is not None
    assert (warning.reason, warning.ends_s) == (EndReason.PREEMPTED, 161.0)
    assert custody.renew(["a"], 102.0)[0].warning == warning
    custody.take(Orders(3, 502.0, warnings=(ComingEnd("a", None, 0.0),)), 102.0)
    assert custody.warning_of("a") is None


def test_the_death_of_a_waiter_is_told_also_if_the_link_was_away() -> None:
    watch = WatchOrder("w", ProcessId(9, 1.0))
    custody = box()
    assert custody.take(Orders(3, 501.0, watches=(watch,)), 101.0) == [WatchProcess("w", ProcessId(9, 1.0))]
    custody.disconnected()
    assert custody.died("w", 102.0) == []

    custody.announce("http://x", "1", False, None)
    assert WatchProcess("w", ProcessId(9, 1.0)) in custody.take(welcome(watches=(watch,)), 103.0)
    assert custody.died("w", 103.0) == [Send(HolderIsDead("w"))]
    assert custody.take(Orders(3, 504.0, unwatched=("w",)), 104.0) == []


def test_the_time_in_which_the_box_was_away_counts_for_no_lease_and_not_as_silence_of_the_leader() -> None:
    custody = box(kept())
    custody.lose_time(1000.0)
    assert custody.tick(1102.9) == []
    assert custody.renew(["a"], 1103.0)[0].expires_in_s == 10.0
    custody.disconnected()
    assert custody.next_due_at() == 1113.0
    assert custody.tick(1112.9) == []
    assert [type(action) for action in custody.tick(1113.0)] == [Keep, StopWatching, TellHolder]


# --- readings ------------------------------------------------------------------------------------------------------


def test_a_report_has_the_pool_time_that_was_heard_before_the_look_began() -> None:
    custody = box()
    custody.take(Orders(3, 505.0), 105.0)

    assert custody.report([reading(node="x", at=0.0)], 99.9) is None
    report = custody.report([reading(node="x", at=0.0)], 104.9)
    assert report is not None
    assert report.heard == report.changed[0].at == 500.0
    assert custody.report([reading(node="x", at=0.0)], 106.0) == Report(505.0)
    assert custody.report([reading(node="x", at=0.0)], 104.9) is None  # older than what was told


def test_what_has_not_changed_is_not_told_unless_the_leader_waits_for_it() -> None:
    custody = box(kept())
    look = replace(reading(node="x", at=0.0), temperature_c=40.0, power_draw_w=55.0)
    custody.report([look], 100.0)
    assert custody.report([replace(look, temperature_c=41.5, power_draw_w=60.0)], 101.0) == Report(500.0)
    hotter = custody.report([replace(look, temperature_c=50.0)], 101.0)
    assert hotter is not None
    assert len(hotter.changed) == 1

    custody.take(Orders(3, 502.0, ended=("a",), look=True), 102.0)
    before = custody.report([replace(look, temperature_c=50.0)], 101.9)
    assert before == Report(500.0)
    after = custody.report([replace(look, temperature_c=50.0)], 102.1)
    assert after is not None
    assert len(after.changed) == 1


def test_small_changes_of_memory_and_load_are_told_once_a_second() -> None:
    """Each end of a lease calls for a look, and on a busy box all GPUs have changed a little since the last one."""
    custody = box()

    def told(at: float, used_mb: float, load: float) -> int:
        look = replace(reading(node="x", at=at), memory_used_mb=used_mb, utilization_percent=load)
        report = custody.report([look], 100.0 + at)
        assert report is not None
        return len(report.changed)

    assert told(0.0, 800.0, 50.0) == 1
    assert told(0.1, 810.0, 53.0) == 0
    assert told(0.2, 870.0, 50.0) == 1, "a program may have been started"
    assert told(0.3, 870.0, 100.0) == 1
    assert told(0.4, 871.0, 99.0) == 0
    assert told(1.3, 871.0, 99.0) == 1
    assert told(9.0, 871.0, 99.0) == 0


def test_an_agent_whose_look_takes_long_says_that_it_is_there() -> None:
    custody = box()
    custody.report([reading(node="x", at=0.0)], 100.0)

    assert custody.next_due_at() == 101.5
    assert custody.tick(101.5) == [Send(Report(500.0))]
