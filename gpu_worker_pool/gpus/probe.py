"""What every probe promises, whatever it looks at the GPUs with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpu_worker_pool.core.model.gpu import Reading


class ProbeUnavailable(Exception):  # noqa: N818 - a state of the machine, not a mistake
    """This probe cannot work on this machine; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One look at all GPUs of the machine.

    `error` says in words what went wrong, for people; `readings` are what could be read all the same. A GPU that does
    not answer is among them with a `fault`, so that it does not look as if it had been taken out.
    """

    readings: tuple[Reading, ...]
    error: str | None = None


class Probe(Protocol):
    """Looks at GPUs. Called from one thread only, which it may block: nobody else waits for it.

    `source` names it in every answer ("nvml", "nvidia-smi", "simulated").
    """

    source: str

    def read(self, at: float) -> ProbeResult:
        """Read all GPUs; `at` is the time to put on the readings (when the look began). Never raises for what a
        machine can do to it: a driver that went away is an `error`, and a value that cannot be read is None.
        """
        ...

    def close(self) -> None:
        """Let go of the driver; looking again afterwards is not allowed."""
        ...
