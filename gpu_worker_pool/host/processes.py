"""What /proc shows of processes: those on a GPU, and those that hold leases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from gpu_worker_pool.core.model.gpu import GpuProcess, ProcessId

from .gpu_lock import user_of

PROC = Path("/proc")
MOST_ANCESTORS = 64

# Positions in /proc/PID/stat, counted from the first field after the name, which is field 3 in proc(5).
_STATE, _PARENT, _THREADS, _STARTED = 0, 1, 17, 19
_STAT_BYTES = 4096
_ENDED = frozenset({b"Z", b"X", b"x"})


class ProcessFacts(NamedTuple):
    """A process in /proc; its start time is in clock ticks since the boot."""

    id: ProcessId
    parent_pid: int
    name: str
    has_ended: bool


def read_process(proc: Path, pid: int) -> ProcessFacts | None:
    """Read one process, quickly: it is done for every lease. None where `proc` does not show it."""
    if pid <= 0:
        return None
    try:
        file = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            stat = os.read(file, _STAT_BYTES)
        finally:
            os.close(file)
        # The name is in parentheses, and may itself hold spaces and parentheses.
        before, _, after = stat.rpartition(b")")
        name, fields = before.partition(b"(")[2].decode(errors="replace"), after.split(None, _STARTED + 1)
        # A process whose first thread has returned appears as a zombie while other threads still use the GPU.
        has_ended = fields[_STATE] in _ENDED and int(fields[_THREADS]) <= 1
        return ProcessFacts(ProcessId(pid, float(fields[_STARTED])), int(fields[_PARENT]), name, has_ended)
    except (OSError, ValueError, IndexError):
        return None


def read_uids(proc: Path, pid: int) -> tuple[int, ...]:
    """The real and the effective user of a process; none where `proc` does not show it.

    The folder of a process may belong to root, also if another user runs it.
    """
    try:
        status = (proc / str(pid) / "status").read_bytes()
        return tuple(map(int, status.partition(b"\nUid:")[2].split(None, 2)[:2]))
    except (OSError, ValueError):
        return ()


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
            self._facts[pid] = read_process(self._proc, pid)
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

    def user(self, pid: int) -> str | None:
        """The Unix user that runs it: the name, or the number where it has none."""
        try:
            return user_of((self._proc / str(pid)).stat().st_uid)
        except OSError:
            return None

    def gpu_process(self, pid: int, memory_mb: float | None) -> GpuProcess:
        return GpuProcess(
            id=ProcessId(pid, self.started(pid)),
            memory_mb=memory_mb,
            name=self.name(pid),
            ancestors=self.ancestors(pid),
            user=self.user(pid),
        )


def _is_younger(one: ProcessId, other: ProcessId) -> bool:
    return one.started is not None and other.started is not None and one.started > other.started
