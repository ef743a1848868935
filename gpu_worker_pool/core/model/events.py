"""What happened, in the past tense. The state of a pool is what its events add up to, and nothing else.

There are three kinds. A *durable* event must be in the journal before a client is told of it. A *volatile* event need
not survive a restart: readings are stale by then, and every lease gets a full TTL. A *refusal* changes nothing; it is
an answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from .configured import Key, Value
from .gpu import GpuKey, InventoryGpu, ProcessId, Reading
from .lease import EndReason, LeaseUse, Reservation
from .request import Request


@dataclass(frozen=True, slots=True)
class Event:
    """An event, with its time on the pool's clock."""

    at: float


class DurableEvent(Event):
    __slots__ = ()


class VolatileEvent(Event):
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
class NodeForgotten(DurableEvent):
    """A node is gone for good. Its leases ended before this. Its fences stay, in case that it comes back."""

    node: str


class NodeFence(NamedTuple):
    node: str
    fence: int


@dataclass(frozen=True, slots=True)
class HistoryCondensed(DurableEvent):
    """Earlier events were replaced by what they add up to. These counters only grow."""

    fences: tuple[NodeFence, ...]
    next_seq: int
    last_durations_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseQueued(DurableEvent):
    lease_id: str
    request: Request
    seq: int
    requested_at: float


@dataclass(frozen=True, slots=True)
class LeaseGranted(DurableEvent):
    """`limit` and `weight` are as in ActiveLease; without a weight each GPU counts in full. The client of a lease that waited
    takes the grant up within `take_up_s`; None if it need not. A lease that was granted at once, and so never queued, comes
    with its `request` and `seq`; `requested_at` is then None if it is `granted_at`.
    """

    lease_id: str
    gpus: tuple[GpuKey, ...]
    fence: int
    granted_at: float
    limit: float | None = None
    weight: int | None = None
    take_up_s: float | None = None
    request: Request | None = None
    seq: int = 0
    requested_at: float | None = None


def new_leases(events: Iterable[Event]) -> dict[str, Request]:
    """The requests of the leases that the pool did not know before these events, by their ids."""
    asked = [event for event in events if isinstance(event, LeaseQueued | LeaseGranted)]
    return {event.lease_id: event.request for event in asked if event.request is not None}


@dataclass(frozen=True, slots=True)
class GrantWithdrawn(DurableEvent):
    """The client did not take the grant up. The lease waits again, in its old place, and is passed over until its client calls.
    With `by_box` the box could not keep the grant, and its client need not call.
    """

    lease_id: str
    by_box: bool = False


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

    `by` names the caller that ended it, and `why` gives its words. `by` is None if the holder did, or nobody. What it used of
    its GPUs is as in LeaseUse.
    """

    lease_id: str
    reason: EndReason
    draining: tuple[GpuKey, ...]
    ended_at: float
    by: str | None = None
    why: str | None = None
    peak_memory_mb: float | None = None
    mean_utilization_percent: float | None = None


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
class UseCounted(DurableEvent):
    """What an owner had used at the time `as_of` of the pool's clock (see state.py). It replaces the
    events that it adds up.
    """

    owner: str | None
    used: float
    as_of: float
    recent: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LeasesMeasured(DurableEvent):
    """What the active leases were seen to use until now. It is written now and then, so that a restart loses little of it."""

    uses: tuple[LeaseUse, ...]


@dataclass(frozen=True, slots=True)
class Configured(DurableEvent):
    """An operator set a row of a table (see configured.py), or removed it: then the value is None. A booking may also be over,
    or have become an exclusion.
    """

    table: str
    key: Key
    value: Value | None


@dataclass(frozen=True, slots=True)
class WallTimeSet(DurableEvent):
    """The clock of the driver's machine was set. The pool's clock plus `offset_s` is the time of day. It is durable,
    because the pool's clock goes on by it after a reboot.
    """

    offset_s: float


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
    """The clients of these leases called: each lease has its full TTL again, and a grant is taken up."""

    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClientLeft(VolatileEvent):
    """The last connection of a waiter's client broke. It keeps its place, and has less time to take a grant up."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class QueueSettled(VolatileEvent):
    """No waiter can be served, and that stays so until `until` unless another event happens.

    `claims` are GPUs that become free for a waiter because preemptible leases on them are being ended.
    """

    until: float
    reservation: Reservation | None
    claims: tuple[tuple[GpuKey, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TimeLost(VolatileEvent):
    """The driver was away this long, and took no heartbeats: every TTL and drain limit is later by that."""

    lost_s: float


class RefusalCode(StrEnum):
    """Why a command was refused."""

    UNSERVABLE = "unservable"  # no GPU of the pool could ever serve the request, or its owner may not ask for that
    QUEUE_FULL = "queue_full"
    OWNERS_QUEUE_FULL = "owners_queue_full"
    TOO_MANY_LEASES = "too_many_leases"
    CONFLICT = "conflict"  # the id belongs to a different request
    UNKNOWN_LEASE = "unknown_lease"
    ENDED = "ended"  # `why` is the reason of its end
    KEPT_BY_BOX = "kept_by_box"  # `why` is the node that counts the heartbeats of the lease
    NODE_STAYS = "node_stays"
    UNKNOWN_GPU = "unknown_gpu"
    BOOKING = "booking"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class Refused(Event):
    """Nothing was changed. `subject` is the id of a lease or a booking, a node or the UUID of a GPU."""

    code: RefusalCode
    subject: str
    why: str = ""
