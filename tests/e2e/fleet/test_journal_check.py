"""The checker of a fleet finds each violation in a history made by hand, and nothing in one that is in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import pytest

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import Request, Wishes
from tests.e2e.fleet.journal_check import FleetHistory, JournalRow, check_fleet, take_overs
from tests.e2e.run_history import RunHistory
from tests.e2e.scribe import TTL_S, Scribe

# The pool's clock is ahead of the boot clock by so much.
BASE = 1000.0


@dataclass
class Journal:
    """A journal that is written by hand. Times are those of the boot clock."""

    rows: list[JournalRow] = field(default_factory=list)
    epoch: int = 0
    joined: dict[str, list[int]] = field(default_factory=dict)
    twins: dict[str, list[int]] = field(default_factory=dict)
    workers: Scribe = field(default_factory=Scribe)
    lost: int = 0
    without: int = 0

    def write(self, event: ev.DurableEvent) -> None:
        self.rows.append(JournalRow(len(self.rows) + 1 + self.lost, self.epoch, event))

    def taken_over(self, epoch: int, at: float, *nodes: str) -> None:
        self.epoch = epoch
        self.write(ev.TakenOver(BASE + at, epoch, "boot", BASE, 0.0))
        for node in nodes:
            self.joined.setdefault(node, []).append(epoch)

    def granted(self, lease: str, at: float, fence: int, node: str = "a", gpu: str = "gpu0") -> None:
        self.write(ev.LeaseGranted(BASE + at, lease, (GpuKey(node, gpu),), fence, BASE + at))

    def queued(self, lease: str, at: float, seq: int, priority: int = 0) -> None:
        self.write(ev.LeaseQueued(BASE + at, lease, Request(Wishes(), priority=priority), seq, BASE + at))

    def ended(self, lease: str, at: float, reason: EndReason = EndReason.RELEASED, by: str | None = None) -> None:
        self.write(ev.LeaseEnded(BASE + at, lease, reason, (), BASE + at, by))

    def history(self) -> FleetHistory:
        head = (self.rows[-1].position if self.rows else 0) + self.without
        return FleetHistory(RunHistory(self.workers.lines), self.rows, head, self.joined, self.twins)

    def found(self) -> list[str]:
        return [violation.kind for violation in check_fleet(self.history())]


@pytest.fixture
def journal() -> Journal:
    """In order: two leaders, two boxes, a client that was told of its grant and renewed it."""
    journal = Journal()
    journal.taken_over(1, 0.0, "a", "b")
    journal.workers.asks("first", 0.5)
    journal.granted("first", 0.9, 1)
    journal.workers.took("first", 1.0, 1)
    journal.workers.renewed("first", 2.0)
    journal.granted("other", 2.0, 1, "b", "gpu1")
    journal.taken_over(2, 5.0, "a", "b")
    journal.ended("first", 2.0 + TTL_S + 0.1, EndReason.EXPIRED)
    journal.granted("second", 5.5, 2)
    return journal


def test_a_history_in_order_has_no_violation(journal: Journal) -> None:
    assert journal.found() == []


def a_position_is_missing(journal: Journal) -> None:
    journal.lost = 1
    journal.ended("second", 6.0)


def the_end_is_missing(journal: Journal) -> None:
    journal.without = 1


def a_leader_was_followed_by_another(journal: Journal) -> None:
    """The epochs do not fall, but the take-over before the event is of a later one."""
    journal.write(ev.TakenOver(BASE + 6.0, 3, "boot", BASE, 0.0))


def a_node_has_not_announced_itself(journal: Journal) -> None:
    journal.taken_over(3, 6.0, "a")
    journal.granted("third", 6.5, 2, "b", "gpu1")


def a_box_obeyed_an_older_leader(journal: Journal) -> None:
    journal.joined["a"].append(1)


def a_twin_was_taken(journal: Journal) -> None:
    journal.twins["a"] = [2]


def a_client_was_told_of_a_grant_that_was_lost(journal: Journal) -> None:
    journal.workers.asks("forgotten", 6.0)
    journal.workers.granted("forgotten", 6.2, 3)


def a_client_was_told_of_another_gpu(journal: Journal) -> None:
    journal.workers.asks("second", 5.4)
    journal.workers.granted("second", 5.6, 2, "gpu7")


def it_expired_though_it_was_renewed(journal: Journal) -> None:
    journal.workers.renewed("first", 4.0)


def the_server_released_it_though_it_was_renewed(journal: Journal) -> None:
    journal.workers.asks("held", 0.0)
    journal.workers.granted("held", 5.6, 2)
    journal.workers.renewed("held", 7.0)
    journal.granted("held", 5.5, 2, "b", "gpu0")
    journal.ended("held", 8.0, by="the server")


def a_fence_is_not_higher(journal: Journal) -> None:
    journal.granted("third", 6.0, 2)


def a_later_request_was_granted_first(journal: Journal) -> None:
    journal.queued("early", 6.0, 1)
    journal.queued("late", 6.1, 2)
    journal.granted("late", 6.2, 3)


@pytest.mark.parametrize(
    ("happens", "kind"),
    [
        (a_position_is_missing, "gap"),
        (the_end_is_missing, "gap"),
        (a_leader_was_followed_by_another, "epoch"),
        (a_node_has_not_announced_itself, "unannounced"),
        (a_box_obeyed_an_older_leader, "obeyed"),
        (a_twin_was_taken, "twin"),
        (a_client_was_told_of_a_grant_that_was_lost, "acknowledged"),
        (a_client_was_told_of_another_gpu, "acknowledged"),
        (it_expired_though_it_was_renewed, "expired"),
        (the_server_released_it_though_it_was_renewed, "expired"),
        (a_fence_is_not_higher, "fence"),
        (a_later_request_was_granted_first, "order"),
    ],
)
def test_what_breaks_a_promise_is_found(journal: Journal, happens: Callable[[Journal], None], kind: str) -> None:
    happens(journal)
    assert journal.found() == [kind]


def test_a_deposed_leader_wrote(journal: Journal) -> None:
    journal.epoch = 1
    journal.ended("second", 6.0)
    assert "epoch" in journal.found()


def test_a_lost_grant_that_the_next_leader_writes_again_is_that_of_the_leader_before(journal: Journal) -> None:
    journal.epoch = 3
    journal.granted("third", 6.0, 2, "b", "gpu1")
    journal.taken_over(3, 6.5, "a")

    assert journal.found() == []


def test_a_grant_that_was_condensed_away_is_in_the_accounting(journal: Journal) -> None:
    journal.workers.asks("old", 0.1)
    journal.workers.granted("old", 0.2, 7)
    history = journal.history()
    history.recorded = {("old", 7)}

    assert check_fleet(history) == []


def test_a_later_request_may_be_more_important_or_the_first_one_gone(journal: Journal) -> None:
    journal.queued("early", 6.0, 1)
    journal.queued("important", 6.1, 2, priority=1)
    journal.granted("important", 6.2, 3)
    journal.queued("late", 6.3, 3)
    journal.ended("early", 6.4, EndReason.CANCELLED)
    journal.granted("late", 6.5, 4)

    assert journal.found() == []


def test_a_request_that_waits_through_all_patience_is_unserved(journal: Journal) -> None:
    workers = journal.workers
    workers.asks("served", 6.0)
    workers.asks("never", 6.1)
    workers.answer("never", 6.2, "queued", status=202)
    workers.asks("refused", 6.2)
    workers.asks("wide", 6.3, gpus=2)
    workers.asks("killed", 6.4)
    workers.killed("killed", 6.5)
    workers.say("failed", 7.5, "refused", call="request_gpu", error="refused")
    workers.asks("later", 7.6)
    workers.lines.append({"what": "patience", "who": "nemesis", "at": 9.0, "since": 7.0})
    workers.answer("served", 8.0, "active")
    workers.answer("never", 9.5, "ended", end_reason="cancelled")

    found = check_fleet(journal.history())

    assert [violation.kind for violation in found] == ["unserved"]
    assert "never's turn 1" in found[0].text


def test_a_take_over_lasts_until_another_leader_grants(journal: Journal) -> None:
    assert take_overs(journal.history(), [3.0, 9.0]) == [pytest.approx(2.5), inf]
