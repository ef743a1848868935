"""The leader and its boxes: what it tells them, and what it makes of what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.fleet.box_actions import BoxAction, Close, Confirmed, Do, NeverKept, Tell
from gpu_worker_pool.core.fleet.boxes import Boxes
from gpu_worker_pool.core.fleet.custody import Custody
from gpu_worker_pool.core.fleet.messages import (
    AgentMessage,
    Announce,
    CannotKeep,
    GrantKept,
    HolderIsDead,
    KeptLease,
    LeaseOver,
    Orders,
    Rejected,
    Report,
    WatchOrder,
    Welcome,
)
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import InventoryGpu, ProcessId
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason, QueuedLease
from gpu_worker_pool.core.model.request import Holder
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import reading, request


class Leader:
    """A leader whose journal is always written at once, unless `is_slow`."""

    def __init__(self) -> None:
        self.state, self.now = PoolState(), 100.0
        self.boxes = Boxes(3, "pool")
        self.is_slow = False
        self.unwritten: list[ev.Event] = []
        self.boxes.written(step(self.state, cmd.TakeOver(3, "boot"), self.now), self.state, self.now)

    def do(self, command: cmd.Command) -> list[BoxAction]:
        self.unwritten += step(self.state, command, self.now)
        return [] if self.is_slow else self.write()

    def write(self) -> list[BoxAction]:
        events, self.unwritten = self.unwritten, []
        return self.carry_out(self.boxes.written(events, self.state, self.now))

    def carry_out(self, actions: Sequence[BoxAction]) -> list[BoxAction]:
        told: list[BoxAction] = []
        for action in actions:
            told += self.do(action.command) if isinstance(action, Do) else [action]
        return told

    def hear(self, session: int, message: AgentMessage) -> list[BoxAction]:
        return self.carry_out(self.boxes.receive(session, message, self.state, self.now))

    def tick(self, seconds: float) -> list[BoxAction]:
        self.now += seconds
        return self.carry_out(self.boxes.tick(self.state, self.now))

    def ask(self, lease_id: str, node: str | None = None, **wants: Any) -> list[BoxAction]:
        asked = request(**wants)
        if node is not None:
            asked = replace(asked, holder=Holder(process=ProcessId(7, 1.0), node=node))
        return self.do(cmd.RequestLease(lease_id, asked))


def announce(node: str = "x", **changed: Any) -> Announce:
    told = Announce(node, f"machine {node}", "boot", f"http://{node}", "1", True, 0, 0, None, (), ())
    return replace(told, **changed)


def fleet(*nodes: str) -> Leader:
    """A leader with a box of one GPU for each name, in this order."""
    leader = Leader()
    for session, node in enumerate(nodes or ("x",), 1):
        leader.hear(session, announce(node))
        leader.hear(session, Report(leader.now, (reading(node=node, at=leader.now),)))
    return leader


def grant_of(actions: Sequence[BoxAction], session: int = 1) -> KeptLease:
    (orders,) = [each.message for each in actions if isinstance(each, Tell) and each.session == session]
    assert isinstance(orders, Orders)
    (grant,) = orders.grants
    return grant


def test_a_gang_is_confirmed_by_all_its_boxes_and_kept_by_one() -> None:
    leader = fleet("x", "y")
    actions = leader.ask("gang", nodes=2)
    first, second = grant_of(actions, 1), grant_of(actions, 2)

    assert (first.is_custodian, second.is_custodian) == (True, False)
    assert leader.hear(2, GrantKept("gang", second.fence)) == []
    assert leader.hear(1, GrantKept("gang", first.fence)) == [Confirmed("gang")]
    told = [
        each.message
        for each in leader.hear(1, LeaseOver("gang", first.fence, EndReason.EXPIRED))
        if isinstance(each, Tell)
    ]
    assert [each.ended for each in told if isinstance(each, Orders)] == [("gang",), ("gang",)]


def test_a_grant_that_no_client_was_told_of_is_taken_back_if_its_box_stays_away() -> None:
    leader = fleet("x", "y")
    grant = grant_of(leader.ask("a", among=("GPU-x-0",)))
    leader.carry_out(leader.boxes.closed(1, leader.now))
    leader.hear(2, Report(leader.now))
    leader.tick(2)
    assert isinstance(leader.state.leases["a"], ActiveLease), "the box may be back soon"

    for _ in range(4):
        leader.hear(2, Report(leader.now))
        leader.tick(2)
    assert list(leader.state.queue) == ["a"], "it waits again, in its place"
    assert leader.boxes.is_confirmed("a"), "its client is told that it waits"
    (welcome,) = [each.message for each in leader.hear(3, announce(leases=(grant,))) if isinstance(each, Tell)]
    assert isinstance(welcome, Welcome)
    assert welcome.leases == (), "the box drops it"


def test_a_grant_that_is_being_taken_back_is_confirmed_no_more() -> None:
    leader = fleet("x", "y")
    grant = grant_of(leader.ask("a", among=("GPU-x-0",)))
    leader.carry_out(leader.boxes.closed(1, leader.now))
    leader.hear(2, Report(leader.now))
    leader.is_slow = True
    leader.tick(11)
    assert Confirmed("a") not in leader.hear(3, announce(leases=(grant,)))
    assert Confirmed("a") not in leader.write()


def test_what_a_client_was_told_of_stays_while_its_boxes_are_away() -> None:
    leader = fleet("x", "y")
    grant = grant_of(leader.ask("kept", among=("GPU-x-0",)))
    leader.hear(1, GrantKept("kept", grant.fence))
    # Half of a gang that an earlier leader granted, and the database lost.
    asked = replace(
        grant, id="back", request=request(nodes=2), gpus=("GPU-y-0",), fence=grant.fence + 5, granted_at=1.0
    )
    leader.hear(3, announce("y", leases=(asked,)))
    for session in (1, 3):
        leader.carry_out(leader.boxes.closed(session, leader.now))
    leader.tick(60)
    assert all(isinstance(leader.state.leases[lease_id], ActiveLease) for lease_id in ("kept", "back"))


def test_a_grant_that_its_box_has_never_kept_is_noticed() -> None:
    leader = fleet("x", "y")
    first, second = grant_of(leader.ask("a"), 1), grant_of(leader.ask("b"), 2)

    def never_kept(*announced: Announce) -> list[BoxAction]:
        """What the next leader notices."""
        boxes = Boxes(4, "pool")
        boxes.written((), leader.state, leader.now)
        heard = [boxes.receive(number, each, leader.state, leader.now) for number, each in enumerate(announced)]
        return [each for actions in heard for each in actions if isinstance(each, NeverKept)]

    late = announce(epoch_seen=3, fence_seen=first.fence - 1)
    assert never_kept(late, announce("y", epoch_seen=3, leases=(second,))) == [NeverKept("a")]
    assert never_kept(announce(epoch_seen=3, leases=(first,)), late) == [], "this leader knows that the box had it"
    # A box that lost its file, or the last of it with its power, may have had it.
    assert never_kept(announce(), announce("y", epoch_seen=3, boot_id="later")) == []


def test_a_box_looks_at_once_if_a_request_waits_and_soon_otherwise() -> None:
    leader = fleet()
    grant = grant_of(leader.ask("a"))
    (ended,) = leader.hear(1, LeaseOver("a", grant.fence, EndReason.HOLDER_DIED))
    assert ended == Tell(1, Orders(3, leader.now, ended=("a",)))
    leader.now = leader.boxes.next_due_at()
    assert leader.boxes.tick(leader.state, leader.now) == [Tell(1, Orders(3, leader.now, look=True))]
    assert leader.boxes.next_due_at() > leader.now, "once"

    leader = fleet()
    grant = grant_of(leader.ask("a"))
    leader.hear(1, LeaseOver("a", grant.fence, EndReason.HOLDER_DIED))
    assert leader.ask("b") == [Tell(1, Orders(3, leader.now, look=True))]

    leader = fleet()
    grant = grant_of(leader.ask("a"))
    leader.ask("b")
    (ended,) = leader.hear(1, LeaseOver("a", grant.fence, EndReason.HOLDER_DIED))
    assert ended == Tell(1, Orders(3, leader.now, ended=("a",), look=True))


def test_a_box_that_was_renamed_is_rejected_while_it_has_leases() -> None:
    """Its GPUs would be granted a second time, under the new name."""
    leader = fleet()
    grant = grant_of(leader.ask("a"))
    leader.carry_out(leader.boxes.closed(1, leader.now))
    renamed = announce("y", machine_id="machine x", leases=(grant,), fence_seen=grant.fence, epoch_seen=3)

    rejected, closed = leader.hear(2, renamed)

    assert isinstance(rejected, Tell)
    assert isinstance(rejected.message, Rejected)
    assert "is known as x, which has 1 lease" in rejected.message.why
    assert isinstance(closed, Close)
    assert "a" in leader.state.leases
    leader.hear(3, announce(leases=(grant,), fence_seen=grant.fence, epoch_seen=3))
    leader.hear(3, LeaseOver("a", grant.fence, EndReason.EXPIRED))
    leader.carry_out(leader.boxes.closed(3, leader.now))
    assert any(
        isinstance(told, Tell) and isinstance(told.message, Welcome)
        for told in leader.hear(4, announce("y", machine_id="machine x"))
    )


def test_a_box_with_simulated_gpus_is_rejected_by_a_fleet_of_real_ones() -> None:
    leader = fleet()
    simulated = (InventoryGpu("GPU-9", 0, "Simulated NVIDIA A100", 80_000.0),)

    rejected, close = leader.hear(2, announce("laptop", gpus=simulated))

    assert isinstance(rejected, Tell)
    assert isinstance(rejected.message, Rejected)
    assert "this box has simulated GPUs, and the fleet has real ones" in rejected.message.why
    assert isinstance(close, Close)


def test_a_message_before_the_announcement_closes_the_session() -> None:
    assert isinstance(Leader().hear(1, GrantKept("a", 1))[0], Close)


def test_a_report_of_nothing_new_costs_nothing_until_the_readings_grow_stale() -> None:
    leader = fleet()
    heard: list[list[BoxAction]] = []
    for _ in range(12):
        leader.now += 1.0
        heard.append(leader.boxes.receive(1, Report(leader.now), leader.state, leader.now))

    observed = [each.command for actions in heard for each in actions if isinstance(each, Do)]
    assert 1 <= len(observed) <= 3
    assert all(isinstance(command, cmd.Observe) and len(command.readings) == 1 for command in observed)


def test_a_gpu_that_its_box_reads_no_more_is_unknown_once_its_reading_is_stale() -> None:
    """A GPU off the bus, or a new partition of MIG: the probe does not name it any more."""
    leader, custody = Leader(), Custody("x", "machine x", "boot", 0.0)
    both = [reading(index, node="x", at=0.0) for index in (0, 1)]
    for told in leader.hear(1, custody.announce("http://x", "1", False, None)):
        assert isinstance(told, Tell)
        custody.take(told.message, 0.0)
    clock = 0.0
    for readings in ([both] * 3) + ([both[:1]] * 30):
        clock += 1.0
        for told in leader.tick(1.0):
            assert isinstance(told, Tell)
            custody.take(told.message, clock)
        report = custody.report([replace(each, at=clock) for each in readings], clock)
        assert report is not None
        leader.hear(1, report)

    ages_s = [leader.now - slot.reading.at for slot in leader.state.slots.values() if slot.reading]
    assert min(ages_s) <= 2.0
    assert max(ages_s) > leader.state.settings.stale_after_s
    leader.ask("both", gpus=2)
    assert isinstance(leader.state.leases["both"], QueuedLease)
    custody.disconnected()


def test_a_box_that_cannot_write_is_granted_nothing_and_its_grants_go_back_to_their_places() -> None:
    leader = fleet("x", "y")
    leader.ask("waits", among=("GPU-y-0",))
    leader.hear(2, GrantKept("waits", 1))
    leader.ask("first", among=("GPU-x-0", "GPU-y-0"))
    leader.ask("second")
    fence = leader.state.active("first").fence

    told = leader.hear(1, CannotKeep("the disk is full"))

    assert Tell(1, Orders(3, leader.now, ended=("first",), look=True)) in told, (
        "the box keeps it no more, whenever it can write again"
    )
    assert list(leader.state.queue) == ["first", "second"]
    assert [box.trouble for box in leader.boxes.boxes.values()] == ["the disk is full", None]
    leader.hear(1, Report(leader.now, (reading(node="x", at=leader.now),)))
    assert list(leader.state.queue) == ["first", "second"], "nothing is granted there"
    assert Confirmed("first") not in leader.hear(1, GrantKept("first", fence))
    # It can write again, and says so by another announcement on the same link.
    assert not any(isinstance(each, Close) for each in leader.hear(1, announce()))
    assert [box.trouble for box in leader.boxes.boxes.values()] == [None, None]
    leader.hear(1, Report(leader.now, (reading(node="x", at=leader.now),)))
    assert list(leader.state.queue) == ["second"]


def test_a_box_speaks_for_its_own_node_only() -> None:
    leader = fleet("x", "y")
    leader.ask("waits for both", node="x", gpus=1, model="none such")
    leader.ask("a", node="x", among=("GPU-x-0",))
    lease_id, fence = "a", 1

    assert leader.hear(2, HolderIsDead(lease_id)) == []
    assert leader.hear(2, LeaseOver(lease_id, fence, EndReason.EXPIRED)) == [
        Tell(2, Orders(3, leader.now, ended=("a",)))
    ]
    assert leader.hear(2, Report(leader.now, (reading(node="x", at=leader.now),))) == []
    assert lease_id in leader.state.leases


def test_a_waiting_process_is_watched_by_its_box() -> None:
    leader = fleet()
    leader.ask("a")

    (told,) = leader.ask("w", node="x")
    assert told == Tell(1, Orders(3, leader.now, watches=(WatchOrder("w", ProcessId(7, 1.0)),)))
    (told,) = leader.hear(1, HolderIsDead("w"))
    assert told == Tell(1, Orders(3, leader.now, unwatched=("w",)))


def test_a_box_that_an_operator_forgot_is_shown_no_more() -> None:
    leader = fleet("x", "y")
    leader.carry_out(leader.boxes.closed(2, leader.now))
    assert [leader.boxes.boxes[node].is_up for node in ("x", "y")] == [True, False]

    leader.do(cmd.ForgetNode("y", "root"))

    assert set(leader.boxes.boxes) == {"x"}
    leader.hear(3, announce("y"))
    assert set(leader.boxes.boxes) == {"x", "y"}
