"""The loss of a lease while its command runs: when it is due, who is told, and how long the command has then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Final

from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.acquire.heartbeat import BEATS_PER_TTL
from gpu_worker_pool.client.pool_client import Assignment

from .guarded_command import GuardLine
from .lease_end import KILL_AHEAD_S

_NOT_RENEWED_IN_TIME: Final = "the lease could not be renewed in time"
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


async def wait_for_end(
    guarded: GuardLine,
    assignment: Assignment,
    ttl_s: float | None,
    on_lost: Callable[[str], None],
    warnings: Coroutine[None, None, None],
) -> int:
    """Wait until no process of the command is left; the exit code. `on_lost` is called with the reason of a loss.

    The guard must act if this process is stopped, so it is kept informed of how long the lease is safe; not where
    `ttl_s` is None. `warnings` runs beside.
    """
    lost = asyncio.create_task(_tell_loss(assignment, on_lost))
    updates = [asyncio.create_task(warnings)]
    if ttl_s is not None:
        updates.append(asyncio.create_task(_update_guard(guarded, assignment, ttl_s)))
    try:
        code = await guarded.wait()
        if guarded.was_late and not lost.done():
            on_lost(_NOT_RENEWED_IN_TIME)  # this process was stopped, or did not get its turn, and the guard acted
        if guarded.was_limited:
            # The server is about to end the lease, with the reason; a release would hide that.
            await asyncio.wait({lost}, timeout=2 * KILL_AHEAD_S)
        return code
    finally:
        await cancel_and_wait(lost, *updates)


async def _tell_loss(assignment: Assignment, on_lost: Callable[[str], None]) -> None:
    if assignment.lost is not None:  # an assignment that was made by hand has no lease to lose
        on_lost(await assignment.lost.wait())


async def _update_guard(guarded: GuardLine, assignment: Assignment, ttl_s: float) -> None:
    while True:
        if (at := safe_until(assignment)) is not None:
            guarded.tell_safe_until(at)
        await asyncio.sleep(min(ttl_s / _UPDATES_PER_TTL, _MAX_UPDATE_INTERVAL_S))
