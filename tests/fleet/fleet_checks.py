"""What must be true of a whole history, when it is over."""

from __future__ import annotations

from math import inf
from typing import Any

from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.state import PoolState
from tests.fleet.simulated_candidate import SETTINGS, SimulatedCandidate
from tests.fleet.simulated_world import World


def check_history(world: World) -> None:
    check_journal(world)
    check_acknowledged(world)
    check_clock(world)
    check_copies(world)


def check_journal(world: World) -> None:
    """Positions, epochs, times and fences only grow; the queue is served in order; no lease ends too early."""
    position = epoch = 0
    at = -inf
    leases = LeasesInJournal(world)
    for stored in world.database.events:
        if stored.end.position != position + 1:
            world.violate(f"position {stored.end.position} follows {position}")
        if stored.epoch < epoch:
            world.violate(f"epoch {stored.epoch} follows {epoch}")
        if stored.event.at < at:
            world.violate(f"the pool's clock went back from {at} to {stored.event.at}")
        position, epoch, at = stored.end.position, stored.epoch, stored.event.at
        leases.check(stored.event)


class LeasesInJournal:
    """The leases of a journal, event by event."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.taken_over = -inf
        self.fences: dict[str, int] = {}
        self.queue: dict[str, int] = {}
        # Those whose grants were withdrawn: they are served again once their clients call, which is not written.
        self.passed_over: set[str] = set()
        self.granted: set[str] = set()
        self.safe_since: dict[str, float] = {}
        self.ttls: dict[str, float] = {}

    def check(self, event: ev.DurableEvent) -> None:
        match event:
            case ev.TakenOver():
                self.taken_over = event.at
            case ev.LeaseQueued():
                self.add(event, event.request)
            case ev.LeaseGranted():
                if event.request is not None:
                    self.add(event, event.request)
                self.check_grant(event)
            case ev.GrantWithdrawn():
                if event.lease_id in self.queue or event.lease_id in self.passed_over:
                    self.world.violate(f"the grant of {event.lease_id} was withdrawn, and it had none")
                self.passed_over.add(event.lease_id)
                self.granted.discard(event.lease_id)
                self.safe_since[event.lease_id] = event.at
            case ev.LeaseEnded():
                self.check_end(event)

    def add(self, event: ev.LeaseQueued | ev.LeaseGranted, request: Request) -> None:
        if event.lease_id in self.ttls and event.lease_id not in self.world.recovered:
            self.world.violate(f"{event.lease_id} was written twice")
        self.queue[event.lease_id], self.ttls[event.lease_id] = event.seq, request.ttl_s
        self.safe_since[event.lease_id] = event.at

    def check_grant(self, event: ev.LeaseGranted) -> None:
        if event.lease_id not in self.queue and event.lease_id not in self.passed_over:
            self.world.violate(f"{event.lease_id} was granted twice")
        self.passed_over.discard(event.lease_id)
        is_late = self.queue.pop(event.lease_id, -inf) > min(self.queue.values(), default=inf)
        if is_late and event.lease_id not in self.world.recovered:
            self.world.violate(f"{event.lease_id} was granted before an earlier request")
        node = event.gpus[0].node
        if event.fence <= self.fences.get(node, 0):
            self.world.violate(f"fence {event.fence} of {node} follows {self.fences[node]}")
        self.fences[node] = event.fence
        self.granted.add(event.lease_id)
        self.safe_since[event.lease_id] = event.at

    def check_end(self, event: ev.LeaseEnded) -> None:
        self.queue.pop(event.lease_id, None)
        self.passed_over.discard(event.lease_id)
        lasted_s = event.at - max(self.taken_over, self.safe_since[event.lease_id])
        is_early = event.reason is EndReason.EXPIRED and lasted_s < self.ttls[event.lease_id] - 1e-6
        client = next(client for client in self.world.clients if client.id == event.lease_id)
        # Of an active lease the box decides (World.check_end).
        is_early = is_early and event.lease_id not in self.granted
        if is_early or (event.reason is EndReason.HOLDER_DIED and not client.is_process_dead):
            self.world.violate(f"{event.lease_id} ended by a take-over: {event.reason} after {lasted_s:.3f} s")


def check_acknowledged(world: World) -> None:
    """What a client was told is in the journal, in the order in which clients were told."""
    database = world.database
    is_lost = database.is_history_lost
    queued = {
        stored.event.lease_id: stored.event.seq
        for stored in database.events
        if isinstance(stored.event, ev.LeaseQueued | ev.LeaseGranted) and stored.event.request is not None
    }
    granted = {stored.event.lease_id for stored in database.events if isinstance(stored.event, ev.LeaseGranted)}
    there = [
        agent.box
        for agent in world.agents.values()
        if not (agent.is_dead or agent.is_stopped) and agent.custody.is_welcome
    ]
    holding = {client.id for client in world.clients if client.believes and client.box in there}
    for lease_id in world.acked_grants:
        # What the database lost is brought back by the boxes, if it is still held.
        if lease_id not in granted and (not is_lost or lease_id in holding):
            world.violate(f"{lease_id} was told of a grant that is not in the journal")
    if is_lost:
        return
    for lease_id in world.acked_requests:
        if lease_id not in queued:
            world.violate(f"{lease_id} was told of a request that is not in the journal")
    asked = {client.id: client.first_sent_at for client in world.clients}
    for first, told_at in world.acked_requests.items():
        for other, seq in queued.items():
            if asked[other] > told_at and seq < queued[first]:
                world.violate(f"{other} came after {first}, and is ahead of it in the queue")


def check_clock(world: World) -> None:
    """The pool's clock goes on as the time does, by whatever machine it is kept."""
    for (began, pool_began, _), (ended, pool_ended, _) in zip(world.take_overs, world.take_overs[1:], strict=False):
        passed, pool_passed = ended - began, pool_ended - pool_began
        if world.database.is_history_lost:
            continue
        if pool_passed > passed * 1.02 + world.set_forward_s + 0.5:
            world.violate(f"the pool's clock went on by {pool_passed:.1f} s in {passed:.1f} s")
        if pool_passed < passed * 0.98 - 1.0 and not world.was_set_back:
            world.violate(f"the pool's clock went on by only {pool_passed:.1f} s in {passed:.1f} s")


