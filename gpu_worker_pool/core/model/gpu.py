"""GPUs and their readings. Unknown is None, never 0."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from operator import attrgetter
from typing import NamedTuple


class ProcessId(NamedTuple):
    """A process, told from a later one with the same pid by its start time, if that is known."""

    pid: int
    started: float | None = None

    def is_same(self, other: ProcessId) -> bool:
        """Whether both are the same process. An unknown start time matches any."""
        if self.pid != other.pid:
            return False
        return self.started is None or other.started is None or self.started == other.started


class GpuKey(NamedTuple):
    """Identifies a GPU by its node and UUID. The index is for people and may change with a reboot."""

    node: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of a node. `position` is its place on a line on which GPUs with a fast link are close and islands of them far
    apart; None if that is unknown. It is read with the GPU, so no journal has it.
    """

    key: GpuKey
    index: int
    name: str
    position: int | None = None

    @property
    def place(self) -> int:
        """What tells how close GPUs are: where nothing is known, GPUs with near indices are."""
        return self.index if self.position is None else self.position

    def __str__(self) -> str:
        return f"{self.key.node}:{self.index}"


@dataclass(frozen=True, slots=True)
class InventoryGpu:
    """A GPU as the inventory of its node has it: what stays the same from one reading to the next."""

    uuid: str
    index: int
    name: str
    memory_total_mb: float | None


@dataclass(frozen=True, slots=True)
class Node:
    """What the journal knows of a node: a machine with GPUs. `gpus` is its inventory and `machine_id` the box, None while
    that is unknown.
    """

    boot_id: str
    gpus: tuple[InventoryGpu, ...] | None = None
    machine_id: str | None = None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU, with its ancestors, nearest first."""

    id: ProcessId
    memory_mb: float | None = None
    name: str | None = None
    ancestors: tuple[ProcessId, ...] = ()
    # The Unix user that runs it.
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of one GPU.

    `at` is when the reading began, on the pool's clock. A reading that began before a lease ended says nothing about
    what that lease left behind. `fault` is set if the GPU answers with an error (it fell off the bus, for example);
    such a GPU is never granted. `other_server` is set if another server has the GPU, and names it; this pool never
    grants it. NaN and infinite values become None.
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
    # False if the hardware has no such number (a MIG device). Then memory alone tells whether the GPU is in use.
    has_utilization: bool = True
    # Some statistics servers report a percentage and no megabytes.
    reported_memory_percent: float | None = None
    other_server: str | None = None

    def __post_init__(self) -> None:
        if not isfinite(self.at):
            raise ValueError(f"at is {self.at!r}; a reading needs the time at which it began")
        for name in _MEASURED:
            value = getattr(self, name)
            if value is not None and not isfinite(value):
                object.__setattr__(self, name, None)

    @property
    def use(self) -> tuple[object, ...]:
        """What decides whether the GPU would do without its leases."""
        memory = (self.memory_total_mb, self.memory_used_mb, self.reported_memory_percent)
        is_measured = self.utilization_percent is not None
        return (self.gpu, memory, is_measured, self.processes, self.fault, self.other_server)

    @property
    def load_percent(self) -> float | None:
        """The value to compare with the utilization threshold; None if it is unknown."""
        return self.utilization_percent if self.has_utilization or self.utilization_percent is not None else 0.0

    @property
    def memory_percent(self) -> float | None:
        """Used memory in percent of the total; None if unknown."""
        if self.memory_used_mb is None or not self.memory_total_mb:
            return self.reported_memory_percent
        return 100.0 * self.memory_used_mb / self.memory_total_mb


_MEASURED = [each.name for each in fields(Reading) if each.type == "float | None"]
# All that decides anything, apart from its time.
findings_of = attrgetter(
    *({each.name for each in fields(Reading)} - {"at", "temperature_c", "power_draw_w", "power_limit_w"})
)
