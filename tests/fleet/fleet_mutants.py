"""Fleets in which one guard is missing. The simulation must notice each of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf

from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.fleet.election import (
    ClaimLeadership,
    Election,
    ElectionAction,
    ElectionQuestion,
    LeadershipWon,
    RenewLeadership,
)
from gpu_worker_pool.core.fleet.following import Following
from gpu_worker_pool.core.fleet.leadership import Append, JournalEnd, LeaderRow
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from tests.fleet.agent_mutants import AGENT_MUTANTS, FleetMutant
from tests.fleet.batch import Batch
from tests.fleet.simulated_candidate import SimulatedCandidate
from tests.fleet.simulated_database import SimulatedDatabase
from tests.fleet.simulation import Fleet


class TrustsFromAnswer(Election):
    def answered(self, question: ElectionQuestion, row: LeaderRow | None, now: float) -> list[ElectionAction]:
        if isinstance(question, RenewLeadership):
            question = replace(question, sent_at=now)
        if self._asked is not None:
            self._asked = replace(self._asked, sent_at=now)
        return Election.answered(self, question, row, now)


class ForgetsEpochs(Election):
    def _ask(self, now: float) -> ElectionQuestion:
        question = Election._ask(self, now)
        return replace(question, seen_epoch=0) if isinstance(question, ClaimLeadership) else question


class ClaimsTaken(Election):
    """Leads although the database refused its claim or renewal."""

    def answered(self, question: ElectionQuestion, row: LeaderRow | None, now: float) -> list[ElectionAction]:
        return Election.answered(self, question, self.row if row is None else row, now)


class ComparesNothing(Following):
    def misses(self, end: JournalEnd) -> bool:
        return False


class TrustFromAnswer(SimulatedCandidate):
    election_type = TrustsFromAnswer


class NoTrustWindow(SimulatedCandidate):
    def start(self) -> None:
        self.pace = replace(self.pace, trust_s=inf)
        super().start()


class EpochsForgotten(SimulatedCandidate):
    election_type = ForgetsEpochs


class RefusalIgnored(SimulatedCandidate):
    election_type = ClaimsTaken


class NothingCompared(SimulatedCandidate):
    following_type = ComparesNothing


class NoBatchId(SimulatedCandidate):
    """Cannot tell its own append from nothing: it writes it again."""

    def settle(self, batch: Batch, append: Append, row: LeaderRow) -> None:
        if (row.epoch, row.term) == (append.epoch, append.term) and row.end.position > append.end.position:
            self.following.end = row.end
            self.send(batch)
        else:
            super().settle(batch, append, row)


class BootIdEndsLeases(SimulatedCandidate):
    """A take-over by another boot counts as a reboot of all boxes."""

    def after_take_over(self, won: LeadershipWon) -> list[ev.DurableEvent]:
        announcements = [cmd.AnnounceNode(node, self.name, None) for node in sorted(self.state.nodes)]
        events = [event for command in announcements for event in step(self.state, command, self.pool_now())]
        return [event for event in events if isinstance(event, ev.DurableEvent)]


class OwnBootClock(SimulatedCandidate):
    def take_over_command(self, won: LeadershipWon) -> cmd.TakeOver:
        self.clock_base = 0.0
        return cmd.TakeOver(won.epoch, f"{self.name}-boot", 0.0, won.row.wall_now - won.heard_at)


class SnapshotsAhead(SimulatedCandidate):
    def write_snapshot_if_due(self) -> None:
        if self.following.end.position - self.following.snapshot >= self.following.snapshot_every:
            self.write_snapshot()


MUTANTS = (
    FleetMutant(
        "an append checks epoch and term", Fleet(database=partial(SimulatedDatabase, checks_epoch=False)), near=295
    ),
    FleetMutant("an append checks the term", Fleet(database=partial(SimulatedDatabase, checks_term=False)), near=295),
    FleetMutant("an append checks the head", Fleet(database=partial(SimulatedDatabase, checks_head=False))),
    FleetMutant("an append has an id", Fleet(NoBatchId), near=174),
    FleetMutant("a take-over ends no lease", Fleet(BootIdEndsLeases)),
    FleetMutant("trust counts from the send", Fleet(TrustFromAnswer), near=3027),
    FleetMutant("trust ends", Fleet(NoTrustWindow)),
    FleetMutant("the pool's clock goes on", Fleet(OwnBootClock)),
    FleetMutant(
        "no snapshot is ahead of the head",
        Fleet(SnapshotsAhead, partial(SimulatedDatabase, checks_snapshot=False)),
        near=440,
    ),
    FleetMutant("epochs are remembered", Fleet(EpochsForgotten)),
    FleetMutant("a refused claim or renewal is refused", Fleet(RefusalIgnored)),
    FleetMutant(
        "the journal is compared with what is known",
        Fleet(NothingCompared, partial(SimulatedDatabase, checks_past=False)),
    ),
    *AGENT_MUTANTS,
)
