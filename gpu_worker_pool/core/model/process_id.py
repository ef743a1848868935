"""Which process is meant."""

from __future__ import annotations

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
