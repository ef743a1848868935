"""The leases of each box as the journal has them, and what each box has to hear of a change.

The pool's state is ahead of the journal, so these are followed by the written events alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, Ending, KeptLease, QueuedLease, custodian
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.state import PoolState

from .messages import ComingEnd, Orders, WatchOrder

# A box that is away has so long to come back and confirm a new grant.
UNCONFIRMED_S = 10.0


@dataclass(slots=True)
class BoxNews:
    """What a box has to hear."""

    grants: dict[str, KeptLease] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    watches: dict[str, WatchOrder] = field(default_factory=dict)
    unwatched: list[str] = field(default_factory=list)
    warnings: dict[str, ComingEnd] = field(default_factory=dict)
    look: bool = False

    def orders(self, epoch: int, now: float) -> Orders:
        return Orders(
            epoch,
            now,
            tuple(self.grants.values()),
            tuple(self.ended),
            tuple(self.watches.values()),
            tuple(self.unwatched),
            tuple(self.warnings.values()),
            look=self.look,
        )


class WrittenLeases:
    """Made from the state of a pool of which everything is written, and kept up by `take`."""

    def __init__(self, state: PoolState) -> None:
        self._active: dict[str, ActiveLease] = {}
        self._by_node: dict[str, dict[str, KeptLease]] = {}
        self._watches: dict[str, dict[str, WatchOrder]] = {}
        self._watched_by: dict[str, str] = {}
        # The nodes that have not said yet that they keep a grant.
        self.unconfirmed: dict[str, set[str]] = {}
        # When they were granted, of those that no client was told of; and those that are taken back.
        self._untold: dict[str, float] = {}
        self._given_up: set[str] = set()
        self._news: dict[str, BoxNews] = {}
        for lease in state.leases.values():
            if isinstance(lease, QueuedLease):
                self._watch(lease.id, lease.request)
            elif isinstance(lease, ActiveLease):
                self._watch(lease.id, lease.request)
                self._grant(lease)
        self._news.clear()
        self.unconfirmed.clear()

    def of(self, node: str) -> Mapping[str, KeptLease]:
        """The active leases that have GPUs of this node."""
        return self._by_node.get(node, {})

    def watches_of(self, node: str) -> Iterable[WatchOrder]:
        """The processes of this node that hold nothing here: they wait, or have GPUs of other nodes only."""
        return self._watches.get(node, {}).values()

    def warnings_of(self, node: str, now: float) -> tuple[ComingEnd, ...]:
        leases = [self._active[lease_id] for lease_id in self.of(node)]
        return tuple(_warning(lease.id, lease.ending, now) for lease in leases if lease.ending is not None)

    def confirm(self, lease_id: str, node: str, fence: int) -> bool:
        """A node has a grant; return whether all have it now, and had not before."""
        waiting, kept = self.unconfirmed.get(lease_id), self.of(node).get(lease_id)
        if waiting is None or kept is None or kept.fence != fence or lease_id in self._given_up:
            return False
        waiting.discard(node)
        if waiting:
            return False
        del self.unconfirmed[lease_id]
        self._untold.pop(lease_id, None)
        return True

    def take_back(self, node: str) -> list[str]:
        """The grants to take back of a box that cannot keep them: no client was told of them, nor will one be."""
        found = [id_ for id_ in self._untold if node in self.unconfirmed[id_]]
        self._take_back(found)
        return found

    def _take_back(self, lease_ids: Iterable[str]) -> None:
        for lease_id in lease_ids:
            del self._untold[lease_id]
        self._given_up.update(lease_ids)

    def give_up(self, now: float, is_away: Callable[[str], bool]) -> list[str]:
        """The grants to take back: a box is away, and has not confirmed them in time. No client was told of them, so none uses
        their GPUs; nor will one be told from now on.
        """
        late = [id_ for id_, granted_at in self._untold.items() if now >= granted_at + UNCONFIRMED_S]
        found = [id_ for id_ in late if any(map(is_away, self.unconfirmed[id_]))]
        self._take_back(found)
        return found

    def take(self, events: Iterable[ev.Event], state: PoolState, now: float) -> dict[str, BoxNews]:
        """Follow the written events; return what each node has to hear. A lease of a later event is in the state, or in
        an event before it.
        """
        for event in events:
            for lease_id, request in ev.new_leases((event,)).items():
                self._watch(lease_id, request)
            match event:
                case ev.LeaseGranted():
                    self._granted(event, state)
                case ev.GrantWithdrawn():
                    self._withdrawn(event)
                case ev.LeaseExtended():
                    self._extended(event)
                case ev.LeaseWarned():
                    self._warned(event, now)
                case ev.LeaseEnded():
                    self._ended(event)
        news, self._news = self._news, {}
        return news

    def _news_of(self, node: str) -> BoxNews:
        return self._news.setdefault(node, BoxNews())

    def _watch(self, lease_id: str, request: Request) -> None:
        node, process = request.holder.node, request.holder.process
        if node is not None and process is not None:
            watch = WatchOrder(lease_id, process)
            self._watches.setdefault(node, {})[lease_id] = watch
            self._watched_by[lease_id] = node
            self._news_of(node).watches[lease_id] = watch

    def _granted(self, event: ev.LeaseGranted, state: PoolState) -> None:
        lease = state.find(event.lease_id)
        if lease is not None:  # else it has ended since, and was forgotten
            self._grant(
                ActiveLease(
                    lease.id,
                    lease.request,
                    event.gpus,
                    event.fence,
                    lease.requested_at,
                    event.granted_at,
                    event.weight or 0,
                    event.limit,
                )
            )
            # One that a box brought back was told by an earlier leader.
            if abs(event.at + state.wall_offset_s - event.granted_at) < 0.001:
                self._untold[lease.id] = event.at

    def _grant(self, lease: ActiveLease) -> None:
        self._active[lease.id] = lease
        nodes = dict.fromkeys(key.node for key in lease.gpus)
        self.unconfirmed[lease.id] = set(nodes)
        own = lease.request.holder.node
        if own is not None and own in nodes and self._watched_by.pop(lease.id, None) is not None:
            del self._watches[own][lease.id]
            self._news_of(own).watches.pop(lease.id, None)
        for node in nodes:
            kept = kept_by(lease, node)
            self._by_node.setdefault(node, {})[lease.id] = kept
            self._news_of(node).grants[lease.id] = kept

    def _extended(self, event: ev.LeaseExtended) -> None:
        lease = self._active.get(event.lease_id)
        if lease is not None:
            self._grant(replace(lease, gpus=(*lease.gpus, *event.gpus)))

    def _warned(self, event: ev.LeaseWarned, now: float) -> None:
        lease = self._active.get(event.lease_id)
        if lease is None:
            return
        ending = None if event.reason is None else Ending(event.reason, event.ends)
        self._active[lease.id] = replace(lease, ending=ending)
        for node in {key.node for key in lease.gpus}:
            self._news_of(node).warnings[lease.id] = _warning(lease.id, ending, now)

    def _withdrawn(self, event: ev.GrantWithdrawn) -> None:
        """The boxes keep the lease no longer, and it waits again."""
        lease = self._active.get(event.lease_id)
        if lease is not None:
            self._over(lease.id, lease.gpus)
            self._watch(lease.id, lease.request)

    def _ended(self, event: ev.LeaseEnded) -> None:
        self._over(event.lease_id, event.draining)

    def _over(self, lease_id: str, left: tuple[GpuKey, ...]) -> None:
        """A lease is no longer on its boxes; those of the GPUs that it has `left` are to look."""
        lease = self._active.pop(lease_id, None)
        self.unconfirmed.pop(lease_id, None)
        self._untold.pop(lease_id, None)
        self._given_up.discard(lease_id)
        for node in {key.node for key in lease.gpus} if lease is not None else ():
            del self._by_node[node][lease_id]
            news = self._news_of(node)
            news.warnings.pop(lease_id, None)
            news.grants.pop(lease_id, None)
            news.ended.append(lease_id)
        for node in {key.node for key in left}:
            self._news_of(node).look = True
        watched_by = self._watched_by.pop(lease_id, None)
        if watched_by is not None:
            del self._watches[watched_by][lease_id]
            news = self._news_of(watched_by)
            news.watches.pop(lease_id, None)
            news.unwatched.append(lease_id)


def kept_by(lease: ActiveLease, node: str) -> KeptLease:
    """A lease as this node keeps it."""
    return KeptLease(
        lease.id,
        lease.fence,
        lease.request,
        tuple(key.uuid for key in lease.gpus if key.node == node),
        lease.ttl_s,
        custodian(lease) == node,
        lease.requested_at,
        lease.granted_at,
    )


def _warning(lease_id: str, ending: Ending | None, now: float) -> ComingEnd:
    if ending is None:
        return ComingEnd(lease_id, None, 0.0)
    return ComingEnd(lease_id, ending.reason, max(ending.at - now, 0.0))
