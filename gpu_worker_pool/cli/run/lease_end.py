"""The end of a lease that the server announced: its warning, what it means for the command, and the exit code."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final

from gpu_worker_pool.cli.failure import SIGNAL_BASE, TAKEN_BACK, TIME_LIMIT
from gpu_worker_pool.client.guarded_lease import limit_of, on_lease_clock
from gpu_worker_pool.client.pool_client import Assignment
from gpu_worker_pool.core.model.bounds import show_span
from gpu_worker_pool.core.model.lease import END_TEXTS, EndReason
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.models import LeaseEnding

from .guarded_command import GuardLine

_PREEMPTED: Final = "preempted"
_TIME_LIMIT: Final = "time_limit"
# The exit code of `run`, by the reason for which its lease was ended.
EXIT_CODES: Final = {_TIME_LIMIT: TIME_LIMIT, _PREEMPTED: TAKEN_BACK, "idle": TAKEN_BACK}
# On another machine than the server's, a command that has been warned is killed so long before the end, so that it is gone
# when the GPU is granted again.
KILL_AHEAD_S: Final = 0.5
# How a command ends that does as it is told.
_OBEYED: Final = frozenset({SIGNAL_BASE + signal.SIGTERM, SIGNAL_BASE + signal.SIGKILL})


def end_if_announced(guarded: GuardLine, assignment: Assignment, grace_s: float) -> bool:
    """End the command if its lease was lost for one of these reasons; at once if the command has been warned."""
    is_announced = getattr(assignment.lost, "code", None) in EXIT_CODES
    if is_announced:
        guarded.end(grace_s if assignment.ending is None else 0.0)
    return is_announced


def ended_because(guarded: GuardLine, assignment: Assignment, exit_code: int) -> str | None:
    """The announced reason for which the command was ended; None where it ended by itself: with 0 even after a warning,
    and with a code of its own before the lease has ended.
    """
    if exit_code == 0:
        return None
    said: str | None = getattr(assignment.lost, "code", None)
    if said in EXIT_CODES:
        return said
    ending = assignment.ending
    if guarded.was_limited:
        return guarded.warned_of or _TIME_LIMIT
    return ending.reason if ending is not None and exit_code in _OBEYED else None


def end_text(reason: str, assignment: Assignment) -> str:
    """`the time limit of 2h is over`."""
    if reason != _TIME_LIMIT or assignment.ends_at is None:
        return END_TEXTS[EndReason(reason)]
    limit_s = assignment.ends_at.timestamp() - assignment.assigned_at.timestamp()
    return f"the time limit of {show_span(round(limit_s))} is over"


async def warn_command(
    guarded: GuardLine, assignment: Assignment, grace_s: float, on_ending: Callable[[LeaseEnding | None], None]
) -> None:
    """Send SIGTERM to the command when its lease is about to be ended, and have the guard kill it at the end.

    `on_ending` is called with each warning, and with None where one is withdrawn.
    """
    notice, known = assignment.warned, None
    while notice is not None:
        ending = notice.ending
        if ending is None and known is not None:
            guarded.tell_limit(limit_of(assignment), grace_s)
        elif ending is not None and ending != known:
            ends = on_lease_clock(ending.ends_at)
            # Where the server sees the processes of the command, it waits for their end.
            is_seen = getattr(assignment.lost, "is_local", False)
            ahead_s = 0.0 if is_seen else min(KILL_AHEAD_S, (ends - boot_time()) / 10)
            guarded.tell_limit(ends - ahead_s, 0.0, ending.reason)
            if known is None:
                guarded.send_signal(signal.SIGTERM)
        if ending != known:
            on_ending(ending)
        known = ending
        await notice.changed()
