"""Commands to the pool: frozen facts. The time is passed beside them."""

from __future__ import annotations

from dataclasses import dataclass

from .configured import Booking, Key, Value
from .gpu import InventoryGpu, Reading
from .lease import EndReason, KeptLease
from .request import Request, Wishes


class Command:
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TakeOver(Command):
    """A driver takes charge. Its boot clock plus `clock_base` is the pool's clock (see fleet/clock.py), and that plus
    `wall_offset_s` the time of day. `boot_id` is that of the driver's machine; 0 is the epoch of one box.
    """

    epoch: int
    boot_id: str
    clock_base: float = 0.0
    wall_offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AnnounceNode(Command):
    """A node says that it is there. `boot_id` tells whether it rebooted; `gpus` is its inventory, None if it does not say.
    `machine_id` tells two boxes of one name apart. Fences there are above `fence_seen` from here on.
    """

    node: str
    boot_id: str
    gpus: tuple[InventoryGpu, ...] | None = None
    machine_id: str | None = None
    fence_seen: int = 0


@dataclass(frozen=True, slots=True)
class SilenceNode(Command):
    """A node is not heard of any more. Nothing is granted there until it announces itself; its leases go on."""

    node: str


@dataclass(frozen=True, slots=True)
class ForgetNode(Command):
    """An operator removes a node that is gone for good: its leases end, and it is not waited for."""

    node: str
    by: str | None = None


@dataclass(frozen=True, slots=True)
class RequestLease(Command):
    """Ask for a lease. The client makes the id, so asking twice is harmless."""

    lease_id: str
    request: Request


@dataclass(frozen=True, slots=True)
class Renew(Command):
    """A heartbeat for these leases, active or queued: the client of each has called."""

    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportAbsence(Command):
    """The last connection broke on which the client of a queued lease waited."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class Release(Command):
    """Release a lease, or leave the queue. `by` names the caller unless it is the holder itself, `why` gives its words."""

    lease_id: str
    is_holder: bool = False
    by: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class EndLease(Command):
    """End a lease that its holder does not release: an operator revokes it, its holder's process is known to be dead, or the
    box that keeps it says that it expired. `by` and `why` as in Release.
    """

    lease_id: str
    reason: EndReason
    by: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class WithdrawGrant(Command):
    """The box of a grant cannot keep it, and no client was told of it: the lease waits again, in its place."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class EndKept(Command):
    """A box keeps a lease no longer, and says why. Without a reason the database lost that: the lease has ended, or was granted
    again on another box. Then it waits again, is passed over until its client calls, and leaves the queue if none does.
    """

    lease_id: str
    node: str
    fence: int
    reason: EndReason | None


@dataclass(frozen=True, slots=True)
class RecoverLease(Command):
    """A node has a lease that the database lost."""

    kept: KeptLease
    node: str


@dataclass(frozen=True, slots=True)
class Observe(Command):
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Tick(Command):
    """Only time has passed."""


@dataclass(frozen=True, slots=True)
class LoseTime(Command):
    """The driver was away this long. TTLs do not run meanwhile: it could take no heartbeats."""

    lost_s: float


@dataclass(frozen=True, slots=True)
class SetWallTime(Command):
    """The clock of the driver's machine was set: the pool's clock plus `offset_s` is the time of day."""

    offset_s: float


@dataclass(frozen=True, slots=True)
class ServeQueue(Command):
    """Grant GPUs to the waiters that can be served."""


@dataclass(frozen=True, slots=True)
class Configure(Command):
    """Set a row of a table (see configured.py), or remove it (None)."""

    table: str
    key: Key
    value: Value | None = None


@dataclass(frozen=True, slots=True)
class BookGpus(Command):
    """Keep GPUs for a span of time. A booking without GPUs gets as many as `wishes` asks for, chosen by the pool. With
    `must_be_free` it is refused if a lease may still be there when it begins.
    """

    booking: Booking
    wishes: Wishes
    must_be_free: bool = False
