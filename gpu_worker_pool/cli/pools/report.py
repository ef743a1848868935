"""Pools as the commands show them: unknown is None, and every text is plain. docs/CLI.md describes each `as_json`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpu_worker_pool.cli.units import show_duration, show_memory, show_moment
from gpu_worker_pool.core.model.request import Holder, Wishes, task_of
from gpu_worker_pool.wire.leases import DrainingLeaseView, GpuRef, LeaseView, ObstacleView, WaitingLeaseView
from gpu_worker_pool.wire.pool import PoolGpu, PoolView
from gpu_worker_pool.wire.reader import read_time

from .naming import Naming
from .naming import show_gpus as show_gpus  # noqa: PLC0414 - for all commands
from .plans import BookingReport, ReservationReport
from .servers import ServerAnswer, nobody_answered
from .terms import show_terms

NOTHING = PoolView(gpus=())
_HEAVY_MB: Final = 1024.0
_USED_FROM_OUTSIDE: Final = frozenset({"busy", "outside"})


@dataclass(frozen=True, slots=True)
class GpuReport:
    """One GPU. `told_percent` is the memory in use as a server with statistics only tells it: without amounts."""

    naming: Naming
    view: PoolGpu
    told_percent: float | None = None

    @property
    def id(self) -> str:
        return self.naming.id_of(self.view)

    @property
    def memory_percent(self) -> float | None:
        total_mb, used_mb = self.view.memory_total_mb, self.view.memory_used_mb
        return 100 * used_mb / total_mb if total_mb and used_mb is not None else self.told_percent

    @property
    def key(self) -> str | int | None:
        """Tells it from the other GPUs of its server, in every answer."""
        return self.view.uuid or self.view.gpu_id


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """A lease at one endpoint. Properties ending in `_at` are wall-clock seconds of the server."""

    naming: Naming
    view: LeaseView
    # As the server answered it.
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.view.id

    @property
    def endpoint(self) -> str:
        return self.naming.endpoint

    @property
    def gpus(self) -> tuple[GpuRef, ...]:
        """Its GPUs; of a lease whose processes are still leaving, those that they have not left."""
        leaving = self.view.draining_gpus if isinstance(self.view, DrainingLeaseView) else ()
        return leaving or self.view.gpus

    @property
    def gpu_ids(self) -> list[str]:
        return [self.naming.id_of(gpu) for gpu in self.gpus]

    @property
    def obstacles(self) -> tuple[ObstacleView, ...]:
        """What stands between it and each GPU; only told where a waiting lease was asked for by its id."""
        return self.view.obstacles if isinstance(self.view, WaitingLeaseView) else ()

    @property
    def holder(self) -> str:
        """In the words of the server's own reasons."""
        return str(Holder(worker_id=self.view.worker_id, owner=self.view.owner, pid=self.view.pid))

    @property
    def command(self) -> str | None:
        return task_of(self.view.labels)

    @property
    def wants(self) -> str:
        wishes = self.view.wishes
        try:
            return str(Wishes(wishes.gpus, wishes.memory_mb, wishes.model or None, among=wishes.among or None))
        except ValueError:  # from a server with other bounds
            return "GPUs"

    @property
    def requested_at(self) -> float | None:
        return read_time(self.view.requested_at)

    @property
    def granted_at(self) -> float | None:
        return read_time(self.view.granted_at)

    @property
    def ended_at(self) -> float | None:
        return read_time(self.view.ended_at)

    @property
    def since_at(self) -> float | None:
        """When it got its GPUs, or began to wait for some."""
        return self.requested_at if self.granted_at is None else self.granted_at

    @property
    def why(self) -> str | None:
        """What it waits for, without its position and wishes, which stand beside it."""
        _, found, rest = (self.view.reason or "").partition(f"waiting for {self.wants}: ")
        return rest if found else self.view.reason


@dataclass(frozen=True, slots=True)
class PoolReport:
    """One endpoint: its pool, or in `error` why there is none to show; `status` is that of an answer with an error.

    `has_leases` is False for a server with statistics only. `same_as` names an earlier endpoint that is the same server.
    """

    endpoint: str
    url: str
    error: str | None = None
    status: int | None = None
    has_leases: bool = True
    same_as: str | None = None
    view: PoolView = NOTHING
    # As the server answered it.
    body: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[GpuReport, ...] = ()
    leases: tuple[LeaseReport, ...] = ()
    queue: tuple[LeaseReport, ...] = ()
    reservation: ReservationReport | None = None
    bookings: tuple[BookingReport, ...] = ()

    @property
    def is_up(self) -> bool:
        return self.error is None

    @property
    def is_simulated(self) -> bool:
        return self.view.source == "simulated"

    @property
    def queue_length(self) -> int:
        """How many requests wait, also where only the first were asked for."""
        return max(self.view.queue_length or 0, len(self.queue))

    @property
    def free(self) -> int:
        """How many GPUs an ordinary request could have at once."""
        return sum(gpu.view.state == "free" for gpu in self.gpus) if self.view.can_grant is not False else 0

    @property
    def can_grant(self) -> bool | None:
        """None where the server does not know it."""
        return self.view.can_grant if self.is_up and self.has_leases else False


