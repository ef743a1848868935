"""Where a request waits in one queue, what hands out GPUs there, and how its GPUs stand."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from gpu_worker_pool.client.backends.held_lease import HeldLease
from gpu_worker_pool.client.backends.lease_backend import LeaseBackend
from gpu_worker_pool.client.backends.server_leases import ServerLeases
from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.client.endpoints.seen_pool import SeenPool
from gpu_worker_pool.errors import EndpointError

if TYPE_CHECKING:
    from gpu_worker_pool.client.backends.own_leases import OwnLeases


class Place:
    """Where a request waits in one queue: an endpoint, or a fleet with several endpoints as its entry points.

    `held` are the leases of the client at present, `ended` those that it has no more.
    """

    def __init__(
        self,
        key: str,
        endpoints: Callable[[], Sequence[Endpoint]],
        held: Mapping[str, HeldLease],
        ended: Container[str],
        *,
        fleet_id: str | None = None,
        on_failure: Callable[[EndpointError], None] = lambda _: None,
    ) -> None:
        self.key = key
        self.fleet_id = fleet_id
        # What one of the entry points showed of all boxes of a fleet.
        self.seen = SeenPool()
        # What hands out the GPUs of an endpoint that has statistics only.
        self.own_leases: OwnLeases | None = None
        self._endpoints = endpoints
        self._held, self._ended = held, ended
        self._on_failure = on_failure
        self._backends: dict[str, ServerLeases] = {}

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        return self._endpoints()

    @property
    def is_healthy(self) -> bool:
        return any(endpoint.is_healthy for endpoint in self.endpoints)

    def backend(self, home: Endpoint) -> LeaseBackend:
        """What hands out its GPUs, asked at this endpoint first."""
        if home.kind == "statistics" and self.own_leases is not None:
            return self.own_leases
        if home.id not in self._backends:
            self._backends[home.id] = ServerLeases(home, self.fleet_id, self._endpoints, self._on_failure)
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
        """Its GPUs with this client's own changes; of a fleet those of all boxes, once they have been shown."""
        if self.fleet_id is not None and self.seen.seen_at > -inf:
            return self._with_own(self.seen)
        own = [self.gpus_of(endpoint) for endpoint in self.endpoints if endpoint.is_healthy or self.fleet_id is None]
        queued = tuple(dict.fromkeys(id_ for seen in own for id_ in seen.queued))
        longest = max((seen.queue_length for seen in own), default=0)
        return SeenPool(tuple(gpu for seen in own for gpu in seen.gpus), queued, max(longest, len(queued)))

    def gpus_of(self, endpoint: Endpoint) -> SeenPool:
        """Those of one endpoint's own box."""
        if endpoint.kind == "statistics" and self.own_leases is not None:
            return self.own_leases.seen()
        return self._with_own(endpoint.seen)

    def _with_own(self, seen: SeenPool) -> SeenPool:
        workers: dict[str, dict[str, str]] = {}
        for lease in self._held.values():
            for gpu in lease.gpus if lease.backend in self._backends.values() else ():
                workers.setdefault(gpu.key.uuid, {})[lease.id] = lease.worker_id
        return seen.with_own(workers, self._ended)
