"""A box whose GPUs are free as soon as they are released, and what a waiter holds there."""

from __future__ import annotations

from gpu_worker_pool.core.model.gpu import Reading
from tests.core.build import Box


def free_at_once(*readings: Reading, **settings: float) -> Box:
    """A box where a released GPU is free without another look, to keep the examples short."""
    return Box(*readings, awaits_reading_after_release=False, **settings)
