"""Leases where the server has statistics only: this process decides by itself, with the same core and the same driver.

Only the workers of this process are coordinated then, which is said once, in a warning.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from math import inf
from time import time
from typing import Final

from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.client.endpoints.seen_pool import SeenGpu, SeenPool, parse_sizes, parse_summary
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.bounds import MAX_TTL_S, Thresholds
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason, QueuedLease
from gpu_worker_pool.core.model.request import Request, Wishes
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.queue.eligibility import judge
from gpu_worker_pool.core.queue.owners import Order
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.host.clock import boot_time, wall_offset
from gpu_worker_pool.ledger.driver import Driver
from gpu_worker_pool.ledger.outbox import Done, WriteBatch
from gpu_worker_pool.models import LeaseEnding
from gpu_worker_pool.wire.endings import ending

from .held_lease import HeldLease
from .lease_backend import LeaseAnswer, NeverGranted, Over, Queued, Renewal

logger = logging.getLogger("gpu_worker_pool.client")

# The boot id of a pool that ends with this process.
THIS_PROCESS: Final = "this process"
# Servers with statistics only that this process has warned of already; its clients share this.
_WARNED: set[str] = set()
# The server's address, and the GPU's UUID.
Claim = tuple[str, str]


class Claims:
    """Which client of this process has which GPU: at most one has each. Clients may run in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[Claim, object] = {}
        self._listeners: dict[object, Callable[[], None]] = {}

    def join(self, client: object, on_change: Callable[[], None]) -> None:
        """Call `on_change`, in any thread, whenever another client gives up a claim."""
        with self._lock:
            self._listeners[client] = on_change

    def take(self, client: object, claims: Iterable[Claim]) -> bool:
        """Claim all of these, or none."""
        wanted = list(claims)
        with self._lock:
            if any(self._owners.get(claim, client) is not client for claim in wanted):
                return False
            self._owners.update(dict.fromkeys(wanted, client))
            return True

    def let_go(self, client: object, claims: Iterable[Claim]) -> None:
        """Give up those of these claims that are the client's own."""
        with self._lock:
            own = [claim for claim in claims if self._owners.get(claim) is client]
            for claim in own:
                del self._owners[claim]
            others = [told for other, told in self._listeners.items() if own and other is not client]
        for told in others:
            told()

    def leave(self, client: object) -> None:
        """Give up all claims, and stop calling `on_change`."""
        with self._lock:
            own = [claim for claim, owner in self._owners.items() if owner is client]
            self._listeners.pop(client, None)
        self.let_go(client, own)

    def is_taken_by_others(self, client: object, claim: Claim) -> bool:
        with self._lock:
            return self._owners.get(claim, client) is not client


_CLAIMS: Final = Claims()


class _NoJournal:
    """Writes nothing: this pool ends with its process."""

    def write(self, batch: WriteBatch, done: Done) -> None:
        done(batch, None)

    def is_compaction_due(self, live: int) -> bool:  # noqa: ARG002 - the protocol's
        return False

    def close(self) -> None:
        pass


