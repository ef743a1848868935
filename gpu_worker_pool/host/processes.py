"""What /proc shows of the processes on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_worker_pool.core.model.gpu import GpuProcess, ProcessId

PROC = Path("/proc")
MOST_ANCESTORS = 64

# Positions in /proc/PID/stat, counted from the first field after the name (proc(5) counts them from 1: 4 and 22).
_PARENT = 1
_STARTED = 19


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A process in /proc; its start time is in clock ticks since the boot."""

    id: ProcessId
    parent_pid: int
    name: str


class ProcessTable:
    """The processes at one moment. Each is read once, so every reading needs a new table.

    What /proc does not show (the process is gone, in another pid namespace or hidden by `hidepid`, or there is no
    /proc) is unknown: None, or no ancestors.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._facts: dict[int, ProcessFacts | None] = {}

    def facts(self, pid: int) -> ProcessFacts | None:
        if pid not in self._facts:
            self._facts[pid] = self._read(pid)
        return self._facts[pid]

    def started(self, pid: int) -> float | None:
        facts = self.facts(pid)
        return facts.id.started if facts else None

    def name(self, pid: int) -> str | None:
        """The name that `ps -o comm` shows."""
        facts = self.facts(pid)
        return facts.name if facts else None

    def ancestors(self, pid: int) -> tuple[ProcessId, ...]:
        """The ancestors, nearest first, at most MOST_ANCESTORS."""
        found: list[ProcessId] = []
        child = self.facts(pid)
        while child and len(found) < MOST_ANCESTORS:
            parent = self.facts(child.parent_pid)
            # A "parent" that is younger than its child has taken over the pid of the real parent.
            if parent is None or _is_younger(parent.id, child.id):
                break
            found.append(parent.id)
            child = parent
        return tuple(found)

    def gpu_process(self, pid: int, memory_mb: float | None) -> GpuProcess:
        return GpuProcess(
            id=ProcessId(pid, self.started(pid)),
            memory_mb=memory_mb,
            name=self.name(pid),
            ancestors=self.ancestors(pid),
        )

    def _read(self, pid: int) -> ProcessFacts | None:
        if pid <= 0:
            return None
        try:
            stat = (self._proc / str(pid) / "stat").read_bytes().decode(errors="replace")
        except OSError:
            return None
        # The name is in parentheses, and may itself hold spaces and parentheses.
        before, _, rest = stat.rpartition(")")
        name, fields = before.partition("(")[2], rest.split()
        try:
            return ProcessFacts(ProcessId(pid, float(fields[_STARTED])), int(fields[_PARENT]), name)
        except (IndexError, ValueError):
            return None


def _is_younger(one: ProcessId, other: ProcessId) -> bool:
    return one.started is not None and other.started is not None and one.started > other.started
