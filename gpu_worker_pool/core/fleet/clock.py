"""The pool's clock: the boot clock of the driver's machine, plus a base. It never goes back, and goes on when another boot
or another machine takes over.
"""

from __future__ import annotations

from gpu_worker_pool.core.model.state import PoolState


def clock_base(state: PoolState, *, boot_id: str, boot_now: float, wall_now: float) -> float:
    """The base with which a driver takes over. `boot_now` is its boot clock, `wall_now` the time of day.

    A new boot goes on where the clock was, plus the time that has passed since by the time of day. A time of day that
    was set back counts as no time.
    """
    if state.boot_id is None:
        return 0.0
    if state.boot_id == boot_id:
        return state.clock_base
    return max(state.clock, wall_now - state.wall_offset_s) - boot_now
