"""Pools as the commands show them, and the words for what they show: unknown is None, and every text is plain."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Any, Final

from gpu_worker_pool.cli.units import count, show_duration, show_memory, show_moment
from gpu_worker_pool.core.model.bounds import show_span
from gpu_worker_pool.core.model.request import Holder, Wishes, task_of
from gpu_worker_pool.wire.leases import (
    ChosenWishesView,
    DrainingLeaseView,
    GpuRef,
    LeaseView,
    ObstacleView,
    WaitingLeaseView,
)
from gpu_worker_pool.wire.plans import BookingView, GroupView, ReservationView
from gpu_worker_pool.wire.pool import PoolGpu, PoolView
from gpu_worker_pool.wire.reader import read_time

from .servers import ServerAnswer, nobody_answered

NOTHING = PoolView(gpus=())
# What a booking or a planned drain keeps from others before it begins.
HELD_BACK: Final = "until then, these GPUs go only to requests that will end in time, judging by their --time or their owner's last leases"
_HEAVY_MB: Final = 1024.0
_USED_FROM_OUTSIDE: Final = frozenset({"busy", "outside"})


@dataclass(frozen=True, slots=True)
class Naming:
    """How people call the GPUs of an endpoint: `2`, or `server1:2` where there are several endpoints. Those of a whole
    fleet are called by their node: `gpu-01:2`.
    """

    endpoint: str
    is_multi: bool = False
    is_fleet: bool = False

    def id_of(self, gpu: GpuRef | PoolGpu | ObstacleView) -> str:
        """The name of one GPU: its index, or its UUID where there is no index yet."""
        local = gpu.uuid or "?" if gpu.gpu_id is None else str(gpu.gpu_id)
        if self.is_fleet and gpu.node is not None:
            return f"{gpu.node}:{local}"
        return f"{self.endpoint}:{local}" if self.is_multi else local

    def show(self, gpus: Iterable[GpuRef | PoolGpu]) -> str:
        """`GPU 2`, `GPUs 2, 3`."""
        return show_gpus([self.id_of(gpu) for gpu in gpus])


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
            asked = Wishes(wishes.gpus, wishes.memory_mb, wishes.model or None, among=wishes.among or None)
            if isinstance(wishes, ChosenWishesView):
                asked = replace(asked, min_memory_mb=wishes.min_memory_mb, exclude=wishes.exclude or None)
            return str(asked)
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
    """The pool of one endpoint; where its answer has an error, none. `has_leases` is False for a server with statistics only.
    `same_as` names an earlier endpoint that is the same server.
    """

    answer: ServerAnswer
    naming: Naming
    view: PoolView = NOTHING
    leases: tuple[LeaseReport, ...] = ()
    queue: tuple[LeaseReport, ...] = ()
    has_leases: bool = True
    same_as: str | None = None

    @property
    def endpoint(self) -> str:
        return self.answer.endpoint

    @property
    def url(self) -> str:
        return self.answer.url

    @property
    def error(self) -> str | None:
        return self.answer.error

    @property
    def status(self) -> int | None:
        return self.answer.status

    @property
    def is_up(self) -> bool:
        return self.answer.is_ok

    @property
    def queue_length(self) -> int:
        """How many requests wait, also where only the first were asked for."""
        return max(self.view.queue_length or 0, len(self.queue))

    def holders(self, gpu: PoolGpu, others: Iterable[str] = ()) -> list[LeaseReport]:
        """The leases on a GPU, and these others."""
        wanted = {*gpu.leases, *others}
        return [lease for lease in self.leases if lease.id in wanted]


def check_any_is_up(reports: Sequence[PoolReport]) -> None:
    if not any(report.is_up for report in reports):
        raise nobody_answered([report.answer for report in reports])


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
    gpus = tuple(gpu for gpu in report.view.gpus if held.intersection(gpu.leases))
    view = replace(report.view, gpus=gpus, queue_length=len(queue), reservation=None, bookings=())
    body = {**(report.answer.data or {}), "queue_length": len(queue)}
    body |= {"leases": [lease.body for lease in leases], "queue": [lease.body for lease in queue]}
    uuids = {gpu.uuid for gpu in gpus}
    body["gpus"] = [gpu for gpu in body.get("gpus", ()) if isinstance(gpu, dict) and gpu.get("uuid") in uuids]
    return replace(report, answer=replace(report.answer, data=body), view=view, leases=leases, queue=queue)


# --- words -----------------------------------------------------------------------------------------------------------


def show_gpus(ids: Sequence[str]) -> str:
    return f"GPU{'s' if len(ids) > 1 else ''} {', '.join(ids)}"


def short_ids(ids: Sequence[str], at_least: int = 8) -> dict[str, str]:
    """Each id of a lease by its shortest unique beginning, of at least this many characters."""
    ordered = sorted(set(ids))
    if not ordered:
        return {}
    # Ids are compared character by character, as is wanted here.
    shared = [0, *(len(commonprefix(pair)) for pair in itertools.pairwise(ordered)), 0]  # noqa: RUF071
    return {
        id_: id_[: max(at_least, before + 1, after + 1)]
        for id_, (before, after) in zip(ordered, itertools.pairwise(shared), strict=True)
    }


def show_clock(at: float | None, now: float) -> str:
    """Since when, as people say it: `since 14:02`, on another day `since Sat 14:02`."""
    return f"since {show_moment(at, now)}"


def show_since(at: float | None, now: float) -> str:
    """How long ago that was. The server's clock may be ahead of ours: then it is 0 s."""
    return "unknown" if at is None else show_duration(now - at)


