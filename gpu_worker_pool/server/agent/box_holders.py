"""The holders of a box's leases on their machine: their processes are watched, and simulated GPUs are used by them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from gpu_worker_pool.core.fleet.messages import KeptLease
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.gpus.simulated import SimulatedHolder, SimulatedProbe
from gpu_worker_pool.server.authority.deaths import DeathWatch

logger = logging.getLogger(__name__)

# A holder that is in no reading as a local process gets a pid that no process can have.
FIRST_SIMULATED_PID = 10_000_000


class BoxHolders:
    """`on_death` is called with the id of a lease whose process has died."""

    def __init__(self, node: str, on_death: Callable[[str], None], simulated: SimulatedProbe | None) -> None:
        self._node = node
        self._deaths = DeathWatch(on_death, asyncio.get_running_loop())
        self._simulated = simulated
        # The holders on each simulated GPU that has some.
        self._occupied: dict[str, list[SimulatedHolder]] = {}
        self.watch = self._deaths.watch
        self.forget = self._deaths.forget
        self.is_alive = self._deaths.is_alive
        self.close = self._deaths.close

    def note(self, leases: Mapping[str, KeptLease]) -> None:
        """These are the leases of this box now."""
        if self._simulated is None:
            return
        by_gpu: dict[str, list[SimulatedHolder]] = {}
        for lease in leases.values():
            process = lease.request.holder.process_on(self._node)
            pid, started = process or ProcessId(FIRST_SIMULATED_PID + lease.fence, None)
            for uuid in lease.gpus:
                by_gpu.setdefault(uuid, []).append(SimulatedHolder(pid, started, lease.request.wishes.memory_mb))
        before, self._occupied = self._occupied, by_gpu
        for uuid in before.keys() | by_gpu.keys():
            if before.get(uuid) != (holders := by_gpu.get(uuid, [])):
                try:
                    self._simulated.occupy(uuid, holders)
                except ValueError:
                    logger.debug("there is no simulated GPU %s any more", uuid)
