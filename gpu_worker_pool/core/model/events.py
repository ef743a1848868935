"""What happened, in the past tense. The state of a pool is what its events add up to, and nothing else.

There are three kinds. A *durable* event must be in the journal before a client is told of it. A *volatile* event need
not survive a restart: readings are stale by then, and every lease gets a full TTL. A *refusal* changes nothing; it is
an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from .access_token import AccessToken
from .booking import Booking
from .configured import Key, Value
from .gpu import GpuKey, InventoryGpu, ProcessId, Reading
from .lease import EndReason
from .quota import Quota
from .request import Request, Wishes
from .reservation import Reservation


@dataclass(frozen=True, slots=True)
class Event:
    """An event, with its time on the pool's clock."""

    at: float


class DurableEvent(Event):
    __slots__ = ()


class VolatileEvent(Event):
    __slots__ = ()


class Refusal(Event):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TakenOver(DurableEvent):
    """A driver took charge; the fields are as in TakeOver. It ends no lease: every lease has a full TTL from here on.
    Earlier readings are void, and nothing is granted on a node before it has announced itself.
    """

    epoch: int
    boot_id: str
    clock_base: float
    wall_offset_s: float


@dataclass(frozen=True, slots=True)
class NodeJoined(DurableEvent):
    """The inventory of a node, which replaces an earlier one. It is None while the node has not told it."""

    node: str
    boot_id: str
    gpus: tuple[InventoryGpu, ...] | None
    machine_id: str | None = None


