"""The world around the candidates: time, network, the database's machine, boxes with GPUs, and clients. One seed decides all."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_worker_pool.core.fleet.custody_actions import RenewalState
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason, Lease
from tests.fleet.batch import Answer
from tests.fleet.simulated_agent import SimulatedAgent
from tests.fleet.simulated_box import Box
from tests.fleet.simulated_candidate import SimulatedCandidate
from tests.fleet.simulated_client import SimulatedClient
from tests.fleet.simulated_database import SimulatedDatabase
from tests.fleet.simulated_leader import SimulatedLeader
from tests.fleet.simulated_link import Link
from tests.fleet.simulated_process import SimulatedProcess

TIMEOUT_S = 1.0
DAY_S = 86_400.0
DATABASE = "database"


class Violation(AssertionError):  # noqa: N818 - a broken promise, in the trace and in the report
    """A promise was broken."""


def first_of(
    then: Callable[[Any], None], failed: Callable[[], None]
) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """The same two, of which only the first that is called does something."""
    is_settled = False

    def settle(action: Callable[..., None], *answer: Any) -> None:
        nonlocal is_settled
        if not is_settled:
            is_settled = True
            action(*answer)

    return partial(settle, then), partial(settle, failed)


class World:
    def __init__(
        self,
        seed: int,
        database: SimulatedDatabase,
        candidate_type: type[SimulatedCandidate],
        agent_type: type[SimulatedAgent] = SimulatedAgent,
        *,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.trace = trace
        self.database = database
        self.schedule: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.tickets = 0
        self.ids = 0
        # Pairs of sender and receiver between which nothing gets through.
        self.cuts: set[tuple[str, str]] = set()
        self.slow_share = 0.0
        # When something last happened that may delay a take-over.
        self.disturbed_at = 0.0
        # Whether the database can let another candidate lead while the old leader still trusts itself.
        self.can_expire_early = False
        # The candidate that is stopped when it asks the database next.
        self.freezes_next: SimulatedCandidate | None = None
        self.set_forward_s = 0.0
        self.was_set_back = False
        # True time and pool time of every take-over.
        self.take_overs: list[tuple[float, float, int]] = []
        rng = self.rng
        self.links = 0
        self.boxes = {name: Box(self, name) for name in ("n1", "n2")}
        self.agents = {
            name: agent_type(
                self, box, f"machine-{name}", clock_offset_s=rng.uniform(0, 30) * DAY_S, drift=rng.uniform(-0.01, 0.01)
            )
            for name, box in self.boxes.items()
        }
        # How much of its TTL is left at least, as the client of a lease was last told.
        self.left_s: dict[str, float] = {}
        # Leases that were written when their box had them already: the database had lost them.
        self.recovered: set[str] = set()
        # The epoch in which a lease was granted.
        self.granted_in: dict[str, int] = {}
        self.candidates = [
            candidate_type(
                self,
                f"c{number}",
                clock_offset_s=rng.uniform(0, 30) * DAY_S,
                drift=rng.uniform(-0.01, 0.01),
                spread_s=0.1 * number,
            )
            for number in range(rng.choice((2, 2, 2, 3, 3, 5)))
        ]
        self.clients: list[SimulatedClient] = []
        self.acked_grants: dict[str, float] = {}
        self.acked_requests: dict[str, float] = {}

    # Time

    def at(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        self.tickets += 1
        heapq.heappush(self.schedule, (self.now + delay_s, self.tickets, action, args))

    def run(self, until: float) -> None:
        schedule, pop = self.schedule, heapq.heappop
        while schedule and schedule[0][0] <= until:
            self.now, _, action, args = pop(schedule)
            action(*args)
        self.now = until

    def new_id(self, what: str) -> str:
        self.ids += 1
        return f"{what}{self.ids}"

    def log(self, who: str, what: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:8.3f}  {who:9} {what}")

    def disturb(self, what: str) -> None:
        self.disturbed_at = max(self.disturbed_at, self.now)
        self.log("*", what)

    # Network

    def delay(self) -> float:
        share = self.rng.random()
        return 0.002 + 0.02 * share if share >= self.slow_share else self.rng.uniform(0.2, 3.5)

    def ask_database(
        self,
        candidate: SimulatedProcess,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        then: Callable[[Any], None],
        failed: Callable[[], None],
    ) -> None:
        """Carry out a statement, now or later; tell its answer, or that none came in time."""
        out_s, back_s, incarnation = self.delay(), self.delay(), candidate.incarnation
        is_cut, may_time_out = (candidate.name, DATABASE) in self.cuts, out_s + back_s > TIMEOUT_S
        if may_time_out and not is_cut:
            then, failed = first_of(then, failed)

        def carry_out() -> None:
            if out_s > TIMEOUT_S:
                self.disturb(f"a late statement of {candidate.name} is carried out")
            if not self.database.is_up:
                self.at(back_s, candidate.run, incarnation, failed)
                return
            answer = call(self.now, *args)
            if self.database.foreign_writes:
                self.violate(f"{candidate.name} wrote without the leadership")
            if call == self.database.append and answer is not None:
                self.note_written(candidate, args[-1])
            if self.cuts and (DATABASE, candidate.name) in self.cuts:
                self.at(max(TIMEOUT_S - out_s, 0.0), candidate.run, incarnation, failed)
            else:
                self.at(back_s, candidate.run, incarnation, then, answer)

        if self.freezes_next is candidate:
            self.freezes_next = None
            self.at(0.001, candidate.freeze)
        if is_cut or may_time_out:
            self.at(TIMEOUT_S, candidate.run, incarnation, failed)
        if not is_cut:
            self.at(out_s, carry_out)

    def call(self, client: SimulatedClient, candidate: SimulatedCandidate, command: Any, answer: Answer) -> None:
        """A client's call to a candidate, and the way back of the answer."""
        name = client.id

        def answered(events: list[ev.Event] | None, lease: Lease | None) -> None:
            if events is not None:
                self.check_may_answer(candidate)
            if (candidate.name, "clients") not in self.cuts:
                self.at(self.delay(), answer, events, lease)

        if not candidate.is_dead and ("clients", candidate.name) not in self.cuts:
            self.at(self.delay(), candidate.run, candidate.incarnation, candidate.call, command, answered)
        elif self.trace is not None:
            self.log(name, f"does not reach {candidate.name}")

    # Boxes

    def agent_of(self, node: str) -> SimulatedAgent:
        return self.agents[node]

    def is_cut(self, sender: str, receiver: str) -> bool:
        """Between a box and a candidate."""
        if not self.cuts:
            return False
        ways = ((sender, receiver), (sender, "boxes"), ("boxes", receiver), (sender, "leader"), ("leader", receiver))
        return any(way in self.cuts for way in ways)

    def connect(self, agent: SimulatedAgent, candidate: SimulatedCandidate) -> None:
        """An agent asks a candidate whether it leads, and connects."""
        incarnation = agent.incarnation

        def reach() -> None:
            leader = candidate.leader
            if leader is None or leader.is_over or not candidate.may_act() or agent.incarnation != incarnation:
                return
            if self.is_cut(agent.name, candidate.name) or self.is_cut(candidate.name, agent.name):
                return
            link = Link(self, agent, leader)
            leader.accept(link)
            agent.run(incarnation, agent.connected, link)

        if not candidate.is_dead and not candidate.is_stopped:
            self.at(self.delay(), candidate.run, candidate.incarnation, reach)

    def call_agent(self, client: SimulatedClient, node: str, answer: Callable[[RenewalState], None]) -> None:
        """A heartbeat to the box that keeps a lease."""
        agent = self.agent_of(node)

        def answered(state: RenewalState) -> None:
            self.at(self.delay(), answer, state)

        if not agent.is_dead:
            self.at(self.delay(), agent.run, agent.incarnation, agent.renew, client.id, answered)

    def process_died(self, pid: int) -> None:
        for agent in self.agents.values():
            if not agent.is_dead:
                self.at(0.01, agent.run, agent.incarnation, agent.process_died, pid)

    # What must not happen

    def violate(self, what: str) -> None:
        raise Violation(f"{what}, at {self.now:.3f} s")

    def note_opened(self, candidate: SimulatedCandidate, epoch: int) -> None:
        self.take_overs.append((self.now, candidate.pool_now(), epoch))

    def check_may_answer(self, candidate: SimulatedCandidate) -> None:
        """An answer that counts comes only from the candidate that leads."""
        mine = candidate.election.leadership
        term = None if mine is None else mine.term
        if term != self.database.row.term and not self.can_expire_early:
            self.violate(f"{candidate.name} answered although {self.database.row.holder} leads")

    def note_written(self, candidate: SimulatedProcess, events: tuple[ev.DurableEvent, ...]) -> None:
        self.log(candidate.name, f"wrote {', '.join(type(event).__name__ for event in events)}")
        for event in events:
            if isinstance(event, ev.LeaseGranted):
                self.check_grant(event)
            elif isinstance(event, ev.GrantWithdrawn):
                self.granted_in.pop(event.lease_id, None)
                self.check_withdrawn(event)
            elif isinstance(event, ev.LeaseEnded):
                self.check_end(event)

    def check_withdrawn(self, event: ev.GrantWithdrawn) -> None:
        """No client uses a grant that is withdrawn. It may use a later one, on another box, which the database lost."""
        client = next(each for each in self.clients if each.id == event.lease_id)
        granted = self.grant_before(event)
        is_there = granted is not None and client.box is not None and client.box.name == granted.gpus[0].node
        if is_there and client.believes:
            self.violate(f"the grant of {client.id} was withdrawn, and its client uses it")

    def grant_before(self, event: ev.GrantWithdrawn | ev.LeaseEnded) -> ev.LeaseGranted | None:
        """The grant that the journal had when this was written; None if the request waited."""
        found = None
        for stored in self.database.events:
            each = stored.event
            if each is event:
                break
            if isinstance(each, ev.LeaseGranted | ev.GrantWithdrawn) and each.lease_id == event.lease_id:
                found = each if isinstance(each, ev.LeaseGranted) else None
        return found

    def check_grant(self, event: ev.LeaseGranted) -> None:
        self.granted_in.setdefault(event.lease_id, self.database.row.epoch)
        box = self.boxes[event.gpus[0].node]
        if event.lease_id in box.kept:
            self.recovered.add(event.lease_id)
        others = [id_ for id_ in box.processes if id_ != event.lease_id]
        if others and event.lease_id not in box.kept:
            self.violate(f"{event.lease_id} was granted a GPU with processes of {others}")

    def check_end(self, event: ev.LeaseEnded) -> None:
        """A lease expires only by the word of its box."""
        node = next((box.name for box in self.boxes.values() if event.lease_id in box.kept), None)
        ttl_s = next(client.ttl_s for client in self.clients if client.id == event.lease_id)
        if event.reason is not EndReason.EXPIRED or self.grant_before(event) is None:
            return  # a request that waited, also if the database lost its grant: its box brings it back
        # One that its box has dropped had ended before, and the database lost that.
        if node is not None and event.lease_id not in self.boxes[node].dropped:
            self.boxes[node].check_expired(event.lease_id, ttl_s)

    def note_welcome(self, agent: SimulatedAgent) -> None:
        """Of two boxes with one name only one is taken."""
        if agent is not self.agents[agent.name]:
            self.violate(f"another machine is taken for {agent.name}")

    def check_told(self, leader: SimulatedLeader, lease: Lease | None) -> None:
        """The grants of a leader are on the disk of their box before the client is told."""
        if not isinstance(lease, ActiveLease) or self.granted_in.get(lease.id) != leader.epoch:
            return
        if self.boxes[lease.gpus[0].node].kept.get(lease.id) != lease.fence:
            self.violate(f"{lease.id} was told of a grant that its box does not have")
