"""The authority over this box's GPUs: connects the driver to everything around it.

The sampler reports readings, the death watch dead holders, the calls what clients want. The authority asks the sampler
for a new reading when a lease has ended, and tells simulated GPUs which leases use them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import time

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey, InventoryGpu, ProcessId, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease
from gpu_worker_pool.core.model.request import Holder
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.gpus.simulated import SimulatedHolder, SimulatedProbe
from gpu_worker_pool.host.clock import boot_id, boot_time
from gpu_worker_pool.host.holder_record import HolderRecord
from gpu_worker_pool.host.identity import Machine
from gpu_worker_pool.ledger.driver import Driver
from gpu_worker_pool.ledger.journal import Journal, JournalError, JournalInUse, StateDirUnsafe
from gpu_worker_pool.ledger.writer import WriterThread

from .deaths import DeathWatch
from .pool import Pool
from .presence import Presence
from .sampler import Sampler
from .snapshot import Snapshot

logger = logging.getLogger(__name__)

# How often to retry to open a journal.
TRY_AGAIN_S = 2.0
# A waiter whose connection broke has this long after a grant to make another call. Then the next waiter gets the GPU.
GRACE_S = 2.0
# A caller that was told that its request could not be written has this long to ask again once it is written after all,
# or its TTL if that is shorter. Then the lease ends.
UNCLAIMED_S = 5.0
NOT_ASKED_AGAIN = "its request was answered with 503, and was not repeated"
# How soon a released GPU is read if no request waits.
LATE_SAMPLE_S = 0.1


class Authority:
    def __init__(
        self,
        settings: PoolSettings,
        machine: Machine,
        sampler: Sampler,
        open_journal: Callable[[], Journal],
        *,
        node: str,
        max_waiting: int,
        simulated: SimulatedProbe | None = None,
    ) -> None:
        self._node = node
        self._sampler = sampler
        self._driver = Driver(settings, clock=boot_time, is_alive=self._is_alive)
        self._presence = Presence(max_waiting)
        self.pool = Pool(self._driver, sampler, machine, self._presence, node=node)
        self._open_journal = open_journal
        self._simulated = simulated
        self._deaths: DeathWatch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[None] | None = None
        self._late_sample: asyncio.TimerHandle | None = None
        self._record: HolderRecord | None = None
        self._has_told_inventory = False
        self._driver.early_listeners.append(self._follow_early)
        self._driver.listeners.append(self._follow)

    async def start(self) -> None:
        """Take charge. JournalInUse if another server has the journal, StateDirUnsafe if another user could change it; any
        other trouble is reported by the calls.
        """
        self._loop = asyncio.get_running_loop()
        self._deaths = DeathWatch(self._on_death, self._loop)
        try:
            await self._open()
        except (JournalInUse, StateDirUnsafe):
            raise
        except JournalError as error:
            logger.error("no GPU can be granted: %s", error)  # noqa: TRY400 - a traceback would not help
            self._driver.trouble = str(error)
            self._observe(self._sampler.snapshot, is_regular=True)
            self._opening = asyncio.create_task(self._keep_trying_to_open())

    def stop(self) -> None:
        """Answer all waiters, write what is left, and close everything."""
        if self._opening is not None:
            self._opening.cancel()
        if self._late_sample is not None:
            self._late_sample.cancel()
        if self._deaths is not None:
            self._deaths.close()
        self._driver.close()
        if self._record is not None:
            self._record.close()
        self._loop = None

    def observe(self, snapshot: Snapshot, *, is_regular: bool) -> None:
        """Take in new readings, from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._observe, snapshot, is_regular)

    async def _open(self) -> None:
        journal = await asyncio.to_thread(self._open_journal)
        try:
            history = await asyncio.to_thread(journal.load, self._driver.state.settings.remembered_ended_leases)
            self._driver.open(
                history,
                WriterThread(journal, asyncio.get_running_loop()),
                boot_id=boot_id(),
                wall_now=time(),
                node=self._node,
            )
        except JournalError:
            journal.close()
            raise
        self.pool.pool_id = journal.pool_id
        if self._simulated is None:
            self._record = HolderRecord(journal.pool_id)
            self._sampler.records.own = self._record.path
            active = [lease for lease in self._driver.state.leases.values() if isinstance(lease, ActiveLease)]
            self._record.begin(_held_here(active, self._node))
        state = self._driver.state
        logger.info("%d leases in the journal, %d of them in the queue", len(state.leases), len(state.queue))
        for lease in list(self._driver.state.leases.values()):
            if not isinstance(lease, DrainingLease):
                self._watch(lease.request.holder, lease.id)
        self._observe(self._sampler.snapshot, is_regular=True)
        self._update_simulated({key for key, slot in self._driver.state.slots.items() if slot.occupants})

    async def _keep_trying_to_open(self) -> None:
        while self._driver.trouble is not None:
            await asyncio.sleep(TRY_AGAIN_S)
            try:
                await self._open()
            except JournalError as error:
                self._driver.trouble = str(error)
        logger.warning("the journal is open; leases are granted from now on")

    def _observe(self, snapshot: Snapshot, is_regular: bool) -> None:  # noqa: FBT001 - a callback
        readings = tuple(self._marked(reading, snapshot) for reading in snapshot.readings)
        if readings and is_regular and self._driver.is_open and not self._has_told_inventory:
            # The GPUs that are there now: one that was removed is not waited for.
            self._has_told_inventory = True
            self._driver.note(cmd.AnnounceNode(self._node, boot_id(), tuple(map(_as_installed, readings))))
        if not is_regular:
            # This reading was made because leases ended; the next regular one is soon enough for the other GPUs.
            slots = self._driver.state.slots
            readings = tuple(reading for reading in readings if _is_draining(slots.get(reading.gpu.key)))
        if readings and self._loop is not None:
            self._driver.note(cmd.Observe(tuple(map(self._on_pool_clock, readings))))

    def _on_pool_clock(self, reading: Reading) -> Reading:
        at = self._driver.pool_time(reading.at)
        return reading if at == reading.at else replace(reading, at=at)

    def _marked(self, reading: Reading, snapshot: Snapshot) -> Reading:
        """The reading, with the process that holds the GPU under a lease of a server that is gone, if there is one."""
        if reading.other_server is not None:
            return reading
        for mark in snapshot.marks:
            if mark.uuid == reading.gpu.key.uuid and self._driver.state.find(mark.lease_id) is None:
                text = f"held under a lease of another server, which does not run ({mark.who}); free when that process ends"
                return replace(reading, other_server=text, is_other_server_up=False)
        return reading

    def _on_death(self, lease_id: str) -> None:
        logger.info("the holder of lease %s is dead", lease_id)
        self._driver.note(cmd.ReportDeath(lease_id))

    def _watch(self, holder: Holder, lease_id: str) -> None:
        process = holder.process_on(self._node)
        if self._deaths is not None and process is not None:
            self._deaths.watch(process, lease_id)

    def _is_alive(self, process: ProcessId) -> bool:
        return self._deaths is None or self._deaths.is_alive(process)

    def _follow_early(self, events: Sequence[ev.Event]) -> None:
        left: set[GpuKey] = set()
        for event in events:
            if isinstance(event, ev.LeaseQueued):
                self._watch(event.request.holder, event.lease_id)
            elif isinstance(event, ev.LeaseEnded):
                left.update(event.draining)
            elif isinstance(event, ev.TakenOver):
                self._sampler.sample_soon()  # all readings so far are void
        if left:
            # Real hardware shows at once that a process has stopped; so must simulated GPUs.
            self._update_simulated(left)
        if left or self._late_sample is not None:
            self._sample_after_release()

    def _sample_after_release(self) -> None:
        """Sample at once if a request waits; otherwise soon, so that many releases share one sample."""
        if len(self._driver.state.queue):
            if self._late_sample is not None:
                self._late_sample.cancel()
                self._late_sample = None
            self._sampler.sample_soon()
        elif self._late_sample is None:
            self._late_sample = asyncio.get_running_loop().call_later(LATE_SAMPLE_S, self._sample_late)

    def _sample_late(self) -> None:
        self._late_sample = None
        self._sampler.sample_soon()

    def _follow(self, events: Sequence[ev.Event]) -> None:
        changed: set[GpuKey] = set()
        if self._record is not None:
            # The answers leave after this, so no holder is missing in the record if this server is killed.
            ids = [event.lease_id for event in events if isinstance(event, ev.LeaseGranted)]
            leases = [lease for id_ in ids if isinstance(lease := self._driver.state.leases.get(id_), ActiveLease)]
            self._record.note(
                _held_here(leases, self._node), [event.lease_id for event in events if isinstance(event, ev.LeaseEnded)]
            )
        for event in events:
            if isinstance(event, ev.LeaseQueued) and self._presence.is_unclaimed(event.lease_id):
                limit_s = min(UNCLAIMED_S, event.request.ttl_s)
                asyncio.get_running_loop().call_later(limit_s, self._end_if_unclaimed, event.lease_id)
            elif isinstance(event, ev.LeaseGranted):
                changed.update(event.gpus)
                if self._presence.is_away(event.lease_id):
                    asyncio.get_running_loop().call_later(GRACE_S, self._end_if_away, event.lease_id)
            elif isinstance(event, ev.LeaseEnded):
                changed.update(event.draining)
                if event.by is not None:
                    why = f": {event.why}" if event.why else ""
                    logger.info("lease %s was ended by %s (%s)%s", event.lease_id, event.by, event.reason, why)
                self._presence.note_heartbeat(event.lease_id)
                if self._deaths is not None:
                    self._deaths.forget(event.lease_id)
        self._update_simulated(changed)

    def _end_if_away(self, lease_id: str) -> None:
        lease = self._driver.state.leases.get(lease_id)
        if self._presence.is_away(lease_id) and isinstance(lease, ActiveLease) and lease.ttl_s is not None:
            logger.info("the client of lease %s did not come back after the grant; the lease ends", lease_id)
            self._driver.note(cmd.ReportDeath(lease_id))

    def _end_if_unclaimed(self, lease_id: str) -> None:
        if self._presence.is_unclaimed(lease_id):
            self._driver.note(cmd.Release(lease_id, by="the server", why=NOT_ASKED_AGAIN))

    def _update_simulated(self, keys: set[GpuKey]) -> None:
        if self._simulated is None:
            return
        for key in keys:
            slot = self._driver.state.slots.get(key)
            holders = []
            for lease_id, occupant in slot.occupants.items() if slot else ():
                lease = self._driver.state.leases.get(lease_id)
                if isinstance(lease, ActiveLease):
                    # A holder without a local process gets a pid that no process can have.
                    pid, started = occupant.process or ProcessId(10_000_000 + lease.fence, None)
                    holders.append(SimulatedHolder(pid, started, occupant.asked_mb))
            try:
                self._simulated.occupy(key.uuid, holders)
            except ValueError:
                logger.debug("there is no simulated GPU %s any more", key.uuid)


def _held_here(leases: Iterable[ActiveLease], node: str) -> dict[str, tuple[ProcessId, list[str]]]:
    """The leases of processes of this node, with the UUIDs of their GPUs there."""
    return {
        lease.id: (process, [key.uuid for key in lease.gpus if key.node == node])
        for lease in leases
        if (process := lease.request.holder.process_on(node)) is not None
    }


def _as_installed(reading: Reading) -> InventoryGpu:
    return InventoryGpu(reading.gpu.key.uuid, reading.gpu.index, reading.gpu.name, reading.memory_total_mb)


def _is_draining(slot: GpuSlot | None) -> bool:
    return slot is None or any(occupant.is_draining for occupant in slot.occupants.values())
