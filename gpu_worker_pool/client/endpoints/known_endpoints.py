"""All endpoints together: polls them side by side, knows which are up and which are one fleet, and orders them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from gpu_worker_pool.client.acquire.heartbeat import Heartbeat
from gpu_worker_pool.client.backends.fleet_leases import FleetLeases
from gpu_worker_pool.client.backends.server_leases import ServerLeases
from gpu_worker_pool.client.http.first_answers import wait_for_answers
from gpu_worker_pool.client.http.transport import Transport
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.bounds import Thresholds
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.holder_mark import HolderMarks
from gpu_worker_pool.models import LeaseEnding

from .balancing import Balancer, EndpointView
from .endpoint import Endpoint
from .member import Entry, FleetPool, Member, Place
from .seen_pool import MOST_GPUS_OF_A_FLEET, SeenPool, parse_pool, parse_sizes, parse_summary

logger = logging.getLogger("gpu_worker_pool.client")

# Servers with statistics only that this process has warned of already; its clients share this.
_WARNED: set[str] = set()
# How long a start waits for the first endpoint to answer; the others are polled beside it.
FIRST_ANSWER_S = 0.75
# How long it waits for the others when one has answered; less if it can do without them, and none of them answers.
GRACE_S = 0.1
# A request that waits at several endpoints counts once, so the first of each queue are asked for with their ids.
# The leases are for the status only; with more of them the answer could be too large to be read.
POOL_PATH = "/pool?queue=100&leases=1000"
# One of the entry points of a fleet shows all of it once in a polling interval; a little less, as polls are not exact.
FLEET_PER_POLL = 0.75


class KnownEndpoints:
    def __init__(
        self,
        config: ClientConfig,
        on_lost: Callable[[str, str, str | None], None],
        on_warned: Callable[[str, LeaseEnding | None], None],
        on_seen: Callable[[Iterable[str]], None],
    ) -> None:
        """`on_seen` is called with the ids of the active leases that a poll showed."""
        self._config = config
        self._on_lost, self._on_warned, self._on_seen = on_lost, on_warned, on_seen
        self._transport = Transport(ca_file=config.ca_file, is_named=config.is_named)
        # Those of all endpoints: any entry point of a fleet may release what another one granted.
        self._marks = HolderMarks()
        self.members: dict[str, Member] = {}
        self.fleets: dict[str, FleetPool] = {}
        for endpoint_id, url in config.endpoints.items():
            endpoint = Endpoint(endpoint_id, url, self._transport, config)
            book = ServerLeases(endpoint, marks=self._marks)
            self.members[endpoint_id] = Member(endpoint, book, Heartbeat(book, on_lost, on_warned))
        # Also those of a fleet that an endpoint has left: leases there are still kept alive.
        self._entries: dict[str, list[Entry]] = {}
        self.balancer = Balancer(config.strategy)
        self._tasks: list[asyncio.Task[None]] = []
        self._firsts: list[asyncio.Task[None]] = []
        self._asked_at = 0.0
        self._change: asyncio.Future[None] | None = None
        self.is_stopping = False

    @property
    def is_up(self) -> bool:
        """Whether one endpoint at least can be used."""
        return any(member.endpoint.is_healthy for member in self.members.values())

    async def start(self, *, waits_for_late: bool = True) -> None:
        """Poll all endpoints side by side; returns when one has answered, or all have failed, or time is over."""
        await self._transport.open()
        self._asked_at = boot_time()
        self._firsts = firsts = [
            asyncio.create_task(self._poll(member), name=f"gpu-look-{id_}") for id_, member in self.members.items()
        ]
        try:
            async with asyncio.timeout(FIRST_ANSWER_S):
                # A moment for those that answer almost as quickly as the first: a request can then choose among them, and a
                # status shows them. Later ones join when they answer.
                await wait_for_answers(firsts, lambda _: self.is_up, GRACE_S, lambda _: not waits_for_late)
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

    async def wait_for_first_answers(self) -> None:
        """Wait for endpoints that have not answered since the start, for as long as the start would have waited for the first."""
        late = [first for first in self._firsts if not first.done()]
        left_s = self._asked_at + FIRST_ANSWER_S - boot_time()
        if late and left_s > 0:
            await asyncio.wait(late, timeout=left_s)

    def say_that_it_stops(self) -> None:
        """Wake the requests that wait, so that they end."""
        self.is_stopping = True
        self._tell_of_change()

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self.members.values():
            await member.heartbeat.close()
            for entry in self._entries.pop(member.id, ()):
                await entry.heartbeat.close()
            if member.own_leases is not None:
                member.own_leases.close()
        await self._transport.close()

    def order(self) -> list[Place]:
        """Where a request can be made now, the place to try first at the front. A fleet is there once, by the entry point
        that the strategy puts first.
        """
        if len(self.members) == 1:
            return self.places()
        views = []
        for member in self.members.values():
            gpus = member.gpus()
            views.append(EndpointView(member.id, member.endpoint.is_healthy, len(gpus.gpus), gpus.available))
        return self._places(self.members[endpoint_id] for endpoint_id in self.balancer.order(views))

    def places(self) -> list[Place]:
        """All places, those that are down too, in the order of the endpoints."""
        return self._places(self.members.values())

    def _places(self, members: Iterable[Member]) -> list[Place]:
        found: dict[str, Place] = {}
        for member in members:
            if member.entry is None and self._config.uses_fleets and member.view.seen.is_in_fleet:
                continue  # which fleet it belongs to is not known yet, and it can grant nothing
            place = Place(member, None if member.entry is None else member.entry.fleet)
            found.setdefault(place.key, place)
        return list(found.values())

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

    def note_failure(self, error: EndpointError) -> None:
        """Have the next poll come at once after a failed call: it tells whether the endpoint is down."""
        id_ = error.endpoint_id
        logger.info("endpoint %s: %s", id_, error.reason, extra={"endpoint": id_})
        self.members[id_].poll_now.set()

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
                    member.view.show(parse_pool(reply.data, reply.sent_at))
                    self._on_seen(member.view.seen.active)
                    endpoint.kind = "leases"
                    await self._follow_fleet(member)
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

    async def _follow_fleet(self, member: Member) -> None:
        """Take in which fleet an endpoint belongs to, and let one of its entry points show all of its GPUs."""
        seen, known = member.view.seen, None if member.entry is None else member.entry.fleet.id
        # A box that has just lost its leader may not name its fleet; it is no other one for that.
        fleet_id = known if seen.is_in_fleet and seen.fleet_id is None else seen.fleet_id
        if not self._config.uses_fleets:
            return
        if fleet_id != known:
            self._change_fleet(member, fleet_id)
        fleet = None if member.entry is None else member.entry.fleet
        if fleet is None or boot_time() - fleet.view.seen.seen_at < self._config.polling_interval * FLEET_PER_POLL:
            return
        # What cannot be shown now is asked of the next entry point: this one is up.
        with suppress(EndpointError, ValueError):
            reply = await member.endpoint.call("GET", f"/fleet{POOL_PATH}")
            if reply.status == 200:
                fleet.view.show(parse_pool(reply.data, reply.sent_at, MOST_GPUS_OF_A_FLEET))
                self._on_seen(fleet.view.seen.active)

    def _change_fleet(self, member: Member, fleet_id: str | None) -> None:
        if member.entry is not None:
            member.entry.fleet.members.remove(member)
        member.entry = None
        if fleet_id is not None:
            fleet = self.fleets.setdefault(fleet_id, FleetPool(fleet_id))
            # In the order of the configuration, whichever answers first.
            fleet.members = [known for known in self.members.values() if known in fleet.members or known is member]
            past = self._entries.setdefault(member.id, [])
            member.entry = next((entry for entry in past if entry.fleet is fleet), None)
            if member.entry is None:
                member.entry = self._entry(member, fleet)
                past.append(member.entry)
        self._tell_of_change()

    def _entry(self, member: Member, fleet: FleetPool) -> Entry:
        leases = ServerLeases(member.endpoint, fleet.id, self._marks)
        book = FleetLeases(fleet.id, member.endpoint, fleet.entries, self.note_failure)
        return Entry(fleet, leases, book, Heartbeat(book, self._on_lost, self._on_warned))

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
                    stale_after_s=max(15.0, 3 * config.polling_interval),
                    remembered_ended_leases=100,
                ),
                member.endpoint.url.url,
                self._on_lost,
                self._on_warned,
            )
            url, fields = member.endpoint.url.url, {"endpoint": member.id}
            text = "endpoint %s has statistics only, no leases: only the workers of this process are coordinated"
            logger.log(logging.DEBUG if url in _WARNED else logging.WARNING, text, member.id, extra=fields)
            _WARNED.add(url)
        member.own_leases.observe(readings)
        member.view.seen = SeenPool(seen_at=boot_time())
