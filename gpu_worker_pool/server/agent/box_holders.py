"""The holders of a box's leases on their machine: their processes are watched, other servers can find them, and simulated
GPUs are used by them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from zlib import crc32

from gpu_worker_pool.core.fleet.messages import KeptLease
from gpu_worker_pool.core.model.gpu import ProcessId, Reading
from gpu_worker_pool.gpus.simulated import SimulatedHolder, SimulatedProbe
from gpu_worker_pool.host.holder_record import HolderRecord, RecordReader
from gpu_worker_pool.server.authority.deaths import DeathWatch
from gpu_worker_pool.server.authority.own_box import left_by_another_server
from gpu_worker_pool.server.authority.snapshot import Snapshot

logger = logging.getLogger(__name__)

# A holder that is in no reading as a local process gets a pid that no process can have.
FIRST_SIMULATED_PID = 10_000_000
MOST_KNOWN = 10_000


class BoxHolders:
    """`on_death` is called with the id of a lease whose process has died."""

    def __init__(
        self, node: str, on_death: Callable[[str], None], records: RecordReader, simulated: SimulatedProbe | None
    ) -> None:
        self._node = node
        self._deaths = DeathWatch(on_death, asyncio.get_running_loop())
        self._records = records
        self._simulated = simulated
        # The holders on each simulated GPU that has some.
        self._occupied: dict[str, list[SimulatedHolder]] = {}
        self._record: HolderRecord | None = None
        self._pool_id: str | None = None
        self.watch = self._deaths.watch
        self.forget = self._deaths.forget
        self.is_alive = self._deaths.is_alive
        # The last leases of this box: a holder may go on after its lease has ended.
        self._known: dict[str, None] = {}

    def begin(self, pool_id: str, leases: Mapping[str, KeptLease]) -> None:
        """These are the leases of this box; `pool_id` is that of its fleet."""
        if self._simulated is None and pool_id != self._pool_id:
            if self._record is not None:
                self._record.close()
            # Two boxes of one fleet may run on one machine.
            self._record = HolderRecord(f"{pool_id}-{crc32(self._node.encode()):08x}")
            self._records.own = self._record.path
            self._record.begin(self._held(leases.values()))
        self._pool_id = pool_id

    def note(self, added: Iterable[KeptLease], ended: Iterable[str], leases: Mapping[str, KeptLease]) -> None:
        """These leases came, and those ended; `leases` are all that there are now."""
        added = tuple(added)
        self._known.update(dict.fromkeys(lease.id for lease in added))
        for lease_id in tuple(islice(self._known, max(len(self._known) - MOST_KNOWN, 0))):
            del self._known[lease_id]
        if self._record is not None:
            self._record.note(self._held(added), ended)
        if self._simulated is not None:
            self._occupy(leases)

    def marked(self, snapshot: Snapshot) -> tuple[Reading, ...]:
        """The readings, each with the process that holds the GPU under a lease of a server that is gone, if there is one."""
        if not snapshot.marks:
            return snapshot.readings
        marks = {mark.uuid: mark for mark in snapshot.marks if mark.lease_id not in self._known}
        return tuple(
            reading
            if (mark := marks.get(reading.gpu.key.uuid)) is None or reading.other_server is not None
            else replace(reading, other_server=left_by_another_server(mark.who), is_other_server_up=False)
            for reading in snapshot.readings
        )

    def close(self) -> None:
        self._deaths.close()
        if self._record is not None:
            self._record.close()

    def _held(self, leases: Iterable[KeptLease]) -> dict[str, tuple[ProcessId, tuple[str, ...]]]:
        return {
            lease.id: (process, lease.gpus)
            for lease in leases
            if (process := lease.request.holder.process_on(self._node)) is not None
        }

    def _occupy(self, leases: Mapping[str, KeptLease]) -> None:
        assert self._simulated is not None  # noqa: S101 - the caller has asked
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