def check_copies(world: World) -> None:
    """A leader's pool is what the journal adds up to."""
    if world.database.snapshots_ahead:
        world.violate(f"a snapshot tells what the journal does not have: {world.database.snapshots_ahead}")
    leaders = [c for c in world.candidates if not c.is_dead and not c.is_stopped and c.may_act()]
    idle = [c for c in leaders if c.in_flight is None and not c.waiting]
    for leader in idle:
        if leader.following.end == world.database.row.end and leader.election.row is not None:
            truth = replay(PoolState(settings=SETTINGS), [stored.event for stored in world.database.events])
            for node, fence in truth.fences.items():
                if leader.state.fences.get(node, 0) < fence:
                    world.violate(f"{leader.name} has a lower fence for {node} than the journal, which has {fence}")
            if (found := _digest(leader.state)) != (wanted := _digest(truth)):
                world.violate(f"{leader.name} has {found}, and the journal adds up to {wanted}")


def check_leader(world: World) -> None:
    """A healthy candidate leads 5 s after the last disturbance."""
    healthy = [candidate for candidate in world.candidates if _is_healthy(world, candidate)]
    if not world.database.is_up or not healthy or world.now < world.disturbed_at + 5.0:
        return
    if not any(candidate.may_act() for candidate in world.candidates if not candidate.is_dead):
        world.violate(f"nobody leads, although {[c.name for c in healthy]} could")


def _is_healthy(world: World, candidate: SimulatedCandidate) -> bool:
    is_cut = any(candidate.name in cut and "database" in cut for cut in world.cuts)
    return not (candidate.is_dead or candidate.is_stopped or candidate.is_closing or is_cut)


def _digest(state: PoolState) -> dict[str, Any]:
    leases = {id_: (type(lease).__name__, getattr(lease, "gpus", ())) for id_, lease in sorted(state.leases.items())}
    return {
        "leases": leases,
        "queue": list(state.queue),
        "seq": state.next_seq,
    }
