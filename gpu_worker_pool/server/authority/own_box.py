"""The GPUs and processes of a server that shares its pool with no other: readings go to the pool, and deaths of holders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey, ProcessId, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason
from gpu_worker_pool.core.model.request import Holder
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import may_serve_when_read
from gpu_worker_pool.gpus.simulated import SimulatedProbe
from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.ledger.driver import Driver
from gpu_worker_pool.server.box.deaths import Holders, User
from gpu_worker_pool.server.box.sampler import Sampler
from gpu_worker_pool.server.box.snapshot import Snapshot, as_installed

logger = logging.getLogger(__name__)

# How soon a released GPU is read if no waiter can have it.
LATE_SAMPLE_S = 0.1
# While samples take no longer than this, a commit with a released GPU waits for the next one, so that the grant to the
# next request shares the commit. It waits no longer than HOLD_S.
QUICK_SAMPLE_S = 0.005
HOLD_S = 0.01


class OwnBox:
    def __init__(self, driver: Driver, sampler: Sampler, *, node: str, simulated: SimulatedProbe | None) -> None:
        self._driver = driver
        self._sampler = sampler
        self._node = node
        self._simulated = simulated
        self._holders: Holders | None = None
        self._late_sample: asyncio.TimerHandle | None = None
        self._has_told_inventory = False
        driver.early_listeners.append(self._follow_early)
        driver.listeners.append(self._follow)

    def start(self) -> None:
        self._holders = Holders(
            lambda lease_id: self._driver.note(cmd.EndLease(lease_id, EndReason.HOLDER_DIED)), self._simulated
        )

    def stop(self) -> None:
        if self._late_sample is not None:
            self._late_sample.cancel()
        if self._holders is not None:
            self._holders.close()

    def is_alive(self, process: ProcessId) -> bool:
        return self._holders is None or self._holders.is_alive(process)

    def is_watched(self, process: ProcessId) -> bool:
        """Whether the process is known by a descriptor. A death that is not reported yet is noticed at the grant."""
        return self._holders is not None and self._holders.is_watched(process)

    def lead(self, state: PoolState) -> None:
        """The driver has taken charge of this pool. The processes of its leases are watched from now on."""
        self._has_told_inventory = False
        for lease in list(state.leases.values()):
            if not isinstance(lease, EndedLease):
                self._watch(lease.request.holder, lease.id)
        self.observe(self._sampler.snapshot, is_regular=True)
        self._update_simulated(set(state.slots))

    def observe(self, snapshot: Snapshot, *, is_regular: bool) -> None:
        """Take in new readings."""
        readings = snapshot.readings
        if readings and is_regular and self._driver.is_leading and not self._has_told_inventory:
            # The GPUs that are there now: one that was removed is not waited for.
            self._has_told_inventory = True
            self._driver.note(cmd.AnnounceNode(self._node, boot_id(), tuple(map(as_installed, readings))))
        if not is_regular:
            # This reading was made because leases ended, or after a take-over; the next regular one is soon enough for the other GPUs.
            slots = self._driver.state.slots
            readings = tuple(reading for reading in readings if _is_awaited(slots.get(reading.gpu.key)))
        if readings and self._holders is not None:
            self._driver.note(cmd.Observe(tuple(map(self._on_pool_clock, readings))))
        self._driver.outbox.let_go()

    def _on_pool_clock(self, reading: Reading) -> Reading:
        at = reading.at + self._driver.clock_base
        return reading if at == reading.at else replace(reading, at=at)

    def _watch(self, holder: Holder, lease_id: str) -> None:
        process = holder.process_on(self._node)
        if self._holders is not None and process is not None:
            self._holders.watch(process, lease_id)

    def _follow_early(self, events: Sequence[ev.Event]) -> None:
        left: set[GpuKey] = set()
        for lease_id, request in ev.new_leases(events).items():
            self._watch(request.holder, lease_id)
        for event in events:
            if isinstance(event, ev.LeaseEnded):
                left.update(event.draining)
            elif isinstance(event, ev.GrantWithdrawn):
                self._sampler.sample_soon()  # whether it was used is told by the next reading
            elif isinstance(event, ev.LeasesRenewed) and self._simulated is not None:
                self._update_simulated(self._gpus_of(event.lease_ids))  # a process may use what it has taken up
        if left:
            # Real hardware shows at once that a process has stopped; so must simulated GPUs.
            self._update_simulated(left)
        if left or self._late_sample is not None:
            self._sample_after_release()

    def _sample_after_release(self) -> None:
        """Sample at once if that may serve a waiter; otherwise soon, so that many releases share one sample."""
        if may_serve_when_read(self._driver.state):
            if self._late_sample is not None:
                self._late_sample.cancel()
                self._late_sample = None
            if self._sampler.last_sample_s <= QUICK_SAMPLE_S:
                self._driver.outbox.hold(HOLD_S)
            self._sampler.sample_soon()
        elif self._late_sample is None:
            self._late_sample = asyncio.get_running_loop().call_later(LATE_SAMPLE_S, self._sample_late)

    def _sample_late(self) -> None:
        self._late_sample = None
        self._sampler.sample_soon()

    def _follow(self, events: Sequence[ev.Event]) -> None:
        if not self._driver.is_in_charge:
            return
        changed: set[GpuKey] = set()
        for event in events:
            if isinstance(event, ev.TakenOver):
                self._sampler.sample_soon()  # all readings so far are void
            elif isinstance(event, ev.LeaseGranted):
                changed.update(event.gpus)
            elif isinstance(event, ev.LeaseEnded):
                changed.update(event.draining)
                if self._holders is not None:
                    self._holders.forget(event.lease_id)
        self._update_simulated(changed)

    def _gpus_of(self, lease_ids: Iterable[str]) -> set[GpuKey]:
        leases = map(self._driver.state.leases.get, lease_ids)
        return {key for lease in leases if isinstance(lease, ActiveLease) for key in lease.gpus}

    def _update_simulated(self, keys: set[GpuKey]) -> None:
        if self._simulated is not None and self._holders is not None:
            self._holders.use({key.uuid: list(self._users(key)) for key in keys})

    def _users(self, key: GpuKey) -> Iterator[User]:
        slot = self._driver.state.slots.get(key)
        for lease_id, occupant in slot.occupants.items() if slot else ():
            lease = self._driver.state.leases.get(lease_id)
            if isinstance(lease, ActiveLease) and lease_id not in self._driver.state.untaken:
                yield occupant.process, lease.fence, occupant.asked_mb


def _is_awaited(slot: GpuSlot | None) -> bool:
    """Whether the next reading of a GPU is waited for: it drains, or its readings so far are void."""
    return slot is None or slot.reading is None or slot.is_draining
