"""The contract of a probe, whatever it reads GPUs with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpu_worker_pool.core.model.gpu import Reading


class ProbeUnavailable(Exception):  # noqa: N818 - a state of the machine, not a mistake
    """This probe cannot work on this machine. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One reading of all GPUs of the machine.

    `error` says what went wrong, for people; `readings` are what could still be read. A GPU that does not answer is
    among them with a `fault`, so that it does not appear to be removed.
    """

    readings: tuple[Reading, ...]
    error: str | None = None


class Probe(Protocol):
    """Reads GPUs. Only one thread calls it, and it may block that thread.

    `source` names the probe in every answer ("nvml", "nvidia-smi", "simulated").
    """

    source: str

    def read(self, at: float) -> ProbeResult:
        """Read all GPUs. `at` is the time to put on the readings: when the read began. Never raises for what a machine
        can do: a driver that went away is an `error`, and a value that cannot be read is None.
        """

    def close(self) -> None:
        """Release the driver. No read may follow."""
