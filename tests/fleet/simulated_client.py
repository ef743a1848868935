"""A client in the simulation: it asks any candidate, asks again with the same id, renews, and gives up in time."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from gpu_worker_pool.core.fleet.custody_actions import RenewalState
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, Lease, QueuedLease, custodian
from gpu_worker_pool.core.model.request import Holder, Request

if TYPE_CHECKING:
    from tests.fleet.simulated_box import Box
    from tests.fleet.simulated_world import World

ANSWER_WITHIN_S = 0.8


class SimulatedClient:
    """`local` names the box on which its process runs, if the pool is told. Its lease has no TTL there."""

    def __init__(self, world: World, number: int) -> None:
        rng = world.rng
        self.world, self.id, self.pid = world, f"lease{number}", 100 + number
        self.ttl_s = rng.choice((3.0, 3.0, 12.0))
        local = rng.choice((None, None, "n1"))
        self.home = local
        self.is_process_dead = False
        process = None if local is None else ProcessId(self.pid, 1.0)
        self.request = Request(holder=Holder(self.id, process=process, node=local), ttl_s=self.ttl_s)
        self.hold_s = rng.choice((rng.uniform(0.5, 6.0), 20.0))
        # A client may hold a GPU for long before anything is to be seen there.
        self.starts_after_s = rng.choice((rng.uniform(0.0, 0.6), 20.0))
        self.lingers_s = rng.choice((0.0, 0.0, 1.5, 4.0))
        self.crashes = rng.random() < 0.3
        self.target = rng.randrange(len(world.candidates))
        self.calls = 0
        self.sent_at = 0.0
        self.first_sent_at = inf
        self.stage = "asks"
        self.box: Box | None = None
        self.keeper = ""
        self.is_local = False
        self.safe_until = -inf

    @property
    def believes(self) -> bool:
        return self.stage == "holds" and self.world.now < self.safe_until

    # Calls

    def send(self) -> None:
        command: cmd.RequestLease | cmd.Renew | cmd.Release
        if self.stage == "asks":
            command = cmd.RequestLease(self.id, self.request)
        elif self.stage == "releases":
            command = cmd.Release(self.id, is_holder=True)
        elif self.stage == "waits":
            command = cmd.Renew((self.id,))
        elif self.stage in {"holds", "checks"}:
            self.renew()
            return
        else:
            return
        self.calls += 1
        call, world = self.calls, self.world
        self.sent_at = world.now
        self.first_sent_at = min(self.first_sent_at, world.now)
        world.call(self, world.candidates[self.target], command, lambda events, lease: self.hear(call, events, lease))
        world.at(ANSWER_WITHIN_S, self.hear, call, None, None)

    def renew(self) -> None:
        """A heartbeat to the box that keeps the lease."""
        self.calls += 1
        call, sent_at, world = self.calls, self.world.now, self.world

        def answered(state: RenewalState | None) -> None:
            if call != self.calls or self.stage not in {"holds", "checks"}:
                return
            self.calls += 1
            if state is RenewalState.RENEWED:
                self.renewed(sent_at)
            elif state is None:
                world.at(0.15, self.send)
            else:
                world.log(self.id, f"has no lease any more: {state}")
                self.lose()

        world.call_agent(self, self.keeper, answered)
        world.at(ANSWER_WITHIN_S, answered, None)

    def renewed(self, sent_at: float) -> None:
        if self.stage == "checks":
            self.safe_until = sent_at + self.ttl_s * 2 / 3
            self.begin_to_hold()
        elif self.believes:
            self.safe_until = max(self.safe_until, sent_at + self.ttl_s * 2 / 3)
            self.world.at(max(self.safe_until - self.world.now, 0.0), self.check_safe)
            self.world.at(self.ttl_s / 3, self.send)

    def hear(self, call: int, events: list[ev.Event] | None, lease: Lease | None) -> None:
        if call != self.calls or self.stage == "over":
            return
        self.calls += 1  # what comes later is not heard
        sent_at = self.sent_at
        if events is None:
            self.target = (self.target + 1) % len(self.world.candidates)
            self.world.at(0.15, self.send)
        elif self.stage == "releases":
            self.stage = "over"
        elif isinstance(lease, QueuedLease):
            self.world.acked_requests.setdefault(self.id, self.world.now)
            self.stage = "waits"
            self.world.at(0.8, self.send)
        elif isinstance(lease, ActiveLease):
            self.hold(lease, sent_at)
        else:
            ended = lease.reason if isinstance(lease, EndedLease) else lease
            self.world.log(self.id, f"has no lease any more: {ended}")
            self.lose()

    def hold(self, lease: ActiveLease, sent_at: float) -> None:
        """A lease is safe until one heartbeat before the TTL, counted from when the heartbeat was sent. If its TTL may have
        run out before its client was told of it, its box is asked first.
        """
        world = self.world
        world.acked_requests.setdefault(self.id, world.now)
        self.box = world.boxes[lease.gpus[0].node]
        left_s = world.left_s.get(self.id, 0.0)
        self.keeper, self.is_local = custodian(lease), lease.ttl_s is None and left_s == inf
        lasted_s = self.ttl_s - left_s
        self.safe_until = inf if self.is_local else sent_at - lasted_s + self.ttl_s * 2 / 3
        if world.now < self.safe_until:
            world.acked_grants[self.id] = world.now
            self.begin_to_hold()
        else:
            self.stage = "checks"
            self.renew()

    def begin_to_hold(self) -> None:
        world = self.world
        self.stage = "holds"
        self.believe()
        world.at(self.starts_after_s, self.begin)
        world.at(self.hold_s, self.leave)
        if not self.is_local:
            world.at(max(self.safe_until - world.now, 0.0), self.check_safe)
            world.at(self.ttl_s / 3, self.send)

    def believe(self) -> None:
        assert self.box is not None
        world = self.world
        others = [client.id for client in self.box.believers.values() if client.believes]
        if self.believes and others:
            world.violate(f"{self.id} and {others} hold the same GPU")
        self.box.believers[self.id] = self

    # The work

    def begin(self) -> None:
        if self.believes and self.box is not None:
            self.box.processes[self.id] = self.pid

    def check_safe(self) -> None:
        if self.stage == "holds" and not self.believes:
            self.world.log(self.id, "gives up: no heartbeat got through")
            self.lose()

    def lose(self) -> None:
        self.stage = "over"
        self.stop_working()

    def leave(self) -> None:
        if self.stage != "holds":
            return
        if self.crashes:
            self.world.log(self.id, "crashes")
            self.die()
        else:
            self.stage = "releases"
            self.send()
        self.stop_working()

    def die(self) -> None:
        """Its process is gone; what it started on the GPU may linger."""
        self.stage, self.is_process_dead = "over", True
        if self.home is not None:
            self.world.process_died(self.pid)
        self.stop_working()

    def stop_working(self) -> None:
        if self.box is not None:
            self.box.believers.pop(self.id, None)
            self.world.at(self.lingers_s, self.box.vacate, self.id)
