"""GPUs and what was measured on them. Unknown is None, never zero."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple


class GpuKey(NamedTuple):
    """Which GPU: the node it is in and its UUID. The index is for people and may change with a reboot."""

    node: str
    uuid: str


class ProcessId(NamedTuple):
    """A process that cannot be mistaken for a later one with the same pid, where its start time is known."""

    pid: int
    started: float | None = None

    def is_same(self, other: ProcessId) -> bool:
        """Whether both are the same process; an unknown start time is given the benefit of the doubt."""
        if self.pid != other.pid:
            return False
        return self.started is None or other.started is None or self.started == other.started


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as people know it."""

    key: GpuKey
    index: int
    name: str

    def __str__(self) -> str:
        return f"{self.key.node}:{self.index}"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU, with the processes it descends from (nearest first)."""

    id: ProcessId
    memory_mb: float | None = None
    name: str | None = None
    ancestors: tuple[ProcessId, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at one GPU.

    `at` is when the look began, on the clock that the pool is driven by: a reading that began before a lease
    ended says nothing about what that lease left behind. `fault` is set where the GPU answers with an error
    (it fell off the bus, say); such a GPU is never granted. What is not a number is unknown.
    """

    gpu: Gpu
    at: float
    memory_total_mb: float | None = None
    memory_used_mb: float | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    fault: str | None = None
    # False where the hardware has no such number (a MIG device): then memory alone tells whether it is in use.
    has_utilization: bool = True
    # Some statistics servers tell a percentage and no megabytes.
    reported_memory_percent: float | None = None

    def __post_init__(self) -> None:
        if not isfinite(self.at):
            raise ValueError(f"at is {self.at!r}; a reading needs the time at which it began")
        for name in _MEASURED:
            value = getattr(self, name)
            if value is not None and not isfinite(value):
                object.__setattr__(self, name, None)

    @property
    def load_percent(self) -> float | None:
        """What the utilization threshold is held against; None where it should be known and is not."""
        return self.utilization_percent if self.has_utilization or self.utilization_percent is not None else 0.0

    @property
    def memory_percent(self) -> float | None:
        """Memory in use, in percent of all; None where it is unknown."""
        if self.memory_used_mb is None or not self.memory_total_mb:
            return self.reported_memory_percent
        return 100.0 * self.memory_used_mb / self.memory_total_mb


_MEASURED = (
    "memory_total_mb",
    "memory_used_mb",
    "utilization_percent",
    "temperature_c",
    "power_draw_w",
    "power_limit_w",
    "reported_memory_percent",
)
