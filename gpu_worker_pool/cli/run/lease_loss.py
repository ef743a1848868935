"""The loss of a lease while its command runs: when it is due, who is told, and how long the command has then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from gpu_worker_pool.client.acquire.heartbeat import BEATS_PER_TTL
from gpu_worker_pool.client.pool_client import Assignment

from .guarded_command import GuardedCommand
from .tasks import cancel_and_wait

NOT_RENEWED_IN_TIME: Final = "the lease could not be renewed in time"
# A client gives up a lease one heartbeat before the server grants the GPU again. A command may take this part of that
# time to end; the rest is for the kernel, which takes its time to free the memory of a GPU.
_GRACE_PART: Final = 0.5
_UPDATES_PER_TTL: Final = 20
_MAX_UPDATE_INTERVAL_S: Final = 1.0


def grace_after_loss(grace_s: float, ttl_s: float) -> float:
    """How long a command may take to end once its lease is lost: it is gone before the server grants the GPU again."""
    return min(grace_s, _GRACE_PART * ttl_s / BEATS_PER_TTL)


def safe_until(assignment: Assignment) -> float | None:
    """When the lease is lost unless a heartbeat gets through, on the clock of leases; None where it cannot be lost."""
    at: float | None = getattr(assignment.lost, "ends_at", None)
    return at


@asynccontextmanager
async def guard_updates(guarded: GuardedCommand, assignment: Assignment, ttl_s: float) -> AsyncIterator[None]:
    """Keep the guard informed of how long the lease is safe: the guard must act if this process is stopped."""
    updates = asyncio.create_task(_update_guard(guarded, assignment, ttl_s))
    try:
        yield
    finally:
        await cancel_and_wait(updates)


async def _update_guard(guarded: GuardedCommand, assignment: Assignment, ttl_s: float) -> None:
    while True:
        if (at := safe_until(assignment)) is not None:
            guarded.tell_safe_until(at)
        await asyncio.sleep(min(ttl_s / _UPDATES_PER_TTL, _MAX_UPDATE_INTERVAL_S))


async def wait_until_lost(assignment: Assignment) -> str:
    """Wait until the lease is lost; the reason."""
    if assignment.lost is None:  # an assignment that was made by hand has no lease to lose
        await asyncio.Event().wait()
        raise AssertionError("unreachable")
    return await assignment.lost.wait()
