"""The holders of a box's leases on their machine: their processes are watched, and they use its GPUs if those are simulated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.gpus.simulated import SimulatedHolder, SimulatedProbe

from .deaths import DeathWatch

logger = logging.getLogger(__name__)

# A holder without a process of this machine gets a pid that no process can have.
FIRST_SIMULATED_PID = 10_000_000
# The process of a holder, the fence of its lease, and the memory that it asked for.
User = tuple[ProcessId | None, int, float | None]


class Holders:
    """`on_death` is called with the id of a lease whose process has died. Made in the event loop."""

    def __init__(self, on_death: Callable[[str], None], simulated: SimulatedProbe | None) -> None:
        self._on_death = on_death
        self._simulated = simulated
        deaths = DeathWatch(self._report, asyncio.get_running_loop())
        self.watch = deaths.watch
        self.forget = deaths.forget
        self.is_alive = deaths.is_alive
        self.is_watched = deaths.is_watched
        self.close = deaths.close

    def use(self, users: Mapping[str, Iterable[User]]) -> None:
        """Set all that use these GPUs, by UUID. Real hardware shows by itself who does."""
        if self._simulated is None:
            return
        for uuid, each in users.items():
            processes = [(process or ProcessId(FIRST_SIMULATED_PID + fence, None), mb) for process, fence, mb in each]
            try:
                self._simulated.occupy(uuid, [SimulatedHolder(*process, mb) for process, mb in processes])
            except ValueError:
                logger.debug("there is no simulated GPU %s any more", uuid)

    def _report(self, lease_id: str) -> None:
        logger.info("the holder of lease %s is dead", lease_id)
        self._on_death(lease_id)
