"""The checker of a fleet finds each violation in a history made by hand, and nothing in one that is in order."""

from __future__ import annotations

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
        head = self.rows[-1].position if self.rows else 0
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


def test_a_position_is_missing(journal: Journal) -> None:
    journal.lost = 1
    journal.ended("second", 6.0)

    assert journal.found() == ["gap"]


def test_the_end_of_the_journal_is_missing(journal: Journal) -> None:
    history = journal.history()
    history.head += 1

    assert [violation.kind for violation in check_fleet(history)] == ["gap"]


def test_a_deposed_leader_wrote(journal: Journal) -> None:
    journal.epoch = 1
    journal.ended("second", 6.0)

    assert "epoch" in journal.found()


def test_an_event_of_a_leader_that_has_been_followed_by_another(journal: Journal) -> None:
    """The epochs do not fall, but the take-over before the event is of a later one."""
    journal.write(ev.TakenOver(BASE + 6.0, 3, "boot", BASE, 0.0))

    assert journal.found() == ["epoch"]


def test_a_lost_grant_that_the_next_leader_writes_again_is_that_of_the_leader_before(journal: Journal) -> None:
    journal.epoch = 3
    journal.granted("third", 6.0, 2, "b", "gpu1")
    journal.taken_over(3, 6.5, "a")

    assert journal.found() == []


def test_a_grant_on_a_node_that_has_not_announced_itself_to_this_leader(journal: Journal) -> None:
    journal.taken_over(3, 6.0, "a")
    journal.granted("third", 6.5, 2, "b", "gpu1")

    assert journal.found() == ["unannounced"]


def test_a_box_obeyed_an_older_leader(journal: Journal) -> None:
    journal.joined["a"].append(1)

    assert journal.found() == ["obeyed"]


def test_a_second_box_of_the_same_name_was_taken(journal: Journal) -> None:
    journal.twins["a"] = [2]

    assert journal.found() == ["twin"]


def test_a_client_was_told_of_a_grant_that_was_lost(journal: Journal) -> None:
    journal.workers.asks("forgotten", 6.0)
    journal.workers.granted("forgotten", 6.2, 3)

    assert journal.found() == ["acknowledged"]


def test_a_client_was_told_of_another_gpu(journal: Journal) -> None:
    journal.workers.asks("second", 5.4)
    journal.workers.granted("second", 5.6, 2, "gpu7")

    assert journal.found() == ["acknowledged"]


def test_a_grant_that_was_condensed_away_is_in_the_accounting(journal: Journal) -> None:
    journal.workers.asks("old", 0.1)
    journal.workers.granted("old", 0.2, 7)
    history = journal.history()
    history.recorded = {("old", 7)}

    assert check_fleet(history) == []


def test_a_lease_expired_though_its_box_took_a_renewal(journal: Journal) -> None:
    journal.workers.renewed("first", 4.0)

    assert journal.found() == ["expired"]


def test_the_server_released_a_lease_though_its_box_took_a_renewal(journal: Journal) -> None:
    journal.workers.asks("held", 0.0)
    journal.workers.granted("held", 5.6, 2)
    journal.workers.renewed("held", 7.0)
    journal.granted("held", 5.5, 2, "b", "gpu0")
    journal.ended("held", 8.0, by="the server")

    assert journal.found() == ["expired"]


def test_a_later_grant_of_a_gpu_has_no_higher_fence(journal: Journal) -> None:
    journal.granted("third", 6.0, 2)

    assert journal.found() == ["fence"]


def test_a_later_request_for_the_same_was_granted_first(journal: Journal) -> None:
    journal.queued("early", 6.0, 1)
    journal.queued("late", 6.1, 2)
    journal.granted("late", 6.2, 3)

    assert journal.found() == ["order"]


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
