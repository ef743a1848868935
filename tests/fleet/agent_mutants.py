"""Fleets in which one guard of the agents, or of the leader towards them, is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from gpu_worker_pool.core.fleet.box_actions import BoxAction, Do
from gpu_worker_pool.core.fleet.boxes import Boxes
from gpu_worker_pool.core.fleet.custody import Custody
from gpu_worker_pool.core.fleet.custody_actions import CustodyAction, Keep
from gpu_worker_pool.core.fleet.messages import AgentMessage, Announce, LeaseOver, Report
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason, Lease
from gpu_worker_pool.core.model.state import PoolState
from tests.fleet.batch import Batch
from tests.fleet.simulated_agent import SimulatedAgent
from tests.fleet.simulated_candidate import SimulatedCandidate
from tests.fleet.simulated_client import SimulatedClient
from tests.fleet.simulated_leader import SimulatedLeader
from tests.fleet.simulation import Fleet


@dataclass(frozen=True)
class FleetMutant:
    """A guard, and a fleet without it. The search begins at `near`, to find it soon."""

    guard: str
    fleet: Fleet
    near: int = 0


# --- the leader ------------------------------------------------------------------------------------------------------


class LooksItself(SimulatedLeader):
    """Takes readings of boxes that have not announced themselves."""

    def open(self, batch: Batch) -> None:
        super().open(batch)
        for box in self.world.boxes.values():
            self.do(cmd.AnnounceNode(box.name, "boot"))
            self.do(cmd.Observe((replace(box.look(), at=self.now()),)))


class ReceivedMinusAge(Boxes):
    def receive(self, session: int, message: AgentMessage, state: PoolState, now: float) -> list[BoxAction]:
        if isinstance(message, Report):
            message = replace(message, heard=now)
        return super().receive(session, message, state, now)


class ExpiresItself(SimulatedLeader):
    """Ends leases by their TTL, counted from the grant."""

    def go_on(self) -> None:
        if self.may_act():
            state, now = self.candidate.state, self.now()
            for lease in [lease for lease in state.leases.values() if isinstance(lease, ActiveLease)]:
                due_at = state.expires_at(lease.id)
                if due_at is not None and due_at <= now:
                    self.do(cmd.EndLease(lease.id, EndReason.EXPIRED))
        super().go_on()


class TellsUnkept(SimulatedLeader):
    def is_confirmed(self, lease_id: str) -> bool:
        return True


class TellsUntaken(SimulatedLeader):
    """Tells a waiter of a grant that it makes while the waiter is answered."""

    def is_untaken(self, lease_id: str) -> bool:
        return False


class TrustsTheJournal(SimulatedClient):
    """Takes a lease of its own box from an earlier leader for its own, though that box has said nothing yet."""

    def hold(self, lease: ActiveLease, sent_at: float) -> None:
        if lease.ttl_s is None:
            self.world.left_s[self.id] = inf
        super().hold(lease, sent_at)


class HearsNoSilence(Boxes):
    def _silenced(self, session: int) -> list[BoxAction]:
        return [action for action in super()._silenced(session) if not isinstance(action, Do)]


class BringsNothingBack(Boxes):
    def _commands_of(self, message: Announce) -> list[cmd.Command]:
        return [each for each in super()._commands_of(message) if not isinstance(each, cmd.RecoverLease)]


class RaisesNoFence(Boxes):
    def _commands_of(self, message: Announce) -> list[cmd.Command]:
        return super()._commands_of(replace(message, fence_seen=0))


class TellsAtOnce(SimulatedCandidate):
    """Tells the boxes before it is written."""

    def gather(self, events: list[ev.Event]) -> Batch | None:
        told = [event for event in events if isinstance(event, ev.DurableEvent | ev.NodeAnnounced)]
        if self.leader is not None and told:
            self.leader.written(told)
        batch = super().gather(events)
        if batch is not None:
            batch.told.clear()
        return batch


# --- the agent -------------------------------------------------------------------------------------------------------


class ObeysAll(Custody):
    def _why_refused(self, message: Any, link: Any) -> str | None:
        return None


class TakesAll(Boxes):
    def _why_rejected(self, message: Announce, state: PoolState, now: float) -> str | None:
        return None


class TellsEndsFirst(Custody):
    def _ended(self, over: LeaseOver, gpus: tuple[str, ...]) -> list[CustodyAction]:
        actions = super()._ended(over, gpus)
        return sorted(actions, key=lambda action: isinstance(action, Keep))


class KeepsLast(Custody):
    def _granted(self, lease: Any) -> list[CustodyAction]:
        return sorted(super()._granted(lease), key=lambda action: isinstance(action, Keep))


class ForgetsAtRestart(SimulatedAgent):
    def load(self) -> Custody:
        leases, self.disk.leases = self.disk.leases, {}
        custody = super().load()
        custody.fence_seen = max([custody.fence_seen, *(lease.fence for lease in leases.values())])
        return custody


class RenewsAtLeader(SimulatedClient):
    """Takes the word of a leader, old or new, for a heartbeat."""

    def renew(self) -> None:
        sent_at, world, candidate = self.world.now, self.world, self.world.candidates[self.target]

        def answered(events: list[ev.Event] | None, lease: Lease | None) -> None:
            if self.stage in {"holds", "checks"} and isinstance(lease, ActiveLease):
                self.renewed(sent_at)
            elif self.stage in {"holds", "checks"}:
                self.target = (self.target + 1) % len(world.candidates)
                world.at(0.15, self.send)

        world.call(self, candidate, cmd.Renew((self.id,)), answered)


def led(leader: type[SimulatedLeader]) -> Fleet:
    return Fleet(type(leader.__name__, (SimulatedCandidate,), {"leader_type": leader}))


def boxed(boxes: type[Boxes]) -> Fleet:
    return led(type(boxes.__name__, (SimulatedLeader,), {"boxes_type": boxes}))


def kept(custody: type[Custody], fleet: Fleet = Fleet()) -> Fleet:  # noqa: B008 - it is frozen
    return replace(fleet, agent=type(custody.__name__, (SimulatedAgent,), {"custody_type": custody}))


AGENT_MUTANTS: Sequence[FleetMutant] = (
    FleetMutant("a box announces itself first", led(LooksItself)),
    FleetMutant("a reading has the pool time heard before", boxed(ReceivedMinusAge), near=21537),
    FleetMutant("the box ends a lease by its TTL, not the leader", led(ExpiresItself)),
    FleetMutant("a client is told of a grant that its box keeps", led(TellsUnkept)),
    FleetMutant("a waiter takes its grant up by a call after it", led(TellsUntaken)),
    FleetMutant("a box says whether it still has a lease", Fleet(client=TrustsTheJournal), near=7176),
    FleetMutant("nothing is granted on a silent box", boxed(HearsNoSilence)),
    FleetMutant("boxes bring back what the database lost", boxed(BringsNothingBack), near=16),
    FleetMutant("fences rise to what a box has seen", boxed(RaisesNoFence), near=1744),
    FleetMutant("boxes are told what is written", Fleet(TellsAtOnce), near=172),
    FleetMutant("an agent obeys no older epoch", kept(ObeysAll, boxed(TakesAll)), near=1189),
    FleetMutant("an end is on the disk before it is told", kept(TellsEndsFirst), near=2801),
    FleetMutant("a grant is on the disk before it is confirmed", kept(KeepsLast), near=1121),
    FleetMutant("the box counts heartbeats, not a leader", Fleet(client=RenewsAtLeader)),
    FleetMutant("an agent has its leases on its disk", Fleet(agent=ForgetsAtRestart), near=23),
)