@dataclass(frozen=True, slots=True)
class NodeRebooted(DurableEvent):
    """No process from before runs on this node. Readings of its GPUs are void, and leases on them have a full TTL."""

    node: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class NodeRenamed(DurableEvent):
    """All that is known of a node counts for its new name. Records of ended leases keep the old one."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class NodeForgotten(DurableEvent):
    """A node is gone for good. Its leases ended before this. Its fences stay, in case that it comes back."""

    node: str


@dataclass(frozen=True, slots=True)
class HistoryCondensed(DurableEvent):
    """Earlier events were replaced by what they add up to. These counters only grow."""

    fences: tuple[tuple[str, int], ...]
    next_seq: int
    recent: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseQueued(DurableEvent):
    lease_id: str
    request: Request
    seq: int
    requested_at: float


@dataclass(frozen=True, slots=True)
class LeaseGranted(DurableEvent):
    """`limit` and `weight` are as in ActiveLease; without a weight each GPU counts in full."""

    lease_id: str
    gpus: tuple[GpuKey, ...]
    fence: int
    granted_at: float
    limit: float | None = None
    weight: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseExtended(DurableEvent):
    """Another node brought its part of a lease back, which the database had lost. `weight` is what it adds."""

    lease_id: str
    gpus: tuple[GpuKey, ...]
    weight: int


@dataclass(frozen=True, slots=True)
class LeaseWarned(DurableEvent):
    """The holder is told that the pool will end its lease, why and when. Without a reason, the warning is withdrawn."""

    lease_id: str
    reason: EndReason | None
    ends: float


@dataclass(frozen=True, slots=True)
class LeaseEnded(DurableEvent):
    """The holder no longer has these GPUs. Processes of the lease may still be on those in `draining`.

    `by` names the caller that ended it, and `why` gives its words. `by` is None if the holder did, or nobody.
    """

    lease_id: str
    reason: EndReason
    draining: tuple[GpuKey, ...]
    ended_at: float
    by: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class GpuDrained(DurableEvent):
    """No process of an ended lease is left on this GPU, or the drain limit has passed."""

    lease_id: str
    gpu: GpuKey


@dataclass(frozen=True, slots=True)
class ProcessesAttributed(DurableEvent):
    """These processes on this GPU belong to the lease: its holder, or descendants of the holder.

    Durable, because the descent cannot be seen after the holder has died.
    """

    lease_id: str
    gpu: GpuKey
    processes: tuple[ProcessId, ...]


@dataclass(frozen=True, slots=True)
class QuotaChanged(DurableEvent):
    """The quota of an owner, or of all without one of their own (`*`). None: it has none any more."""

    owner: str
    quota: Quota | None


@dataclass(frozen=True, slots=True)
class TokenAdded(DurableEvent):
    """A token is accepted from now on. It replaces what was known of the same token."""

    token: AccessToken


@dataclass(frozen=True, slots=True)
class TokenRevoked(DurableEvent):
    digest: str


@dataclass(frozen=True, slots=True)
class UseCounted(DurableEvent):
    """What an owner had used at the time `as_of` of the pool's clock (see accounting/fair_share.py). It replaces the
    events that it adds up.
    """

    owner: str | None
    used: float
    as_of: float
    recent: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class GpusBooked(DurableEvent):
    booking: Booking


@dataclass(frozen=True, slots=True)
class BookingEnded(DurableEvent):
    """It is over, was cancelled, or has become an exclusion."""

    booking_id: str


@dataclass(frozen=True, slots=True)
class GpuExcluded(DurableEvent):
    gpu: GpuKey
    reason: str


@dataclass(frozen=True, slots=True)
class GpuIncluded(DurableEvent):
    gpu: GpuKey


@dataclass(frozen=True, slots=True)
class NewGpusExcluded(DurableEvent):
    """GPUs that are first seen from now on are out of service for this reason. None: no longer."""

    reason: str | None


@dataclass(frozen=True, slots=True)
class ProcessIgnored(DurableEvent):
    name: str


@dataclass(frozen=True, slots=True)
class ProcessCounted(DurableEvent):
    name: str


@dataclass(frozen=True, slots=True)
class Configured(DurableEvent):
    """A row of a table that operators set (see configured.py). None: it was removed."""

    table: str
    key: Key
    value: Value | None


@dataclass(frozen=True, slots=True)
class NodeAnnounced(VolatileEvent):
    """The node is there under the present driver: its readings count from here on. It has seen fences up to this one."""

    node: str
    fence_seen: int = 0


@dataclass(frozen=True, slots=True)
class NodeSilenced(VolatileEvent):
    """The node is not heard of any more, and its readings are void. It ends no lease."""

    node: str


@dataclass(frozen=True, slots=True)
class GpusObserved(VolatileEvent):
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class LeasesRenewed(VolatileEvent):
    """A heartbeat arrived; each of these leases has its full TTL again."""

    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueueSettled(VolatileEvent):
    """No waiter can be served, and that stays so until `until` unless another event happens.

    `claims` are GPUs that become free for a waiter because preemptible leases on them are being ended. `undated` are
    wishes for which nothing can be reserved yet, with the time at which that is tried again.
    """

    until: float
    reservation: Reservation | None
    claims: tuple[tuple[GpuKey, str], ...] = ()
    undated: tuple[tuple[Wishes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SubLeasesSettled(VolatileEvent):
    """No waiter inside these leases can be served unless another event happens there."""

    parents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaseRefused(Refusal):
    """No GPU of the pool, or of the request's parent, could ever serve this request."""

    lease_id: str
    why: str


@dataclass(frozen=True, slots=True)
class QueueFull(Refusal):
    """The queue is full: for this owner (`owner`, None if the request names none), or for all."""

    lease_id: str
    limit: int
    is_owners_limit: bool
    owner: str | None


@dataclass(frozen=True, slots=True)
class TooManyLeases(Refusal):
    """This owner (None if the request names none) has as many live leases as one may, waiting or active."""

    lease_id: str
    limit: int
    owner: str | None


@dataclass(frozen=True, slots=True)
class LeaseConflicted(Refusal):
    """The id belongs to a different request."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class LeaseUnknown(Refusal):
    """No lease with this id is known. None was created."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class RenewalRefused(Refusal):
    """The lease has ended; `reason` says how."""

    lease_id: str
    reason: EndReason


@dataclass(frozen=True, slots=True)
class KeptByBox(Refusal):
    """The heartbeats of this lease are counted by the box that keeps it, the custodian."""

    lease_id: str
    node: str


@dataclass(frozen=True, slots=True)
class NodeNotForgotten(Refusal):
    node: str
    why: str


@dataclass(frozen=True, slots=True)
class GpuUnknown(Refusal):
    gpu: GpuKey


@dataclass(frozen=True, slots=True)
class BookingRefused(Refusal):
    booking_id: str
    why: str