def show_holding(lease: LeaseReport, now: float, command: str | None) -> str:
    """Who holds it, for what, since when and on what terms: `carol, train.py, since 14:02, ends 16:02`."""
    parts = (lease.holder, command, show_clock(lease.since_at, now), *show_terms(lease.view, now))
    return ", ".join(part for part in parts if part)


def show_terms(view: LeaseView, now: float) -> list[str]:
    """`ends 16:20`, or `ends in 40s: time limit` after a warning; `preemptible`; `idle 45m`."""
    if view.state not in {"active", "queued"}:
        return []
    ends = []
    if view.warning is not None:
        ends = [f"ends in {show_duration(view.warning.ends_in_s)}: {view.warning.reason.replace('_', ' ')}"]
    elif view.ends_at is not None:
        ends = [f"ends {show_moment(read_time(view.ends_at), now)}"]
    elif view.time_limit_s is not None:
        ends = [f"for {show_span(view.time_limit_s)}"]
    idle = [] if view.idle_s is None else [f"idle {show_duration(view.idle_s)}"]
    return [*ends, *(["preemptible"] if view.preemptible else []), *idle]


def show_start(view: LeaseView, now: float) -> str:
    """When a waiter will probably start, and what that rests on; empty if it is not known."""
    at = read_time(view.expected_start_at)
    if at is None:
        return ""
    if at <= now:
        return "any moment now"
    if view.expected_start_basis != "declared":
        return f"probably about {show_moment(at, now)}, judging by earlier jobs"
    holder, bracket, task = (view.expected_after or "").partition(" (")
    condition = f", if {holder}'s job{bracket}{task} ends when it said" if holder else ""
    return f"probably at {show_moment(at, now)}{condition}"


def short_start(view: LeaseView, now: float) -> str:
    """The same in a word: `14:20`, or `~14:20` if it rests on predictions."""
    at = read_time(view.expected_start_at)
    if at is None:
        return ""
    return ("" if view.expected_start_basis == "declared" else "~") + show_moment(max(at, now), now)


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


def is_drain(booking: BookingView) -> bool:
    """Whether it is a drain that is planned: without an owner and an end."""
    return booking.owner is None and booking.ends_at is None


def show_booked_span(booking: BookingView, now: float) -> str:
    """`from Tue 09:00 until Tue 13:00`."""
    starts_at, ends_at = read_time(booking.starts_at), read_time(booking.ends_at)
    begin = "" if starts_at is not None and starts_at < now + 1 else f"from {show_moment(starts_at, now)} "
    return begin + ("on" if ends_at is None else f"until {show_moment(ends_at, now)}")


def show_booking(booking: BookingView, now: float) -> str:
    """Without its GPUs: `booked for ada from Tue 09:00 until Tue 13:00: a course`."""
    is_said = not booking.reason or booking.reason == f"booked by {booking.booked_by}"
    why = "" if is_said else f": {booking.reason}"
    if is_drain(booking):
        return f"out of service from {show_moment(read_time(booking.starts_at), now)} on{why}"
    return f"booked for {booking.owner or 'nobody'} {show_booked_span(booking, now)}{why}"


def show_reservation(reservation: ReservationView, now: float) -> str:
    """Without its GPUs: `reserved for carol (train.py), probably at 14:20`."""
    about = "about" if reservation.basis == "predicted" else "probably at"
    return f"reserved for {reservation.holder}, {about} {show_moment(read_time(reservation.starts_at), now)}"


def describe_group(group: GroupView) -> str:
    """`alice, bob; at most 8 GPUs together; first on box1:4-7`."""
    parts = [
        ", ".join(group.members),
        None if group.quota is None else f"at most {count(group.quota, 'GPU')} together",
        f"first on {first_on(group)}, which others may use until they ask" if group.first_right else None,
    ]
    return "; ".join(part for part in parts if part)


def first_on(group: GroupView) -> str:
    """`box1:4-7, box2:0`: indices that follow each other are a span."""
    by_node: dict[str, list[int]] = {}
    for gpu in group.first_right:
        by_node.setdefault(gpu.node or "?", []).append(-1 if gpu.gpu_id is None else gpu.gpu_id)
    found = []
    for node, indices in sorted(by_node.items()):
        spans: list[list[int]] = []
        for index in sorted(indices):
            if spans and index == spans[-1][-1] + 1:
                spans[-1].append(index)
            else:
                spans.append([index])
        found += [f"{node}:{span[0]}" + (f"-{span[-1]}" if len(span) > 1 else "") for span in spans]
    return ", ".join(found) or "-"
