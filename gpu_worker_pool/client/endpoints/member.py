"""An endpoint among those of a client, and the fleet that it may be an entry point of."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from gpu_worker_pool.client.acquire.heartbeat import Heartbeat
from gpu_worker_pool.client.backends.fleet_leases import FleetLeases
from gpu_worker_pool.client.backends.lease_book import LeaseBook
from gpu_worker_pool.client.backends.server_leases import ServerLeases

from .endpoint import Endpoint
from .seen_pool import CurrentView, SeenGpu, SeenPool

if TYPE_CHECKING:
    from gpu_worker_pool.client.backends.own_leases import OwnLeases


@dataclass(eq=False)
class FleetPool:
    """A fleet: one pool, with those endpoints of the client that belong to it as its entry points."""

    id: str
    members: list[Member] = field(default_factory=list)
    # The GPUs of all its boxes, as one of the entry points showed them.
    view: CurrentView = field(default_factory=CurrentView)

    def entries(self) -> list[ServerLeases]:
        return [member.entry.leases for member in self.members if member.entry is not None]

    def member_of(self, node: str | None) -> Member | None:
        """The endpoint whose own node this is; None where no endpoint of the client is."""
        return next((member for member in self.members if member.view.seen.node == node is not None), None)

    def name_of(self, node: str | None) -> str:
        """What the GPUs of a node are called by: its endpoint, or the node itself where no endpoint is."""
        member = self.member_of(node)
        return member.id if member is not None else node or self.members[0].id

    def gpus(self) -> SeenPool:
        """Those of all its boxes; until they have been shown, those of the entry points."""
        if self.view.seen.seen_at > -inf:
            return self.view.gpus()
        own = [member.gpus() for member in self.members if member.endpoint.is_healthy]
        queued = tuple(dict.fromkeys(id_ for seen in own for id_ in seen.queued))
        longest = max((seen.queue_length for seen in own), default=0)
        return SeenPool(tuple(gpu for seen in own for gpu in seen.gpus), queued, max(longest, len(queued)))


@dataclass(frozen=True, eq=False)
class Entry:
    """The fleet that an endpoint is an entry point of, and how leases of the whole fleet are had and kept there."""

    fleet: FleetPool
    leases: ServerLeases
    book: FleetLeases
    heartbeat: Heartbeat


@dataclass(eq=False)
class Member:
    """An endpoint with what is known of its GPUs, and what hands them out."""

    endpoint: Endpoint
    server_leases: ServerLeases
    heartbeat: Heartbeat
    view: CurrentView = field(default_factory=CurrentView)
    own_leases: OwnLeases | None = None
    sizes_mb: dict[int, float] | None = None
    poll_now: asyncio.Event = field(default_factory=asyncio.Event)
    entry: Entry | None = None

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
            return _own_view(self.own_leases, self.view.seen)
        return self.view.gpus()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request can wait in a queue: at one endpoint, or in a fleet, asked by one of its entry points."""

    member: Member
    fleet: FleetPool | None = None

    @property
    def key(self) -> str:
        return self.member.id if self.fleet is None else f"fleet {self.fleet.id}"

    @property
    def id(self) -> str:
        """The endpoint that is asked."""
        return self.member.id

    @property
    def book(self) -> LeaseBook:
        entry = self.member.entry
        return self.member.book if self.fleet is None or entry is None else entry.book

    @property
    def heartbeat(self) -> Heartbeat:
        entry = self.member.entry
        return self.member.heartbeat if self.fleet is None or entry is None else entry.heartbeat

    @property
    def is_healthy(self) -> bool:
        members = [self.member] if self.fleet is None else self.fleet.members
        return any(member.endpoint.is_healthy for member in members)

    @property
    def seen(self) -> SeenPool:
        return self.member.view.seen

    def gpus(self) -> SeenPool:
        """Its GPUs, with the changes that this process made since the last poll."""
        return self.member.gpus() if self.fleet is None else self.fleet.gpus()

    def home(self, node: str | None) -> Place:
        """Where a lease with a GPU of this node is kept alive: at that node's own box, if it is an endpoint."""
        own = None if self.fleet is None else self.fleet.member_of(node)
        return self if own is None or own.entry is None else Place(own, self.fleet)

    def name_of(self, node: str | None) -> str:
        """What the GPUs of a node are called by."""
        return self.id if self.fleet is None else self.fleet.name_of(node)

    def note_taken(self, uuid: str, worker_id: str) -> None:
        for view in self._views():
            view.note_taken(uuid, worker_id)

    def note_released(self, uuid: str, worker_id: str) -> None:
        for view in self._views():
            view.note_released(uuid, worker_id)

    def _views(self) -> list[CurrentView]:
        return [self.member.view, *([] if self.fleet is None else [self.fleet.view])]


def _own_view(own: OwnLeases, seen: SeenPool) -> SeenPool:
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
    return SeenPool(tuple(gpus), queued, len(queued), seen.seen_at)
