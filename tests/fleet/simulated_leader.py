"""What a candidate of the simulation does while it leads: the thin driver around the core and the boxes."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from gpu_worker_pool.core.fleet.box_actions import BoxAction, Close, Confirmed, Do, Outdated, Tell
from gpu_worker_pool.core.fleet.boxes import Boxes
from gpu_worker_pool.core.fleet.messages import AgentMessage, LeaderMessage, Welcome
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import ActiveLease, QueuedLease
from tests.fleet.batch import Answer, Batch

if TYPE_CHECKING:
    from tests.fleet.simulated_candidate import SimulatedCandidate
    from tests.fleet.simulated_link import Link

EVERY_S = 1.0
# An agent is silent after 3 s, and that is found out once a second.
SILENT_S = 4.6


class SimulatedLeader:
    """One epoch of a candidate. It is made when the take-over is written."""

    boxes_type: type[Boxes] = Boxes

    def __init__(self, candidate: SimulatedCandidate, epoch: int) -> None:
        self.candidate, self.epoch, self.world = candidate, epoch, candidate.world
        self.boxes = self.boxes_type(epoch, "pool")
        self.links: dict[int, Link] = {}
        # The callers that are told of a grant once its box has it.
        self.unkept: dict[str, list[tuple[list[ev.Event], Answer]]] = {}
        self.heard_at: dict[str, float] = {}
        self.is_over = False

    def open(self, batch: Batch) -> None:
        self.boxes.written(batch.events, self.candidate.state, self.now())
        self.go_on()

    def now(self) -> float:
        return self.candidate.pool_now()

    def may_act(self) -> bool:
        return not self.is_over and self.candidate.may_act()

    def go_on(self) -> None:
        """Once a second: what is due in the pool, and a sign of life for the boxes."""
        candidate = self.candidate
        if self.is_over:
            return
        if candidate.may_act():
            self.do(cmd.Tick())
            self.carry_out(self.boxes.tick(candidate.state, self.now()))
            if not candidate.waiting and candidate.in_flight is None:
                candidate.write_snapshot_if_due()
        candidate.after(EVERY_S, self.go_on)

    def close(self) -> None:
        """The leadership is lost."""
        self.is_over = True
        for link in self.links.values():
            link.close_by_leader()
        for callers in self.unkept.values():
            for _, answer in callers:
                answer(None, None)

    # The boxes

    def accept(self, link: Link) -> None:
        self.links[link.id] = link

    def receive(self, link: Link, message: AgentMessage) -> None:
        if self.may_act() and link.id in self.links:
            self.heard_at[link.agent.name] = self.world.now
            self.carry_out(self.boxes.receive(link.id, message, self.candidate.state, self.now()))

    def closed(self, link: Link) -> None:
        if self.links.pop(link.id, None) is not None and not self.is_over:
            self.carry_out(self.boxes.closed(link.id, self.now()))

    def written(self, events: Sequence[ev.Event]) -> None:
        if not self.is_over:
            self.carry_out(self.boxes.written(events, self.candidate.state, self.now()))

    def carry_out(self, actions: Sequence[BoxAction]) -> None:
        for action in actions:
            match action:
                case Tell(session=session, message=message):
                    self.tell(session, message)
                case Do(command=command):
                    self.do(command)
                case Close(session=session, why=why):
                    self.world.log(self.candidate.name, f"closes a session: {why}")
                    if (link := self.links.pop(session, None)) is not None:
                        link.close_by_leader()
                case Outdated(epoch_seen=epoch_seen):
                    self.candidate.lead_later_epoch(epoch_seen)
                    return
                case Confirmed(lease_id=lease_id):
                    for events, answer in self.unkept.pop(lease_id, ()):
                        self.answer(events, lease_id, answer)

    def tell(self, session: int, message: LeaderMessage) -> None:
        link = self.links.get(session)
        if link is None or not self.may_act():
            return
        if isinstance(message, Welcome):
            self.world.note_welcome(link.agent)
        link.down(message)

    # Commands

    def do(self, command: cmd.Command) -> tuple[list[ev.Event], Batch | None]:
        events = self.candidate.do(command)
        for event in events:
            if isinstance(event, ev.LeaseGranted) and not isinstance(command, cmd.RecoverLease):
                self.check_grant(event)
        return events, self.candidate.gather(events)

    def check_grant(self, event: ev.LeaseGranted) -> None:
        node = event.gpus[0].node
        if node not in self.heard_at:
            self.world.violate(f"{event.lease_id} was granted a GPU of a box that has not announced itself")
        is_open = any(link.agent.name == node for link in self.links.values())
        if not is_open or self.world.now - self.heard_at[node] > SILENT_S:
            self.world.violate(f"{event.lease_id} was granted a GPU of a box that is silent")

    def call(self, command: cmd.RequestLease | cmd.Renew | cmd.Release, answer: Answer) -> None:
        """A client asks."""
        lease_id = command.lease_ids[0] if isinstance(command, cmd.Renew) else command.lease_id
        events, batch = self.do(command)
        batch = self.candidate.unwritten.get(lease_id) or (None if isinstance(command, cmd.Renew) else batch)
        if batch is not None:
            batch.callers.append((events, lease_id, answer))
        else:
            self.answer(events, lease_id, answer)

    def answer(self, events: list[ev.Event], lease_id: str, answer: Answer) -> None:
        """Answer a caller: what it is told is written, and a grant is on the disk of its box."""
        lease = self.candidate.state.find(lease_id)
        if isinstance(lease, ActiveLease) and self.is_untaken(lease_id):
            lease = QueuedLease(lease.id, lease.request, lease.seq, lease.requested_at)  # until its client calls again
        if not self.may_act():
            answer(None, None)
        elif isinstance(lease, ActiveLease) and not self.is_confirmed(lease_id):
            self.unkept.setdefault(lease_id, []).append((events, answer))
        else:
            self.world.check_told(self, lease)
            expires_at = self.candidate.state.expires_at(lease_id)
            self.world.left_s[lease_id] = inf if expires_at is None else max(expires_at - self.now(), 0.0)
            answer(events, lease)

    def is_untaken(self, lease_id: str) -> bool:
        return lease_id in self.candidate.state.untaken

    def is_confirmed(self, lease_id: str) -> bool:
        return self.boxes.is_confirmed(lease_id)
