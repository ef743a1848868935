"""What is planned at an endpoint, as the commands show it: bookings, planned drains, and the queue's reservation."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker_pool.cli.units import show_moment
from gpu_worker_pool.wire.plans import BookingView, ReservationView
from gpu_worker_pool.wire.pool import PoolGpu
from gpu_worker_pool.wire.reader import read_time

from .naming import Naming, show_gpus

# What a booking or a planned drain keeps from others before it begins.
HELD_BACK = (
    "until then, these GPUs go only to requests that end in time: by their --time, or by their owner's last leases"
)


@dataclass(frozen=True, slots=True)
class BookingReport:
    """GPUs that are kept for an owner for a span of time; without an owner and an end, a planned drain."""

    naming: Naming
    view: BookingView

    @property
    def id(self) -> str:
        return self.view.id

    @property
    def gpu_ids(self) -> list[str]:
        return [self.naming.id_of(gpu) for gpu in self.view.gpus]

    @property
    def is_drain(self) -> bool:
        return self.view.owner is None and self.view.ends_at is None

    def has(self, gpu: PoolGpu) -> bool:
        return any(each.uuid == gpu.uuid for each in self.view.gpus)

    def span(self, now: float) -> str:
        """`from Tue 09:00 until Tue 13:00`."""
        starts_at, ends_at = read_time(self.view.starts_at), read_time(self.view.ends_at)
        begin = "" if starts_at is not None and starts_at < now + 1 else f"from {show_moment(starts_at, now)} "
        return begin + ("on" if ends_at is None else f"until {show_moment(ends_at, now)}")

    def in_words(self, now: float) -> str:
        """Without its GPUs: `booked for ada from Tue 09:00 until Tue 13:00: a course`."""
        why = f": {self.view.reason}" if self.view.reason else ""
        if self.is_drain:
            return f"out of service from {show_moment(read_time(self.view.starts_at), now)} on{why}"
        return f"booked for {self.view.owner or 'nobody'} {self.span(now)}{why}"


@dataclass(frozen=True, slots=True)
class ReservationReport:
    """The GPUs that the queue keeps for its first waiter."""

    naming: Naming
    view: ReservationView

    @property
    def gpu_ids(self) -> list[str]:
        return [self.naming.id_of(gpu) for gpu in self.view.gpus]

    def in_words(self, now: float) -> str:
        """Without its GPUs: `reserved for carol (train.py), probably at 14:20`."""
        about = "about" if self.view.basis == "predicted" else "probably at"
        return f"reserved for {self.view.holder}, {about} {show_moment(read_time(self.view.starts_at), now)}"


Plan = BookingReport | ReservationReport


def show_plan(plan: Plan, now: float) -> str:
    return f"{show_gpus(plan.gpu_ids)} {plan.in_words(now)}"
