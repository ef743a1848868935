"""GPUs that are kept for a span of time: for an owner, or for nobody while they are out of service."""

from __future__ import annotations

from dataclasses import dataclass

from .gpu import GpuKey


@dataclass(frozen=True, slots=True)
class Booking:
    """Times are wall-clock seconds: people book by the calendar. Without an owner nobody gets the GPUs in that time.
    Without an end they are taken out of service when it begins.
    """

    id: str
    gpus: tuple[GpuKey, ...]
    starts_at: float
    ends_at: float | None
    owner: str | None
    reason: str
    by: str | None = None

    @property
    def is_drain(self) -> bool:
        """Whether it takes its GPUs out of service."""
        return self.owner is None and self.ends_at is None
