"""All endpoints together: polls them side by side, knows which are up, and orders them for a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpu_worker_pool.client.acquire.heartbeat import Heartbeat
from gpu_worker_pool.client.backends.lease_book import LeaseBook
from gpu_worker_pool.client.backends.server_leases import ServerLeases
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.endpoints.balancing import Balancer, EndpointView
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.settings import PoolSettings, Thresholds
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.wire.transport import Transport

from .endpoint import Endpoint
from .seen_pool import Change, SeenGpu, SeenPool, parse_pool, parse_sizes, parse_summary

if TYPE_CHECKING:
    from gpu_worker_pool.client.backends.own_leases import OwnLeases

logger = logging.getLogger("gpu_worker_pool.client")

# Servers with statistics only that this process has warned of already; its clients share this.
_WARNED: set[str] = set()
# How long a start waits for the first endpoint to answer; the others are polled beside it.
FIRST_ANSWER_S = 0.75
# A request that waits at several endpoints counts once, so the first of each queue are asked for with their ids.
# The leases are for the status only; with more of them the answer could be too large to be read.
POOL_PATH = "/pool?queue=100&leases=1000"


@dataclass(eq=False)
class Member:
    """An endpoint with what is known of its GPUs, and what hands them out."""

    endpoint: Endpoint
    server_leases: ServerLeases
    heartbeat: Heartbeat
    view: SeenPool = field(default_factory=SeenPool)
    own_leases: OwnLeases | None = None
    sizes_mb: dict[int, float] | None = None
    # What this process was granted and released since the view was taken, and when.
    taken: dict[Change, float] = field(default_factory=dict)
    released: dict[Change, float] = field(default_factory=dict)
    poll_now: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return self.endpoint.id

    @property
    def book(self) -> LeaseBook:
        if self.endpoint.kind == "statistics" and self.own_leases is not None:
            return self.own_leases
        return self.server_leases

    def gpus(self) -> SeenPool:
        """Its GPUs, with the changes that this process made since the last poll."""
        if self.endpoint.kind == "statistics" and self.own_leases is not None:
            return _own_view(self.own_leases, self.view)
        return self.view.with_changes(self.taken, self.released)

    def note_taken(self, uuid: str, worker_id: str) -> None:
        self.taken[uuid, worker_id] = boot_time()

    def note_released(self, uuid: str, worker_id: str) -> None:
        self.taken.pop((uuid, worker_id), None)
        self.released[uuid, worker_id] = boot_time()

    def show(self, view: SeenPool) -> None:
        """Take in what a poll showed; it includes the changes that this process made before."""
        self.view = view
        self.taken = {change: at for change, at in self.taken.items() if at >= view.seen_at}
        self.released = {change: at for change, at in self.released.items() if at >= view.seen_at}


class Fleet:
    def __init__(self, config: ClientConfig, on_lost: Callable[[str, str], None]) -> None:
        self._config = config
        self._transport = Transport(ca_file=config.ca_file, is_named=config.is_named)
        self.members: dict[str, Member] = {}
        for endpoint_id, url in config.endpoints.items():
            endpoint = Endpoint(endpoint_id, url, self._transport, config)
            book = ServerLeases(endpoint)
            self.members[endpoint_id] = Member(endpoint, book, Heartbeat(book, on_lost))
        self.balancer = Balancer(config.strategy)
        self._tasks: list[asyncio.Task[None]] = []
        self._change: asyncio.Future[None] | None = None
        self.is_stopping = False

    @property
    def is_up(self) -> bool:
        """Whether one endpoint at least can be used."""
        return any(member.endpoint.is_healthy for member in self.members.values())

    async def start(self) -> None:
        """Poll all endpoints side by side; returns when one has answered, or all have failed, or time is over."""
        await self._transport.open()
        firsts = [
            asyncio.create_task(self._poll(member), name=f"gpu-look-{id_}") for id_, member in self.members.items()
        ]
        waiting = set(firsts)
        try:
            async with asyncio.timeout(FIRST_ANSWER_S):
                while waiting and not self.is_up:
                    _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                # A moment for those that answer almost as quickly as the first: a request can then choose among them.
                if waiting:
                    await asyncio.wait(waiting, timeout=0.1)
        except TimeoutError:
            pass
        except BaseException:
            for task in firsts:
                task.cancel()
            await asyncio.gather(*firsts, return_exceptions=True)
            raise
        for first, member in zip(firsts, self.members.values(), strict=True):
            self._tasks.append(asyncio.create_task(self._keep_polling(member, first), name=f"gpu-watch-{member.id}"))
        if not self.is_up:
            down = "; ".join(f"{id_}: {reason.rstrip('. ')}" for id_, reason in self.reasons().items())
            logger.warning("no endpoint answers yet: %s", down)

    def say_that_it_stops(self) -> None:
        """Wake the requests that wait for an endpoint, so that they end."""
        self.is_stopping = True
        self._tell_of_change()

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self.members.values():
            await member.heartbeat.close()
            if member.own_leases is not None:
                member.own_leases.close()
        await self._transport.close()

    def order(self) -> list[Member]:
        """The endpoints that are up, the one to try first at the front."""
        views = []
        for member in self.members.values():
            gpus, endpoint = member.gpus(), member.endpoint
            views.append(
                EndpointView(member.id, endpoint.is_healthy, len(gpus.gpus), gpus.available, endpoint.recovered_at)
            )
        return [self.members[endpoint_id] for endpoint_id in self.balancer.order(views, boot_time())]

    def reasons(self) -> dict[str, str]:
        """Why each endpoint that is down is."""
        return {
            id_: member.endpoint.last_error or "it is down"
            for id_, member in self.members.items()
            if not member.endpoint.is_healthy
        }

    def changed(self) -> asyncio.Future[None]:
        """A future that is done when an endpoint comes up or goes down."""
        if self._change is None or self._change.done():
            self._change = asyncio.get_running_loop().create_future()
        return self._change

    def _tell_of_change(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def note_failure(self, member: Member, error: EndpointError) -> None:
        """Have the next poll come at once after a failed call: it tells whether the endpoint is down."""
        logger.info("endpoint %s: %s", member.id, error.reason, extra={"endpoint": member.id})
        member.poll_now.set()

    async def try_again(self, member: Member) -> bool:
        """Poll an endpoint now, even where its breaker is open; returns whether it is up."""
        member.endpoint.breaker.allow_probe_now(boot_time())
        # Vital, because a poll that is under way, and may hang, has the only call that the breaker lets through.
        await self._poll(member, is_vital=True)
        return member.endpoint.is_healthy

    async def _keep_polling(self, member: Member, first: asyncio.Task[None]) -> None:
        try:
            await first
            while True:
                await self._pause(member)
                await self._poll(member)
        finally:
            first.cancel()

    async def _pause(self, member: Member) -> None:
        endpoint = member.endpoint
        interval_s = self._config.polling_interval
        if not endpoint.is_healthy:
            retry_in_s = max(endpoint.breaker.retry_in_s(boot_time()), 0.05)
            interval_s = min(retry_in_s, self._config.endpoint_health_check_interval)
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await member.poll_now.wait()
        member.poll_now.clear()

    async def _poll(self, member: Member, *, is_vital: bool = False) -> None:
        endpoint = member.endpoint
        was_healthy = endpoint.is_healthy
        try:
            await self._poll_once(member, is_vital=is_vital)
        except EndpointError as error:
            if was_healthy:
                logger.warning("endpoint %s is down: %s", member.id, error.reason, extra={"endpoint": member.id})
            endpoint.mark_down(error.reason)
            if member.own_leases is not None:
                member.own_leases.stop_granting(f"its server does not answer: {error.reason}")
        else:
            endpoint.mark_healthy()
            if not was_healthy:
                logger.info("endpoint %s is up (%s)", member.id, endpoint.kind, extra={"endpoint": member.id})
        if was_healthy != endpoint.is_healthy:
            self._tell_of_change()

    async def _poll_once(self, member: Member, *, is_vital: bool) -> None:
        endpoint = member.endpoint
        attempts = endpoint.attempts if endpoint.is_healthy else 1
        try:
            if endpoint.kind != "statistics":
                reply = await endpoint.call("GET", POOL_PATH, attempts=attempts, is_vital=is_vital)
                if reply.status == 200:
                    member.show(parse_pool(reply.data, reply.sent_at))
                    endpoint.kind = "leases"
                    return
                if reply.status not in {404, 405}:
                    raise endpoint.error(reply.detail, status=reply.status)
            reply = await endpoint.call("GET", "/gpu/summary", attempts=attempts, is_vital=is_vital)
            if reply.status != 200:
                raise endpoint.error(reply.detail, status=reply.status)
            if member.sizes_mb is None:
                member.sizes_mb = await self._sizes(endpoint)
            readings = parse_summary(reply.data, member.id, reply.sent_at, member.sizes_mb)
        except ValueError as error:
            raise endpoint.error(str(error)) from None
        self._decide_here(member, readings)
        endpoint.kind = "statistics"

    async def _sizes(self, endpoint: Endpoint) -> dict[int, float]:
        """How large the GPUs are, for requests that share one. Without it, GPUs are handed out whole."""
        try:
            reply = await endpoint.call("GET", "/gpu/stats")
            return parse_sizes(reply.data) if reply.status == 200 else {}
        except (EndpointError, ValueError):
            return {}

    def _decide_here(self, member: Member, readings: list[Reading]) -> None:
        if member.own_leases is None:
            from gpu_worker_pool.client.backends.own_leases import OwnLeases  # noqa: PLC0415 - loaded only where it is needed

            config = self._config
            member.own_leases = OwnLeases(
                PoolSettings(
                    thresholds=Thresholds(config.memory_threshold, config.utilization_threshold),
                    workers_per_gpu=config.workers_per_gpu,
                    stale_after_s=max(15.0, 3 * config.polling_interval),
                    remembered_ended_leases=100,
                ),
                member.endpoint.url.url,
            )
            url, fields = member.endpoint.url.url, {"endpoint": member.id}
            text = "endpoint %s has statistics only, no leases: only the workers of this process are coordinated"
            logger.log(logging.DEBUG if url in _WARNED else logging.WARNING, text, member.id, extra=fields)
            _WARNED.add(url)
        member.own_leases.observe(readings)
        member.view = SeenPool(seen_at=boot_time())


def _own_view(own: OwnLeases, view: SeenPool) -> SeenPool:
    state = own.state
    gpus = []
    read = [(slot.reading, slot) for slot in state.slots.values() if slot.reading is not None]
    for reading, slot in sorted(read, key=lambda item: item[0].gpu.index):
        holders = [state.leases[lease_id].request.holder for lease_id in slot.occupants]
        gpus.append(
            SeenGpu(
                reading.gpu.index,
                slot.key.uuid,
                reading.gpu.name,
                own.is_free(slot.key),
                reading.memory_percent,
                reading.utilization_percent,
                tuple(holder.worker_id or "an unnamed holder" for holder in holders),
            )
        )
    queued = tuple(state.queue)
    return SeenPool(tuple(gpus), queued, len(queued), view.seen_at)