def fleet_line(report: PoolReport) -> str | None:
    """Which fleet a pool belongs to, who leads it, and how to see all of it; None where it belongs to none."""
    fleet = report.view.fleet
    if fleet is None:
        return None
    led = f"led by {fleet.leader}" if fleet.leader else "nobody is known to lead it"
    name = "a fleet that it does not know yet" if fleet.id is None else f"fleet {fleet.id[:8]}"
    if report.view.node is None:
        return f"All boxes of {name}, {led}; `gpu-pool fleet` lists them"
    return f"A box of {name}, {led}; --fleet shows all of it"


def by_node(report: PoolReport) -> list[tuple[str | None, list[GpuReport]]]:
    """The GPUs of each node; without a name where there is only one."""
    found: dict[str | None, list[GpuReport]] = {}
    for gpu in report.gpus:
        found.setdefault(gpu.view.node, []).append(gpu)
    if len(found) < 2:
        return [(None, gpus) for gpus in found.values()]
    return sorted(found.items(), key=lambda item: item[0] or "")


def check_any_is_up(reports: Sequence[PoolReport]) -> None:
    if not any(report.is_up for report in reports):
        raise nobody_answered(
            [ServerAnswer(item.endpoint, item.url, item.status, error=item.error) for item in reports]
        )


def distinct_leases(reports: Iterable[PoolReport]) -> list[LeaseReport]:
    """All leases, granted and waiting, each pool's once: two boxes of a fleet may show the same one."""
    found: dict[tuple[str, str], LeaseReport] = {}
    for report in reports:
        if report.same_as is None:
            for lease in (*report.leases, *report.queue):
                found.setdefault((report.view.pool_id or report.endpoint, lease.id), lease)
    return list(found.values())


def only_of(report: PoolReport, owner: str | None) -> PoolReport:
    """The pool with nothing but what this owner holds and waits for; None: nobody is known there."""
    leases = tuple(lease for lease in report.leases if owner is not None and lease.view.owner == owner)
    queue = tuple(lease for lease in report.queue if owner is not None and lease.view.owner == owner)
    held = {lease.id for lease in leases}
    view = replace(report.view, queue_length=len(queue))
    body = {**report.body, "queue_length": len(queue)}
    for part, kept in (("leases", leases), ("queue", queue)):
        body[part] = [lease.body for lease in kept]
    gpus = tuple(gpu for gpu in report.gpus if held.intersection(gpu.view.leases))
    uuids = {gpu.view.uuid for gpu in gpus}
    body["gpus"] = [gpu for gpu in report.body.get("gpus", ()) if isinstance(gpu, dict) and gpu.get("uuid") in uuids]
    return replace(report, view=view, body=body, gpus=gpus, leases=leases, queue=queue, reservation=None, bookings=())


def show_clock(at: float | None, now: float) -> str:
    """Since when, as people say it: `since 14:02`, on another day `since Sat 14:02`."""
    return f"since {show_moment(at, now)}"


def show_holding(lease: LeaseReport, now: float, command: str | None) -> str:
    """Who holds it, for what, since when and on what terms: `carol, train.py, since 14:02, ends 16:02`."""
    parts = (lease.holder, command, show_clock(lease.since_at, now), *show_terms(lease.view, now))
    return ", ".join(part for part in parts if part)


def show_outsiders(gpu: PoolGpu) -> list[str]:
    """The processes outside the pool that keep others from a GPU: `dave, python, pid 123, 58.0 GiB`. Those that its
    reason names are left out.
    """
    found = []
    for process in gpu.processes or ():
        is_heavy = (process.used_mb or 0.0) >= _HEAVY_MB or gpu.state in _USED_FROM_OUTSIDE
        if not process.is_outside or process.is_ignored or not is_heavy:
            continue
        if re.search(rf"\bpid {process.pid}\b", gpu.reason or "") is None:
            held = None if process.used_mb is None else show_memory(process.used_mb)
            facts = (process.user, process.name, f"pid {process.pid}", held)
            found.append(", ".join(fact for fact in facts if fact))
    return found


def show_since(at: float | None, now: float) -> str:
    """How long ago that was. The server's clock may be ahead of ours: then it is 0 s."""
    return "unknown" if at is None else show_duration(now - at)
