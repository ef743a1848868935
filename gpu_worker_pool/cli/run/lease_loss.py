"""The loss of a lease while its command runs: when it is due, who is told, and how long the command has then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Final

from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.guarded_lease import safe_until
from gpu_worker_pool.client.pool_client import Assignment

from .guarded_command import GuardLine
from .lease_end import KILL_AHEAD_S

_NOT_RENEWED_IN_TIME: Final = "the lease could not be renewed in time"
_UPDATES_PER_TTL: Final = 20
_MAX_UPDATE_INTERVAL_S: Final = 1.0


async def wait_for_end(
    guarded: GuardLine,
    assignment: Assignment,
    ttl_s: float,
    on_lost: Callable[[str], None],
    warnings: Coroutine[None, None, None],
) -> int:
    """Wait until no process of the command is left; the exit code. `on_lost` is called with the reason of a loss.

    The guard must act if this process is stopped, so it is kept informed of how long the lease is safe. `warnings` runs
    beside.
    """
    lost = asyncio.create_task(_tell_loss(assignment, on_lost))
    updates = [asyncio.create_task(warnings), asyncio.create_task(_update_guard(guarded, assignment, ttl_s))]
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
