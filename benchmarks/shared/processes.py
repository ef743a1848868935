"""What the system knows of a process: its processor time, how long it waited for a processor, and its memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, of all its threads that run."""
    return sum(_schedstat(task)[0] for task in Path(f"/proc/{pid}/task").iterdir())


def run_queue_s(pid: int) -> float:
    """Return how long the first thread of a process, which runs the event loop, was ready and had no processor."""
    return _schedstat(Path(f"/proc/{pid}"))[1]


def pss_mb(pid: int) -> float:
    """Return the memory of a process. Memory that several processes share is divided among them (PSS)."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(rollup.split("\nPss:")[1].split()[0]) / 1024


def resident_mb(pid: int) -> float:
    """Return the memory that a process has now."""
    return _of_status_mb(pid, "VmRSS:")


def high_water_mb(pid: int) -> float:
    """Return the most memory that a process has had. The value of getrusage would start with the parent's."""
    return _of_status_mb(pid, "VmHWM:")


def _of_status_mb(pid: int, name: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split(name)[1].split()[0]) / 1024


def _schedstat(task: Path) -> tuple[float, float]:
    """Return the seconds on a processor, and those of waiting for one."""
    with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
        used, waited, _ = (task / "schedstat").read_text(encoding="ascii").split()
        return int(used) / 1e9, int(waited) / 1e9
    return 0.0, 0.0


class Busy:
    """The processor time of a server while one contender uses it, of all its threads."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._costs_s: list[float] = []

    def during(self, measure: Callable[[], float], cycles: int) -> float:
        """Measure this many cycles."""
        before_s = cpu_s(self._pid)
        found = measure()
        self._costs_s.append((cpu_s(self._pid) - before_s) / cycles)
        return found

    def cycle_s(self) -> float:
        """Return the processor time of one cycle, the median of all rounds."""
        return statistics.median(self._costs_s)
