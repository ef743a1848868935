"""A held GPU, the reading of one that is in use, and the ways to end a lease."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.gpu import Reading
from tests.core.build import Box, process, reading

ENDINGS: list[tuple[type[cmd.Release | cmd.Revoke | cmd.ReportDeath], str]] = [
    (cmd.Release, "released"),
    (cmd.Revoke, "revoked"),
    (cmd.ReportDeath, "holder_died"),
]


def held(*, pid: int | None = 7, **settings: float) -> Box:
    """One GPU, and a lease `a` on it whose process has been seen there."""
    box = Box(reading(), **settings)
    box.ask("a", pid=pid)
    box.observe_now(running())
    return box


def running(pid: int = 7, started: float | None = 1.0) -> Reading:
    return reading(used_mb=9_000, processes=(process(pid, 9_000, started=started),))
