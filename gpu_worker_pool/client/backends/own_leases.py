"""Leases where the server has statistics only: this process decides by itself, with the same core and the same driver.

Only the workers of this process are coordinated then, which is said once, in a warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from time import time
from typing import Final

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.bounds import MAX_TTL_S
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason, QueuedLease
from gpu_worker_pool.core.model.request import Request, Wishes
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import judge
from gpu_worker_pool.core.queue.owners import Order
from gpu_worker_pool.host.clock import boot_time, wall_offset
from gpu_worker_pool.ledger.driver import Driver
from gpu_worker_pool.ledger.outbox import Done, WriteBatch
from gpu_worker_pool.models import LeaseEnding
from gpu_worker_pool.wire.endings import ending

from .claims import OF_THIS_PROCESS, Claim
from .lease_book import Granted, LeaseAnswer, NeverGranted, Over, Queued, Renewal

# The boot id of a pool that ends with this process.
THIS_PROCESS = "this process"
# How often leases are renewed. They end with this process, so they cannot be lost before.
RENEW_S = 3600.0
# Ends that the pool decides; all others are the holder's own.
ENDED_BY_POOL: Final = frozenset({EndReason.TIME_LIMIT, EndReason.PREEMPTED, EndReason.IDLE})


class _NoJournal:
    """Writes nothing: this pool ends with its process."""

    def write(self, batch: WriteBatch, done: Done) -> None:
        done(batch, None)

    def is_compaction_due(self, live: int) -> bool:  # noqa: ARG002 - the protocol's
        return False

    def close(self) -> None:
        pass


class OwnLeases:
    """Hands out an endpoint's GPUs to this process. Its clients of one server, at `place`, keep off each other's."""

    needs_heartbeat = False
    endpoint_id: str | None = None

    def __init__(
        self,
        settings: PoolSettings,
        place: str,
        on_lost: Callable[[str, str, str | None], None],
        on_warned: Callable[[str, LeaseEnding | None], None],
    ) -> None:
        self._place = place
        self._on_lost = on_lost
        self._on_warned = on_warned
        self._measured: dict[str, Reading] = {}
        self._loop = asyncio.get_running_loop()
        # Readings come too seldom here to wait for one before a GPU is granted again.
        self._driver = Driver(replace(settings, awaits_reading_after_release=False), clock=boot_time)
        self._driver.lead(self._driver.state, _NoJournal(), boot_id=THIS_PROCESS, wall_clock=time)
        # No driver was there before this one, so readings from before count as well.
        self._began = self._driver.now()
        self._renewing = asyncio.ensure_future(self._keep_alive())
        self._driver.listeners.append(self._follow)
        OF_THIS_PROCESS.join(self, self._others_changed)

    @property
    def state(self) -> PoolState:
        return self._driver.state

    def observe(self, readings: Sequence[Reading]) -> None:
        since = [replace(reading, at=max(reading.at, self._began)) for reading in readings]
        self._measured = {reading.gpu.key.uuid: reading for reading in since}
        self._observe_again()

    def _observe_again(self) -> None:
        nodes = {reading.gpu.key.node for reading in self._measured.values()}
        for node in sorted(nodes - self.state.announced):
            self._driver.note(cmd.AnnounceNode(node, THIS_PROCESS))
        if not nodes | self.state.announced:
            self._driver.note(cmd.AnnounceNode(self._place, THIS_PROCESS, ()))
        self._driver.note(cmd.Observe(tuple(map(self._as_it_is_for_us, self._measured.values()))))

    def _as_it_is_for_us(self, reading: Reading) -> Reading:
        if OF_THIS_PROCESS.is_taken_by_others(self, self._claim(reading.gpu.key)):
            return replace(reading, fault="another client of this process has it")
        return reading

    def _claim(self, key: GpuKey) -> Claim:
        return (self._place, key.uuid)

    def _others_changed(self) -> None:
        """Read the GPUs again after another client gave up a claim; called from any thread."""
        with suppress(RuntimeError):  # the loop may just have ended
            self._loop.call_soon_threadsafe(self._observe_again)

    def _follow(self, events: Sequence[ev.Event]) -> None:
        for event in events:
            if isinstance(event, ev.LeaseGranted) and not OF_THIS_PROCESS.take(self, map(self._claim, event.gpus)):
                # Another client was quicker while this one decided. The grant has not been answered yet.
                self._observe_again()
                self._driver.note(cmd.Revoke(event.lease_id))
            elif isinstance(event, ev.LeaseWarned):
                self._on_warned(
                    event.lease_id, None if event.reason is None else self._ending(event.reason, event.ends)
                )
            elif isinstance(event, ev.LeaseEnded) and event.reason in ENDED_BY_POOL:
                self._on_lost(event.lease_id, ending(event.reason), str(event.reason))
        held = {key for key, slot in self.state.slots.items() if slot.occupants}
        free = [self._claim(reading.gpu.key) for reading in self._measured.values() if reading.gpu.key not in held]
        OF_THIS_PROCESS.let_go(self, free)

    def stop_granting(self, reason: str) -> None:
        """Grant nothing until the GPUs are measured again: the last measurements may be out of date."""
        readings = [slot.reading for slot in self.state.slots.values() if slot.reading is not None]
        self.observe([replace(reading, at=boot_time(), fault=reason) for reading in readings])

    def is_free(self, key: GpuKey) -> bool:
        """Whether an ordinary request would be given this GPU now."""
        slot = self.state.slots.get(key)
        return slot is not None and judge(self.state, slot, Wishes(), boot_time()).is_eligible

    def close(self) -> None:
        self._renewing.cancel()
        self._driver.close()
        OF_THIS_PROCESS.leave(self)

    async def ask(self, lease_id: str, request: Request) -> LeaseAnswer:
        for event in await self._driver.do(cmd.RequestLease(lease_id, replace(request, ttl_s=MAX_TTL_S))):
            if isinstance(event, ev.Refused) and event.code is not ev.RefusalCode.CONFLICT:
                return NeverGranted(event.why)
        return self._answer(lease_id)

    async def wait(self, lease_id: str, request: Request, wait_s: float) -> LeaseAnswer:  # noqa: ARG002 - the protocol's
        await self._driver.wait_while_queued(lease_id, wait_s)
        return self._answer(lease_id)

    async def renew(self, lease_ids: Sequence[str], wait_s: float = 0.0, warned: Sequence[str] = ()) -> Renewal:  # noqa: ARG002
        return Renewal(boot_time(), frozenset(lease_ids), {})

    async def release(self, lease_id: str) -> None:
        await self._driver.do(cmd.Release(lease_id, is_holder=True))

    async def pool_id(self) -> str | None:
        return None

    def _answer(self, lease_id: str) -> LeaseAnswer:
        match lease := self.state.find(lease_id):
            case ActiveLease():
                gpus = tuple(map(self._gpu, lease.gpus))
                devices = ",".join(str(gpu.index) for gpu in gpus)
                env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": devices}
                ends_at = None if lease.limit is None else self._local_time(lease.limit)
                return Granted(gpus, lease.fence, env, boot_time(), ends_at=ends_at)
            case QueuedLease():
                position = Order(self.state, boot_time()).position(lease)
                return Queued(f"position {position} among the workers of this process")
        return Over("another client of this process was quicker")

    def _gpu(self, key: GpuKey) -> Gpu:
        reading = self.state.slots[key].reading
        assert reading is not None  # noqa: S101 - a GPU that was granted has been read
        return reading.gpu

    def _ending(self, reason: EndReason, at: float) -> LeaseEnding:
        return LeaseEnding(str(reason), self._local_time(at))

    @staticmethod
    def _local_time(at: float) -> datetime:
        return datetime.fromtimestamp(at + wall_offset())  # noqa: DTZ006 - local time, as all times of the documents

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            if self.state.leases:
                await self._driver.do(cmd.Renew(tuple(self.state.leases)))
