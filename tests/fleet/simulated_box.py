"""A machine with one GPU in the simulation: what really is on it, and what its agent promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.fleet.custody_actions import RenewalState
from gpu_worker_pool.core.fleet.messages import LeaseOver
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, InventoryGpu, ProcessId, Reading
from gpu_worker_pool.core.model.lease import EndReason, KeptLease

if TYPE_CHECKING:
    from tests.fleet.simulated_client import SimulatedClient
    from tests.fleet.simulated_world import World

TOTAL_MB = 80_000.0


class Box:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.gpu = Gpu(GpuKey(name, f"GPU-{name}"), 0, "NVIDIA A100")
        self.inventory = (InventoryGpu(self.gpu.key.uuid, 0, self.gpu.name, TOTAL_MB),)
        # The leases whose processes really are on the GPU, and their pids.
        self.processes: dict[str, int] = {}
        # The clients that believe to hold it.
        self.believers: dict[str, SimulatedClient] = {}
        # The highest epoch that its agent was ever told, and the leases that were ever on its disk, with their fences.
        self.epoch_seen = 0
        self.kept: dict[str, int] = {}
        # When the TTL of a lease last began, by the true time.
        self.renewed_at: dict[str, float] = {}
        # The leases of which the leader told that they have ended.
        self.dropped: set[str] = set()
        # The ends that the leader was told.
        self.told_over: dict[str, LeaseOver] = {}

    def vacate(self, lease_id: str) -> None:
        self.processes.pop(lease_id, None)

    def reboot(self) -> None:
        self.processes.clear()
        for client in self.world.clients:
            if client.home == self.name:
                client.die()

    def is_alive(self, pid: int) -> bool:
        return any(client.pid == pid and not client.is_process_dead for client in self.world.clients)

    def look(self) -> Reading:
        processes = tuple(GpuProcess(ProcessId(pid, 1.0), 40_000.0) for pid in self.processes.values())
        busy = 99.0 if processes else 0.0
        return Reading(self.gpu, 0.0, TOTAL_MB, 40_000.0 * len(processes), busy, processes=processes)

    # What its agent promises

    def note_kept(self, lease: KeptLease) -> None:
        self.world.log(self.name, f"keeps {lease.id}, fence {lease.fence}")
        highest = max(self.kept.values(), default=0)
        if lease.id not in self.kept and lease.fence <= highest:
            self.world.violate(f"{lease.id} has fence {lease.fence} on {self.name}, which has seen {highest}")
        if self.kept.get(lease.id) != lease.fence:
            self.renewed_at[lease.id] = self.world.now
        self.kept[lease.id] = lease.fence

    def note_renewal(self, lease_id: str, state: RenewalState) -> None:
        world = self.world
        if state is RenewalState.RENEWED:
            if lease_id in self.told_over:
                world.violate(f"{self.name} renews {lease_id}, and has told that it is over")
            self.renewed_at[lease_id] = world.now
        elif state is RenewalState.ELSEWHERE and lease_id in world.agent_of(self.name).disk.leases:
            world.violate(f"{self.name} has forgotten {lease_id}")

    def check_over(self, over: LeaseOver, lease: KeptLease | None) -> None:
        self.world.log(self.name, f"ends {over.lease_id}: {over.reason}")
        if lease is not None and over.reason is EndReason.EXPIRED:
            self.check_expired(over.lease_id, lease.ttl_s or 0.0)

    def check_expired(self, lease_id: str, ttl_s: float) -> None:
        since_s = self.world.now - self.renewed_at.get(lease_id, self.world.now)
        if since_s * 1.02 < ttl_s:
            self.world.violate(f"{lease_id} expired {since_s:.3f} s after its last heartbeat, of {ttl_s} s")
