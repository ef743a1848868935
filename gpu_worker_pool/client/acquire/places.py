"""Where a client can ask for GPUs: which endpoints are up, which of them are one fleet, and which to ask first.

Endpoints are polled when a client starts, while a request waits, and for a while after a status was asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING

from gpu_worker_pool.client.backends.lease_backend import HeldLease, LeaseBackend
from gpu_worker_pool.client.backends.server_leases import ServerLeases
from gpu_worker_pool.client.endpoints.balancing import Balancer, EndpointView
from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.client.endpoints.seen_pool import MOST_GPUS_OF_A_FLEET, SeenPool, parse_pool
from gpu_worker_pool.client.http.transport import Transport, gather_with_grace
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.host.clock import boot_time

if TYPE_CHECKING:
    from gpu_worker_pool.client.backends.own_leases import OwnLeases

logger = logging.getLogger("gpu_worker_pool.client")

# How long a start waits for the first endpoint to answer; the others are polled beside it.
FIRST_ANSWER_S = 0.75
# How long it waits for the others when one has answered.
GRACE_S = 0.1
# For how long endpoints are polled after a status was asked for: a program that shows it again soon has a recent one.
STATUS_S = 60.0
# A request that waits at several endpoints counts once, so the first of each queue are asked for with their ids.
# The leases are for the status only; with more of them the answer could be too large to be read.
POOL_PATH = "/pool?queue=100&leases=1000"
# One of the entry points of a fleet shows all of it once in a polling interval; a little less, as polls are not exact.
FLEET_PER_POLL = 0.75


class Place:
    """Where a request waits in one queue: the endpoint `home`, or a fleet with several endpoints as its entry points."""

    def __init__(self, places: Places, *, home: Endpoint | None = None, fleet_id: str | None = None) -> None:
        self.key = f"fleet {fleet_id}" if home is None else home.id
        self.is_multi = places.config.is_multi
        self.fleet_id = fleet_id
        # What one of the entry points showed of all boxes of a fleet.
        self.seen = SeenPool()
        # What hands out the GPUs of an endpoint that has statistics only.
        self.own_leases: OwnLeases | None = None
        self._places, self._home = places, home
        self._backends: dict[str, ServerLeases] = {}

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        if self._home is not None:
            return (self._home,)
        return [endpoint for endpoint in self._places.endpoints.values() if endpoint.fleet_id == self.fleet_id]

    @property
    def is_healthy(self) -> bool:
        return any(endpoint.is_healthy for endpoint in self.endpoints)

    def backend(self, home: Endpoint) -> LeaseBackend:
        """What hands out its GPUs, asked at this endpoint first."""
        if home.kind == "statistics" and self.own_leases is not None:
            return self.own_leases
        if home.id not in self._backends:
            self._backends[home.id] = ServerLeases(
                home,
                self.fleet_id,
                lambda: self.endpoints,
                self._places.note_failure,
                self.name_of,
                is_multi=self.is_multi,
            )
        return self._backends[home.id]

    def endpoint_of(self, node: str | None) -> Endpoint | None:
        """The endpoint whose own node this is; None where no endpoint of the client is."""
        return next((endpoint for endpoint in self.endpoints if endpoint.seen.node == node is not None), None)

    def name_of(self, node: str | None) -> str:
        """What the GPUs of a node are called by: its endpoint, or the node itself where no endpoint is."""
        endpoint = self.endpoint_of(node)
        if endpoint is None and self.fleet_id is not None and node:
            return node
        return (endpoint or self.endpoints[0]).id

    def gpus(self) -> SeenPool:
        """Its GPUs with this client's own changes; of a fleet those of all boxes, as they were last shown."""
        return self._with_own(self.seen) if self._home is None else self.gpus_of(self._home)

    def gpus_of(self, endpoint: Endpoint) -> SeenPool:
        """Those of one endpoint's own box."""
        if endpoint.kind == "statistics" and self.own_leases is not None:
            return self.own_leases.seen()
        return self._with_own(endpoint.seen)

    def _with_own(self, seen: SeenPool) -> SeenPool:
        workers: dict[str, dict[str, str]] = {}
        for lease in self._places.held.values():
            for uuid in lease.assignment.uuids if lease.backend in self._backends.values() else ():
                workers.setdefault(uuid, {})[lease.id] = lease.assignment.worker_id
        return seen.with_own(workers, self._places.ended)


