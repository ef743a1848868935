"""What an agent and the leader tell each other.

The leader decides; the box that has the GPU keeps the lease (custody.py). Pool times are the leader's. A time that an agent
tells is the last one that it heard from the leader before it looked, so that no two clocks are ever compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker_pool.core.model.configured import AccessToken
from gpu_worker_pool.core.model.gpu import InventoryGpu, ProcessId, Reading
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.lease import KeptLease as KeptLease  # noqa: PLC0414 - it is part of messages


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """The box ended a lease: it expired, or its holder died. It is told until the leader says that it has ended."""

    lease_id: str
    fence: int | None
    reason: EndReason


# --- from the agent to the leader ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announce:
    """The first message. `url` is where other boxes reach this one. `machine_id` tells two boxes of one name apart, and
    `instance` two processes with copies of one state directory. A candidate can lead.
    """

    node: str
    machine_id: str
    boot_id: str
    url: str
    version: str
    is_candidate: bool
    epoch_seen: int
    fence_seen: int
    gpus: tuple[InventoryGpu, ...] | None
    leases: tuple[KeptLease, ...]
    over: tuple[LeaseOver, ...]
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Readings of the GPUs that changed, or that the leader waits for. `gone` are those that were read before on this link, and
    not this time. All others were read too and are the same. The look began after the agent had heard the pool time `heard`.
    """

    heard: float
    changed: tuple[Reading, ...] = ()
    gone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GrantKept:
    """The grant is on the disk of this box, and the holder was alive."""

    lease_id: str
    fence: int


@dataclass(frozen=True, slots=True)
class CannotKeep:
    """The box cannot write to its disk. Once it can again, it announces itself on the same link."""

    why: str


@dataclass(frozen=True, slots=True)
class HolderIsDead:
    """A process of this node that waits in the queue, or was to get a lease, does not exist any more."""

    lease_id: str


AgentMessage = Announce | Report | GrantKept | CannotKeep | LeaseOver | HolderIsDead


# --- from the leader to an agent -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WatchOrder:
    """A process of this node waits in the queue; its death is to be told."""

    lease_id: str
    process: ProcessId


@dataclass(frozen=True, slots=True)
class ComingEnd:
    """The leader ends a lease in so many seconds; None: it does not, after all."""

    lease_id: str
    reason: EndReason | None
    in_s: float


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to Announce: everything that this node has by the journal. The agent forgets what is not in it. `boxes` are
    the URLs of all nodes, and `tokens` those that operators added: the box knows their callers also without a leader.
    """

    epoch: int
    time: float
    pool_id: str
    leases: tuple[KeptLease, ...]
    watches: tuple[WatchOrder, ...]
    boxes: tuple[tuple[str, str], ...]
    tokens: tuple[AccessToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Orders:
    """What has happened to leases of this node. Without any it is a heartbeat, which carries the time. `boxes` are the
    URLs of all nodes, if one of them has changed. `look`: the leader waits for a
    reading. `tokens` are all that there are, if they have changed.
    """

    epoch: int
    time: float
    grants: tuple[KeptLease, ...] = ()
    ended: tuple[str, ...] = ()
    watches: tuple[WatchOrder, ...] = ()
    unwatched: tuple[str, ...] = ()
    warnings: tuple[ComingEnd, ...] = ()
    boxes: tuple[tuple[str, str], ...] | None = None
    look: bool = False
    tokens: tuple[AccessToken, ...] | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """The leader does not take this agent, in a sentence for its log: another box has its name, for example."""

    why: str


LeaderMessage = Welcome | Orders | Rejected
