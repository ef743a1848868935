"""Leases where the server has statistics only: this process decides by itself, with the same core.

Only the workers of this process are coordinated then, which is said once, in a warning.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any, Final
from weakref import WeakValueDictionary

from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.client.endpoints.seen_pool import SeenGpu, SeenPool, gpu_index, read_all
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.bounds import MAX_TTL_S
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, QueuedLease
from gpu_worker_pool.core.model.request import Request, Wishes
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import judge
from gpu_worker_pool.core.queue.owners import Order
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.gpus.grant_env import GrantedGpu, grant_env
from gpu_worker_pool.host.clock import boot_time, wall_offset
from gpu_worker_pool.models import LeaseEnding
from gpu_worker_pool.wire.leases import ending
from gpu_worker_pool.wire.statistics import GpuStatistics, GpuSummary

from .lease_backend import LeaseAnswer, NeverGranted, Over, Queued, Renewal, granted, local_time

logger = logging.getLogger("gpu_worker_pool.client")

# The boot id of a pool that ends with this process.
THIS_PROCESS: Final = "this process"


class OwnPool:
    """The GPUs of one server, which all clients of this process share, in any thread."""

    def __init__(self, polling_interval: float) -> None:
        self.state = PoolState(
            settings=PoolSettings(
                stale_after_s=max(15.0, 3 * polling_interval),
                remembered_ended_leases=100,
                # Readings come too seldom here to wait for one before a GPU is granted again.
                awaits_reading_after_release=False,
            )
        )
        self.lock = threading.RLock()
        self.sizes_mb: dict[int, float] | None = None
        # What is set when something has happened, each in its own loop.
        self._changes: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self.do(cmd.TakeOver(0, THIS_PROCESS, 0.0, wall_offset()))
        # No pool was there before this one, so readings from before count as well.
        self.began = boot_time()

    def do(self, command: cmd.Command) -> list[ev.Event]:
        with self.lock:
            events = step(self.state, command, boot_time())
            changes = list(self._changes.items()) if events else []
        for change, loop in changes:
            with suppress(RuntimeError):  # the loop may just have ended
                loop.call_soon_threadsafe(change.set)
        return events

    async def wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Wait until this is so, or the time is over. What falls due meanwhile is done."""
        change, until = asyncio.Event(), boot_time() + timeout_s
        self._changes[change] = asyncio.get_running_loop()
        try:
            while not is_so() and boot_time() < until:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(min(until, self.state.next_due_at()) - boot_time(), 0.0)):
                        await change.wait()
                change.clear()
                if self.state.next_due_at() <= boot_time():
                    self.do(cmd.Tick())
        finally:
            del self._changes[change]


_POOLS: Final[WeakValueDictionary[str, OwnPool]] = WeakValueDictionary()
# Servers with statistics only that this process has warned of already.
_WARNED: Final[set[str]] = set()
_ONE_AT_A_TIME: Final = threading.Lock()


