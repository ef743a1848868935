"""An agent in the simulation: the thin driver around custody, with a disk, and with callbacks in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from gpu_worker_pool.core.fleet.custody import Custody
from gpu_worker_pool.core.fleet.custody_actions import (
    CloseLink,
    CustodyAction,
    Keep,
    LookNow,
    NoteSeen,
    RenewalState,
    Send,
    StopWatching,
    WatchProcess,
)
from gpu_worker_pool.core.fleet.messages import AgentMessage, LeaderMessage, LeaseOver, Orders, Welcome
from gpu_worker_pool.core.model.lease import KeptLease
from tests.fleet.simulated_process import SimulatedProcess

if TYPE_CHECKING:
    from tests.fleet.simulated_box import Box
    from tests.fleet.simulated_link import Link
    from tests.fleet.simulated_world import World

LOOK_EVERY_S = 1.2
SEARCH_EVERY_S = 0.25


@dataclass
class Disk:
    epoch: int = 0
    fence: int = 0
    leases: dict[str, KeptLease] = field(default_factory=dict)
    over: dict[str, LeaseOver] = field(default_factory=dict)


class SimulatedAgent(SimulatedProcess):
    custody_type: type[Custody] = Custody

    def __init__(self, world: World, box: Box, machine_id: str, *, clock_offset_s: float, drift: float) -> None:
        super().__init__(world, box.name, clock_offset_s=clock_offset_s, drift=drift)
        self.box, self.machine_id, self.disk = box, machine_id, Disk()
        self.boots = 1
        self.target = 0
        # It is killed after so many actions more.
        self.actions_left: float = inf
        self.dies_after_an_end = False

    def start(self) -> None:
        super().start()
        self.custody = self.load()
        if back := [lease_id for lease_id in self.custody.leases if lease_id in self.box.told_over]:
            self.world.violate(f"{self.name} has told that {back} are over, and has them again")
        self.link: Link | None = None
        self.is_searching = False
        self.watched: dict[str, int] = {}
        self.timer_at = inf
        # The leader waits for a look that begins after the present one.
        self.is_looking = self.must_look = False
        self.actions_left, self.dies_after_an_end = inf, False
        self.carry_out(self.custody.start())
        self.search()
        self.look_again()

    def load(self) -> Custody:
        disk = self.disk
        return self.custody_type(
            self.box.name,
            self.machine_id,
            f"{self.machine_id}-boot{self.boots}",
            self.boot_now(),
            epoch_seen=disk.epoch,
            fence_seen=disk.fence,
            leases=disk.leases.values(),
            over=disk.over.values(),
            instance=str(self.incarnation),
        )

    def kill(self) -> None:
        if not self.is_dead and self.link is not None:
            self.link.broken_by_agent()
        super().kill()

    def reboot(self) -> None:
        """The machine starts again: nothing that ran there runs any more."""
        self.kill()
        self.boots += 1
        self.box.reboot()

    # The connection

    def search(self) -> None:
        if self.link is None:
            self.target = (self.target + 1) % len(self.world.candidates)
            self.world.connect(self, self.world.candidates[self.target])
            self.after(SEARCH_EVERY_S, self.search)

    def connected(self, link: Link) -> None:
        if self.link is not None:
            link.close_by_agent()
            return
        self.link = link
        link.up(self.custody.announce(f"http://{self.name}", "1", False, self.box.inventory))
        self.tick()

    def hear(self, link: Link, message: LeaderMessage) -> None:
        if link is not self.link:
            return
        before, obeys = self.custody.epoch_seen, isinstance(message, Welcome | Orders)
        actions = self.custody.take(message, self.boot_now())
        is_refused = any(isinstance(action, CloseLink) for action in actions)
        if obeys and not is_refused and message.epoch < max(before, self.box.epoch_seen):  # type: ignore[union-attr]
            self.world.violate(f"{self.name} obeys an epoch below {before}")
        self.box.epoch_seen = max(self.box.epoch_seen, self.custody.epoch_seen)
        self.carry_out(actions)

    def link_closed(self, link: Link) -> None:
        if link is self.link:
            self.link = None
            self.custody.disconnected()
            self.search()

    # What custody wants

    def carry_out(self, actions: Sequence[CustodyAction]) -> None:
        incarnation = self.incarnation
        for action in actions:
            self.actions_left -= 1
            if self.actions_left < 0:
                self.world.disturb(f"the agent of {self.name} is killed before {type(action).__name__}")
                self.kill()
            if incarnation != self.incarnation:
                return
            self.act(action)
        self.set_timer()

    def act(self, action: CustodyAction) -> None:
        match action:
            case Keep() | NoteSeen():
                self.write(action)
            case Send(message=message):
                self.send(message)
            case WatchProcess(lease_id=lease_id, process=process):
                self.watched[lease_id] = process.pid
                if not self.box.is_alive(process.pid):
                    self.after(0.001, self.died, lease_id)
            case StopWatching(lease_id=lease_id):
                self.watched.pop(lease_id, None)
            case LookNow():
                self.look()
            case CloseLink(why=why):
                self.world.log(self.name, f"closes its link: {why}")
                if self.link is not None:
                    self.link.close_by_agent()
                    self.link_closed(self.link)

    def send(self, message: AgentMessage) -> None:
        if self.link is not None:
            self.link.up(message)
        if isinstance(message, LeaseOver):
            self.box.told_over[message.lease_id] = message
            if self.dies_after_an_end:
                self.world.disturb(f"the agent of {self.name} is killed after it told an end")
                self.kill()

    def write(self, action: Keep | NoteSeen) -> None:
        disk, box = self.disk, self.box
        match action:
            case Keep(what=KeptLease() as lease):
                box.note_kept(lease)
                disk.over.pop(lease.id, None)
                disk.leases[lease.id] = lease
            case Keep(lease_id=lease_id, what=None):
                disk.leases.pop(lease_id, None)
                disk.over.pop(lease_id, None)
                box.told_over.pop(lease_id, None)
                box.dropped.add(lease_id)
            case Keep(what=LeaseOver() as over):
                box.check_over(over, disk.leases.get(over.lease_id))
                disk.leases.pop(over.lease_id, None)
                disk.over[over.lease_id] = over
            case NoteSeen(epoch=epoch, fence=fence):
                disk.epoch, disk.fence = epoch, fence

    def set_timer(self) -> None:
        due_at = self.custody.next_due_at()
        if due_at < self.timer_at:
            self.timer_at = due_at
            self.after(max(due_at - self.boot_now(), 0.0), self.ring, due_at)

    def ring(self, timer_at: float) -> None:
        if timer_at == self.timer_at:
            self.timer_at = inf
            if self.boot_now() >= self.custody.next_due_at() - 1e-4:
                self.tick()
            else:
                self.set_timer()

    def tick(self) -> None:
        self.carry_out(self.custody.tick(max(self.boot_now(), min(self.custody.next_due_at(), self.boot_now() + 1e-3))))

    # Processes and GPUs

    def process_died(self, pid: int) -> None:
        for lease_id in [id_ for id_, watched in self.watched.items() if watched == pid]:
            self.died(lease_id)

    def died(self, lease_id: str) -> None:
        if self.watched.pop(lease_id, None) is not None:
            self.carry_out(self.custody.died(lease_id, self.boot_now()))

    def look_again(self) -> None:
        self.look()
        self.after(LOOK_EVERY_S, self.look_again)

    def look(self) -> None:
        if self.is_looking or self.link is None:
            self.must_look = self.is_looking
            return
        self.is_looking = True
        rng = self.world.rng
        # What it sees is how it was when it began. Now and then that takes long.
        takes_s = 0.02 if rng.random() < 0.85 else rng.uniform(0.3, 2.5)
        self.after(takes_s, self.looked, self.box.look(), self.boot_now())

    def looked(self, reading: object, began_s: float) -> None:
        self.is_looking = False
        report = self.custody.report([reading], began_s)  # type: ignore[list-item]
        if report is not None and self.link is not None:
            self.link.up(report)
        self.set_timer()
        if self.must_look:
            self.must_look = False
            self.look()

    # Heartbeats

    def renew(self, lease_id: str, answer: Callable[[RenewalState], None]) -> None:
        self.tick()
        if self.is_dead:
            return
        (renewal,) = self.custody.renew([lease_id], self.boot_now())
        self.box.note_renewal(lease_id, renewal.state)
        self.set_timer()
        answer(renewal.state)