class OwnLeases:
    """Hands out an endpoint's GPUs to this process. Its clients of one server keep off each other's."""

    url: str | None = None

    def __init__(self, endpoint: Endpoint, config: ClientConfig) -> None:
        self._endpoint = endpoint
        self._server = endpoint.url.url
        self._sizes_mb: dict[int, float] | None = None
        self._measured: dict[str, Reading] = {}
        self._loop = asyncio.get_running_loop()
        settings = PoolSettings(
            thresholds=Thresholds(config.memory_threshold, config.utilization_threshold),
            stale_after_s=max(15.0, 3 * config.polling_interval),
            remembered_ended_leases=100,
            # Readings come too seldom here to wait for one before a GPU is granted again.
            awaits_reading_after_release=False,
        )
        self._driver = Driver(settings, clock=boot_time)
        self._driver.lead(self._driver.state, _NoJournal(), boot_id=THIS_PROCESS, wall_clock=time)
        self._state = self._driver.state
        # No driver was there before this one, so readings from before count as well.
        self._began = self._driver.now()
        self._driver.listeners.append(self._follow)
        _CLAIMS.join(self, self._others_changed)

    @property
    def endpoint_id(self) -> str:
        return self._endpoint.id

    async def poll(self, *, attempts: int, is_vital: bool) -> None:
        """Read the GPUs from the server's statistics; EndpointError or ValueError where that fails."""
        endpoint = self._endpoint
        reply = await endpoint.call("GET", "/gpu/summary", attempts=attempts, is_vital=is_vital)
        if reply.status != 200:
            raise endpoint.error(reply.detail, status=reply.status)
        if self._sizes_mb is None:
            self._sizes_mb = await self._read_sizes()
        self._observe(parse_summary(reply.data, endpoint.id, reply.sent_at, self._sizes_mb))
        if self._server not in _WARNED:
            _WARNED.add(self._server)
            text = "endpoint %s has statistics only, no leases: only the workers of this process are coordinated"
            logger.warning(text, endpoint.id, extra={"endpoint": endpoint.id})

    async def _read_sizes(self) -> dict[int, float]:
        """How large the GPUs are, for requests that share one. Without it, GPUs are handed out whole."""
        try:
            reply = await self._endpoint.call("GET", "/gpu/stats")
            return parse_sizes(reply.data) if reply.status == 200 else {}
        except (EndpointError, ValueError):
            return {}

    def stop_granting(self, reason: str) -> None:
        """Grant nothing until the GPUs are measured again: the last measurements may be out of date."""
        readings = [slot.reading for slot in self._state.slots.values() if slot.reading is not None]
        self._observe([replace(reading, at=boot_time(), fault=reason) for reading in readings])

    def seen(self) -> SeenPool:
        """The GPUs as they are now."""
        state, gpus = self._state, []
        read = [(slot.reading, slot) for slot in state.slots.values() if slot.reading is not None]
        for reading, slot in sorted(read, key=lambda item: item[0].gpu.index):
            holders = {lease_id: state.leases[lease_id].request.holder for lease_id in slot.occupants}
            gpus.append(
                SeenGpu(
                    reading.gpu.index,
                    slot.key.uuid,
                    reading.gpu.name,
                    judge(state, slot, Wishes(), boot_time()).is_eligible,
                    reading.memory_percent,
                    reading.utilization_percent,
                    {lease_id: holder.worker_id or "an unnamed holder" for lease_id, holder in holders.items()},
                )
            )
        queued = tuple(state.queue)
        return SeenPool(tuple(gpus), queued, len(queued))

    def close(self) -> None:
        self._driver.close()
        _CLAIMS.leave(self)

    async def ask(self, lease_id: str, request: Request) -> LeaseAnswer:
        for event in await self._driver.do(cmd.RequestLease(lease_id, replace(request, ttl_s=MAX_TTL_S))):
            if isinstance(event, ev.Refused) and event.code is not ev.RefusalCode.CONFLICT:
                return NeverGranted(event.why)
        return self._answer(lease_id, request)

    async def wait(self, lease_id: str, request: Request, wait_s: float) -> LeaseAnswer:
        await self._driver.wait_while_queued(lease_id, wait_s)
        return self._answer(lease_id, request)

    async def renew(self, lease_ids: Sequence[str], wait_s: float = 0.0, warned: Sequence[str] = ()) -> Renewal:
        await self._driver.do(cmd.Renew(tuple(lease_ids)))
        found = self._renewal(lease_ids)
        if found.lost or found.warnings.keys() != set(warned):
            return found
        await self._driver.wait_for_change(lease_ids, wait_s)
        return self._renewal(lease_ids)

    async def release(self, lease_id: str) -> None:
        await self._driver.do(cmd.Release(lease_id, is_holder=True))

    def _renewal(self, lease_ids: Sequence[str]) -> Renewal:
        leases = {lease_id: self._state.find(lease_id) for lease_id in lease_ids}
        active = {lease_id: lease for lease_id, lease in leases.items() if isinstance(lease, ActiveLease)}
        lost = {}
        for lease_id in leases.keys() - active.keys():
            lease = leases[lease_id]
            reason = lease.reason if isinstance(lease, EndedLease) else "unknown"
            lost[lease_id] = Over(str(reason), ending(reason))
        warnings = {
            lease_id: LeaseEnding(str(lease.ending.reason), _local_time(lease.ending.at))
            for lease_id, lease in active.items()
            if lease.ending is not None
        }
        return Renewal(inf, frozenset(active), lost, warnings)

    def _answer(self, lease_id: str, request: Request) -> LeaseAnswer:
        match lease := self._state.find(lease_id):
            case ActiveLease():
                gpus = tuple(map(self._gpu, lease.gpus))
                devices = ",".join(str(gpu.index) for gpu in gpus)
                env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": devices}
                ends_at = None if lease.limit is None else _local_time(lease.limit)
                # It ends with this process, so it cannot be lost before.
                return HeldLease(lease_id, request, self, gpus, env, inf, lease.fence, ends_at=ends_at)
            case QueuedLease():
                position = Order(self._state, boot_time()).position(lease)
                return Queued(f"position {position} among the workers of this process")
        return Over("another client of this process was quicker")

    def _observe(self, readings: Sequence[Reading]) -> None:
        since = [replace(reading, at=max(reading.at, self._began)) for reading in readings]
        self._measured = {reading.gpu.key.uuid: reading for reading in since}
        self._observe_again()

    def _observe_again(self) -> None:
        nodes = {reading.gpu.key.node for reading in self._measured.values()}
        for node in sorted(nodes - self._state.announced):
            self._driver.note(cmd.AnnounceNode(node, THIS_PROCESS))
        if not nodes | self._state.announced:
            self._driver.note(cmd.AnnounceNode(self._server, THIS_PROCESS, ()))
        self._driver.note(cmd.Observe(tuple(map(self._as_it_is_for_us, self._measured.values()))))

    def _as_it_is_for_us(self, reading: Reading) -> Reading:
        if _CLAIMS.is_taken_by_others(self, self._claim(reading.gpu.key)):
            return replace(reading, fault="another client of this process has it")
        return reading

    def _claim(self, key: GpuKey) -> Claim:
        return (self._server, key.uuid)

    def _others_changed(self) -> None:
        """Read the GPUs again after another client gave up a claim; called from any thread."""
        with suppress(RuntimeError):  # the loop may just have ended
            self._loop.call_soon_threadsafe(self._observe_again)

    def _follow(self, events: Sequence[ev.Event]) -> None:
        for event in events:
            if isinstance(event, ev.LeaseGranted) and not _CLAIMS.take(self, map(self._claim, event.gpus)):
                # Another client was quicker while this one decided. The grant has not been answered yet.
                self._observe_again()
                self._driver.note(cmd.EndLease(event.lease_id, EndReason.REVOKED))
        held = {key for key, slot in self._state.slots.items() if slot.occupants}
        free = [self._claim(reading.gpu.key) for reading in self._measured.values() if reading.gpu.key not in held]
        _CLAIMS.let_go(self, free)

    def _gpu(self, key: GpuKey) -> Gpu:
        reading = self._state.slots[key].reading
        assert reading is not None  # noqa: S101 - a GPU that was granted has been read
        return reading.gpu


def _local_time(at: float) -> datetime:
    return datetime.fromtimestamp(at + wall_offset())  # noqa: DTZ006 - local time, as all times of the documents
