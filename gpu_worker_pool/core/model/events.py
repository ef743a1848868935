"""What happened, in the past tense. The state of a pool is what its events add up to, and nothing else.

Three kinds: *durable* events must be in the journal before anybody is told; *volatile* ones need not survive a
restart, because the restart makes them void (a reading is stale by then, every lease gets a full TTL); *refusals*
change nothing and are there to be answered.
"""

from __future__ import annotations

from dataclasses import dataclass

from .gpu import GpuKey, ProcessId, Reading
from .lease import EndReason
from .request import Request


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, at a time on the pool's clock."""

    at: float


class DurableEvent(Event):
    """Belongs into the journal."""

    __slots__ = ()


class VolatileEvent(Event):
    """Is void after a restart."""

    __slots__ = ()


class Refusal(Event):
    """Changes nothing; says why."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PoolOpened(DurableEvent):
    """A driver took charge; what was measured before is void, and every lease has a full TTL from here on."""

    boot_id: str
    wall_offset_s: float


@dataclass(frozen=True, slots=True)
class HistoryCondensed(DurableEvent):
    """What came before was replaced by what it adds up to; these are the counters that only grow."""

    fences: tuple[tuple[str, int], ...]
    next_seq: int


@dataclass(frozen=True, slots=True)
class LeaseQueued(DurableEvent):
    """Somebody stands in line."""

    lease_id: str
    request: Request
    seq: int
    requested_at: float


@dataclass(frozen=True, slots=True)
class LeaseGranted(DurableEvent):
    """These GPUs are the holder's from now on."""

    lease_id: str
    gpus: tuple[GpuKey, ...]
    fence: int
    granted_at: float


@dataclass(frozen=True, slots=True)
class LeaseEnded(DurableEvent):
    """The holder has these GPUs no longer; those in `draining` may not be free of its processes yet."""

    lease_id: str
    reason: EndReason
    draining: tuple[GpuKey, ...]
    ended_at: float


@dataclass(frozen=True, slots=True)
class GpuDrained(DurableEvent):
    """Nothing of an ended lease is left on this GPU, or the limit of waiting for that has passed."""

    lease_id: str
    gpu: GpuKey


@dataclass(frozen=True, slots=True)
class ProcessesAttributed(DurableEvent):
    """These processes on this GPU are the lease's: its holder, or what descends from it.

    Durable, because the descent cannot be seen any more once the holder is dead.
    """

    lease_id: str
    gpu: GpuKey
    processes: tuple[ProcessId, ...]


@dataclass(frozen=True, slots=True)
class GpuExcluded(DurableEvent):
    """An operator took a GPU out of service."""

    gpu: GpuKey
    reason: str


@dataclass(frozen=True, slots=True)
class GpuIncluded(DurableEvent):
    """An operator put a GPU back into service."""

    gpu: GpuKey


@dataclass(frozen=True, slots=True)
class ProcessIgnored(DurableEvent):
    """Processes of this name do not count as outside use."""

    name: str


@dataclass(frozen=True, slots=True)
class ProcessCounted(DurableEvent):
    """Processes of this name count as outside use again."""

    name: str


@dataclass(frozen=True, slots=True)
class GpusObserved(VolatileEvent):
    """GPUs were looked at."""

    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class LeasesRenewed(VolatileEvent):
    """A sign of life was seen; each of these has its full TTL again."""

    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueueSettled(VolatileEvent):
    """Nobody in the queue can be served, and that will not change before `until` unless something happens. Free GPUs
    that are kept for somebody who needs more of them are in `holds`, with the lease they are kept for; `reserver` is the
    one for whom GPUs that others share now are kept.
    """

    until: float
    holds: tuple[tuple[GpuKey, str], ...]
    reserver: str | None


@dataclass(frozen=True, slots=True)
class LeaseRefused(Refusal):
    """No GPU of the pool could ever serve this request."""

    lease_id: str
    why: str


@dataclass(frozen=True, slots=True)
class QueueFull(Refusal):
    """Too many wait already: of this owner (`owner`, who may have none), or of all."""

    lease_id: str
    limit: int
    is_owners_limit: bool
    owner: str | None


@dataclass(frozen=True, slots=True)
class LeaseConflicted(Refusal):
    """The id is taken by a request that wished for something else."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class LeaseUnknown(Refusal):
    """No such lease is remembered; nothing was re-created."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class RenewalRefused(Refusal):
    """The lease is over; `reason` says how it ended."""

    lease_id: str
    reason: EndReason


@dataclass(frozen=True, slots=True)
class GpuUnknown(Refusal):
    """No such GPU was ever seen."""

    gpu: GpuKey