class Places:
    """`held` are the leases of the client at present, `ended` those that it has no more. `why_not` says why the GPUs that an
    endpoint shows are not to be used; None if they are.
    """

    def __init__(
        self,
        config: ClientConfig,
        held: Mapping[str, HeldLease],
        ended: Container[str],
        why_not: Callable[[Endpoint], str | None] = lambda _: None,
    ) -> None:
        self.config = config
        self.held, self.ended = held, ended
        self._why_not = why_not
        self._transport = Transport.of(config)
        self.endpoints = {id_: Endpoint(id_, url, self._transport, config) for id_, url in config.endpoints.items()}
        self._singles = {id_: Place(self, home=endpoint) for id_, endpoint in self.endpoints.items()}
        # Also those that no endpoint belongs to any more: leases there are still kept alive.
        self._fleets: dict[str, Place] = {}
        self.balancer = Balancer(config.strategy)
        # A status is asked for by programs that run this loop only now and then, too.
        self._loop = asyncio.get_running_loop()
        self._polls: dict[str, asyncio.Task[None]] = {}
        # What is called when an endpoint comes up or goes down, until when polls are made for a status, and the next polls.
        self._watchers: list[Callable[[], None]] = []
        self._polls_until = -inf
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.is_stopping = False

    @property
    def is_up(self) -> bool:
        """Whether one endpoint at least can be used."""
        return any(endpoint.is_healthy for endpoint in self.endpoints.values())

    async def start(self, first_s: float = FIRST_ANSWER_S, grace_s: float = GRACE_S) -> None:
        """Poll all endpoints side by side; returns when one has answered, or all have failed, or `first_s` are over. When one has
        answered, the others are waited for for `grace_s`.
        """
        await self._transport.open()
        polls = [self._poll_soon(endpoint) for endpoint in self.endpoints.values()]
        with suppress(TimeoutError):
            async with asyncio.timeout(first_s):
                # A moment for those that answer almost as quickly as the first: a request can then choose among them, and a
                # status shows them. Later ones join when they answer.
                await gather_with_grace(polls, lambda _: self.is_up, grace_s)
        if not self.is_up:
            down = "; ".join(f"{id_}: {reason.rstrip('. ')}" for id_, reason in self.reasons().items())
            logger.warning("no endpoint answers yet: %s", down)

    def say_that_it_stops(self) -> None:
        """Wake the requests that wait, so that they end."""
        self.is_stopping = True
        self._tell_of_change()

    async def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for task in self._polls.values():
            task.cancel()
        await asyncio.gather(*self._polls.values(), return_exceptions=True)
        await self._transport.close()

    def order(self) -> list[tuple[Place, Endpoint]]:
        """Where a request can be made now, and by which endpoint; what to try first is at the front. A fleet is there once,
        by the entry point that the strategy puts first.
        """
        if len(self.endpoints) == 1:
            return self.all()
        views = []
        for endpoint in self.endpoints.values():
            gpus = self.gpus_of(endpoint)
            views.append(EndpointView(endpoint.id, endpoint.is_healthy, len(gpus.gpus), gpus.available))
        return self._places(self.endpoints[endpoint_id] for endpoint_id in self.balancer.order(views))

    def all(self) -> list[tuple[Place, Endpoint]]:
        """All places, those that are down too, in the order of the endpoints."""
        return self._places(self.endpoints.values())

    def place_of(self, endpoint: Endpoint) -> Place | None:
        """Where a request is made by this endpoint; None while its fleet is not known: it can grant nothing then."""
        if not self.config.uses_fleets or not (endpoint.fleet_id or endpoint.seen.is_in_fleet):
            return self._singles[endpoint.id]
        return self._fleets.get(endpoint.fleet_id or "")

    def gpus_of(self, endpoint: Endpoint) -> SeenPool:
        """The GPUs of its own box, with this client's own changes."""
        return (self.place_of(endpoint) or self._singles[endpoint.id]).gpus_of(endpoint)

    def _places(self, endpoints: Iterable[Endpoint]) -> list[tuple[Place, Endpoint]]:
        found: dict[str, tuple[Place, Endpoint]] = {}
        for endpoint in endpoints:
            if (place := self.place_of(endpoint)) is not None:
                found.setdefault(place.key, (place, endpoint))
        return list(found.values())

    def reasons(self) -> dict[str, str]:
        """Why each endpoint that is down is."""
        return {
            id_: endpoint.last_error or "it is down"
            for id_, endpoint in self.endpoints.items()
            if not endpoint.is_healthy
        }

    # --- polling

    @contextmanager
    def watched(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Poll the endpoints meanwhile, and call this when one comes up or goes down, or the client is stopped."""
        self._watchers.append(on_change)
        for endpoint in self.endpoints.values():
            self._poll_when_due(endpoint)
        try:
            yield
        finally:
            self._watchers.remove(on_change)

    def watch_for_status(self) -> None:
        """Poll the endpoints for a while: a status was asked for."""
        self._polls_until = boot_time() + STATUS_S
        for endpoint in self.endpoints.values():
            self._poll_when_due(endpoint)

    def _poll_when_due(self, endpoint: Endpoint) -> None:
        """Poll it again when it is time, if that is wanted then."""
        if endpoint.id in self._timers:
            self._timers.pop(endpoint.id).cancel()
        if self._watchers or boot_time() < self._polls_until:
            due_s = max(endpoint.next_poll_at - boot_time(), 0.0)
            self._timers[endpoint.id] = self._loop.call_later(due_s, self._poll_if_wanted, endpoint)

    def _poll_if_wanted(self, endpoint: Endpoint) -> None:
        if self._watchers or boot_time() < self._polls_until:
            self._poll_soon(endpoint)

    def _tell_of_change(self) -> None:
        for on_change in self._watchers:
            on_change()

    async def refresh(self, *, waits_for_new: bool = False) -> None:
        """Poll the endpoints that were not polled in the last polling interval. Waits for those that are up, or for all
        where none is, and for those that have never answered only if told so.
        """
        now, is_down = boot_time(), not self.is_up
        polls = [
            (one, self._poll_soon(one))
            for one in self.endpoints.values()
            if one.next_poll_at <= now or self._is_polled(one)
        ]
        waited = [poll for one, poll in polls if one.is_healthy or is_down or (waits_for_new and one.last_seen is None)]
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER_S):
                await gather_with_grace(waited, lambda _: True, FIRST_ANSWER_S if waits_for_new else GRACE_S)

    async def refresh_to_choose(self) -> None:
        """The same before a request, where what was seen decides: which endpoint to ask, whether one is up, or which GPU is
        free.
        """
        is_alone = len(self.endpoints) == 1 and self.is_up
        if not is_alone or any(one.kind == "statistics" for one in self.endpoints.values()):
            await self.refresh()

    def note_failure(self, error: EndpointError) -> None:
        """Have the next poll come at once after a failed call: it tells whether the endpoint is down."""
        id_ = error.endpoint_id
        logger.info("endpoint %s: %s", id_, error.reason, extra={"endpoint": id_})
        self.endpoints[id_].next_poll_at = 0.0
        self._poll_when_due(self.endpoints[id_])

    async def try_again(self, endpoint: Endpoint) -> bool:
        """Poll an endpoint now, even where its breaker is open; returns whether it is up."""
        endpoint.breaker.allow_probe_now(boot_time())
        # Vital, because a poll that is under way, and may hang, has the only call that the breaker lets through.
        await self._poll(endpoint, is_vital=True)
        return endpoint.is_healthy

    def _is_polled(self, endpoint: Endpoint) -> bool:
        return endpoint.id in self._polls and not self._polls[endpoint.id].done()

    def _poll_soon(self, endpoint: Endpoint) -> asyncio.Task[None]:
        """The poll that is under way, or another one."""
        if not self._is_polled(endpoint):
            self._polls[endpoint.id] = asyncio.create_task(self._poll(endpoint), name=f"gpu-poll-{endpoint.id}")
        return self._polls[endpoint.id]

    async def _poll(self, endpoint: Endpoint, *, is_vital: bool = False) -> None:
        was_healthy, own_leases = endpoint.is_healthy, self._singles[endpoint.id].own_leases
        try:
            await self._read(endpoint, is_vital=is_vital)
        except (EndpointError, ValueError) as error:
            reason = error.reason if isinstance(error, EndpointError) else str(error)
            if was_healthy:
                logger.warning("endpoint %s is down: %s", endpoint.id, reason, extra={"endpoint": endpoint.id})
            # A ValueError is about an answer.
            endpoint.mark_down(reason, error.status if isinstance(error, EndpointError) else 200)
            if own_leases is not None:
                own_leases.stop_granting(f"its server does not answer: {reason}")
            retry_in_s = max(endpoint.breaker.retry_in_s(boot_time()), 0.05)
            pause_s = min(retry_in_s, self.config.endpoint_health_check_interval)
        else:
            endpoint.mark_healthy()
            if not was_healthy:
                logger.info("endpoint %s is up (%s)", endpoint.id, endpoint.kind, extra={"endpoint": endpoint.id})
            pause_s = self.config.polling_interval
        endpoint.next_poll_at = boot_time() + pause_s
        self._poll_when_due(endpoint)
        if was_healthy != endpoint.is_healthy:
            self._tell_of_change()

    async def _read(self, endpoint: Endpoint, *, is_vital: bool) -> None:
        """Read what an endpoint shows; ValueError where that is not what such a server shows."""
        attempts = endpoint.attempts if endpoint.is_healthy else 1
        if endpoint.kind != "statistics":
            reply = await endpoint.call("GET", POOL_PATH, attempts=attempts, is_vital=is_vital)
            if reply.status == 200:
                endpoint.seen = parse_pool(reply.data, reply.sent_at)
                endpoint.kind = "leases"
                await self._follow_fleet(endpoint)
                self._check_use(endpoint)
                return
            if reply.status not in {404, 405}:
                raise endpoint.error(reply.detail, status=reply.status)
        place = self._singles[endpoint.id]
        if place.own_leases is None:
            from gpu_worker_pool.client.backends.own_leases import OwnLeases  # noqa: PLC0415 - loaded only where it is needed

            place.own_leases = OwnLeases(endpoint, self.config)
        await place.own_leases.poll(attempts=attempts, is_vital=is_vital)
        endpoint.kind, endpoint.seen = "statistics", SeenPool()
        self._check_use(endpoint)

    def _check_use(self, endpoint: Endpoint) -> None:
        if (why := self._why_not(endpoint)) is not None:
            raise ValueError(why)

    async def _follow_fleet(self, endpoint: Endpoint) -> None:
        """Take in which fleet an endpoint belongs to, and let one of its entry points show all of its GPUs."""
        # A box that has just lost its leader may not name its fleet; it is no other one for that.
        known, seen = endpoint.fleet_id, endpoint.seen
        endpoint.fleet_id = known if seen.is_in_fleet and seen.fleet_id is None else seen.fleet_id
        if not self.config.uses_fleets or endpoint.fleet_id is None:
            return
        if endpoint.fleet_id not in self._fleets:
            self._fleets[endpoint.fleet_id] = Place(self, fleet_id=endpoint.fleet_id)
        fleet = self._fleets[endpoint.fleet_id]
        if endpoint.fleet_id != known:
            self._tell_of_change()
        if boot_time() - fleet.seen.seen_at < self.config.polling_interval * FLEET_PER_POLL:
            return
        # What cannot be shown now is asked of the next entry point: this one is up.
        with suppress(EndpointError, ValueError):
            reply = await endpoint.call("GET", f"/fleet{POOL_PATH}")
            if reply.status == 200:
                fleet.seen = parse_pool(reply.data, reply.sent_at, MOST_GPUS_OF_A_FLEET)
