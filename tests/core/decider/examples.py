"""A held GPU, the reading of one that is in use, and the ways to end a lease."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.lease import EndReason
from tests.core.build import Box, process, reading

ENDINGS: list[tuple[Callable[[str], cmd.Command], str]] = [
    (cmd.Release, "released"),
    (partial(cmd.EndLease, reason=EndReason.REVOKED), "revoked"),
    (partial(cmd.EndLease, reason=EndReason.HOLDER_DIED), "holder_died"),
]


def held(*, pid: int | None = 7, **settings: float) -> Box:
    """One GPU, and a lease `a` on it whose process has been seen there."""
    box = Box(reading(), **settings)
    box.ask("a", pid=pid)
    box.observe_now(running())
    return box


def running(pid: int = 7, started: float | None = 1.0) -> Reading:
    return reading(used_mb=9_000, processes=(process(pid, 9_000, started=started),))