class OwnLeases:
    """Hands out an endpoint's GPUs to a client of this process."""

    url: str | None = None

    def __init__(self, endpoint: Endpoint, config: ClientConfig) -> None:
        self._endpoint = endpoint
        self.is_multi = config.is_multi
        self._server = endpoint.url.url
        self._thresholds: dict[str, Any] = {
            "memory_threshold_percent": config.memory_threshold,
            "utilization_threshold_percent": config.utilization_threshold,
        }
        with _ONE_AT_A_TIME:
            self._pool = _POOLS.setdefault(self._server, OwnPool(config.polling_interval))

    @property
    def endpoint_id(self) -> str:
        return self._endpoint.id

    async def poll(self, *, attempts: int, is_vital: bool) -> None:
        """Read the GPUs from the server's statistics; EndpointError or ValueError where that fails."""
        endpoint, pool = self._endpoint, self._pool
        reply = await endpoint.call("GET", "/gpu/summary", attempts=attempts, is_vital=is_vital)
        if reply.status != 200:
            raise endpoint.error(reply.detail, status=reply.status)
        if pool.sizes_mb is None:
            pool.sizes_mb = await self._read_sizes()
        readings = parse_summary(reply.data, self._server, max(reply.sent_at, pool.began), pool.sizes_mb)
        pool.do(cmd.AnnounceNode(self._server, THIS_PROCESS, None if readings else ()))
        pool.do(cmd.Observe(tuple(readings)))
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
        read = [slot.reading for slot in list(self._pool.state.slots.values()) if slot.reading is not None]
        self._pool.do(cmd.Observe(tuple(replace(reading, at=boot_time(), fault=reason) for reading in read)))

    def seen(self) -> SeenPool:
        """The GPUs as they are now."""
        state, gpus, wishes = self._pool.state, [], Wishes(**self._thresholds)
        with self._pool.lock:
            read = [(slot.reading, slot) for slot in state.slots.values() if slot.reading is not None]
            for reading, slot in sorted(read, key=lambda item: item[0].gpu.index):
                holders = {lease_id: state.leases[lease_id].request.holder for lease_id in slot.occupants}
                gpus.append(
                    SeenGpu(
                        reading.gpu.index,
                        slot.key.uuid,
                        reading.gpu.name,
                        judge(state, slot, wishes, boot_time()).is_eligible,
                        reading.memory_percent,
                        reading.utilization_percent,
                        {lease_id: holder.worker_id or "an unnamed holder" for lease_id, holder in holders.items()},
                    )
                )
            queued = tuple(state.queue)
        return SeenPool(tuple(gpus), queued, len(queued))

    async def ask(self, lease_id: str, request: Request) -> LeaseAnswer:
        asked = replace(request, ttl_s=MAX_TTL_S, wishes=replace(request.wishes, **self._thresholds))
        for event in self._pool.do(cmd.RequestLease(lease_id, asked)):
            if isinstance(event, ev.Refused) and event.code is not ev.RefusalCode.CONFLICT:
                return NeverGranted(event.why)
        return self._answer(lease_id, request)

    async def wait(self, lease_id: str, request: Request, wait_s: float) -> LeaseAnswer:
        await self._pool.wait_until(lambda: not isinstance(self._pool.state.find(lease_id), QueuedLease), wait_s)
        return self._answer(lease_id, request)

    async def renew(self, lease_ids: Sequence[str], wait_s: float = 0.0, warned: Sequence[str] = ()) -> Renewal:
        self._pool.do(cmd.Renew(tuple(lease_ids)))

        def has_news() -> bool:
            found = self._renewal(lease_ids)
            return bool(found.lost) or found.warnings.keys() != set(warned)

        await self._pool.wait_until(has_news, wait_s)
        return self._renewal(lease_ids)

    async def release(self, lease_id: str, note: str | None = None) -> None:
        self._pool.do(cmd.Release(lease_id, is_holder=True, why=note))

    def _renewal(self, lease_ids: Sequence[str]) -> Renewal:
        leases = {lease_id: self._pool.state.find(lease_id) for lease_id in lease_ids}
        active = {lease_id: lease for lease_id, lease in leases.items() if isinstance(lease, ActiveLease)}
        lost = {}
        for lease_id in leases.keys() - active.keys():
            lease = leases[lease_id]
            reason = lease.reason if isinstance(lease, EndedLease) else "unknown"
            lost[lease_id] = Over(str(reason), ending(reason))
        warnings = {
            lease_id: LeaseEnding(str(lease.ending.reason), local_time(lease.ending.at + wall_offset()))
            for lease_id, lease in active.items()
            if lease.ending is not None
        }
        return Renewal(inf, frozenset(active), lost, warnings)

    def _answer(self, lease_id: str, request: Request) -> LeaseAnswer:
        match lease := self._pool.state.find(lease_id):
            case ActiveLease():
                gpus = [(self._endpoint.id, self._gpu(key)) for key in lease.gpus]
                env = grant_env([GrantedGpu(gpu.index, gpu.key.uuid) for _, gpu in gpus])
                ends_at = None if lease.limit is None else local_time(lease.limit + wall_offset())
                # It ends with this process, so it cannot be lost before.
                return granted(self, lease_id, request, gpus, inf, fence=lease.fence, env=env, ends_at=ends_at)
            case QueuedLease():
                with self._pool.lock:
                    position = Order(self._pool.state, boot_time()).position(lease)
                return Queued(f"position {position} among the workers of this process")
        return Over("it was released")

    def _gpu(self, key: GpuKey) -> Gpu:
        reading = self._pool.state.slots[key].reading
        assert reading is not None  # noqa: S101 - a GPU that was granted has been read
        return replace(reading.gpu, key=GpuKey(self._endpoint.id, key.uuid))


def parse_summary(data: object, node: str, at: float, totals_mb: Mapping[int, float]) -> list[Reading]:
    """Readings from /gpu/summary; ValueError where it is something else."""
    readings = []
    for gpu in read_all(GpuSummary, data, "gpus_summary").gpus_summary:
        index, percent = gpu_index(gpu.gpu_id), gpu.memory_usage_percent
        total_mb = totals_mb.get(index)
        readings.append(
            Reading(
                Gpu(GpuKey(node, f"index-{index}" if gpu.uuid is None else gpu.uuid), index, gpu.name or ""),
                at,
                memory_total_mb=total_mb,
                memory_used_mb=None if total_mb is None or percent is None else total_mb * percent / 100,
                utilization_percent=gpu.utilization_percent,
                fault=None if gpu.healthy else "the server calls it unhealthy",
                reported_memory_percent=percent,
            )
        )
    return readings


def parse_sizes(data: object) -> dict[int, float]:
    """How much memory each GPU has, from /gpu/stats; what is not there is left out."""
    sizes = {gpu.gpu_id: gpu.memory.total_mb for gpu in read_all(GpuStatistics, data, "gpus").gpus}
    return {index: float(total_mb) for index, total_mb in sizes.items() if total_mb is not None and total_mb > 0}
