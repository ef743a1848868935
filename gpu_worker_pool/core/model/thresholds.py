"""From which use on a GPU is not available."""

from __future__ import annotations

from typing import NamedTuple


class Thresholds(NamedTuple):
    """A GPU at or over one of these is not available."""

    memory_percent: float
    utilization_percent: float


DEFAULT_THRESHOLDS = Thresholds(memory_percent=80.0, utilization_percent=90.0)
