"""One attempt at a job that has its GPUs: from the start of its command to what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpu_worker_pool.client.pool_client import Assignment
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.models import LeaseEnding

from .guarded_command import GuardLine
from .lease_end import end_if_announced, end_text, ended_because, warn_command
from .lease_loss import wait_for_end


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an attempt at a job. `exit_code` is None where it did not run to its end; `why` has the reason.

    `end_reason` is set where the server ended the lease as announced: `time_limit`, `preempted` or `idle`.
    """

    exit_code: int | None
    why: str | None = None
    gpus: tuple[int | str, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None
    log: str | None = None
    end_reason: str | None = None

    @property
    def is_good(self) -> bool:
        return self.exit_code == 0

    @property
    def took_s(self) -> float | None:
        """How long the job ran; None where it did not run."""
        if self.started_at is None or self.ended_at is None:
            return None
        return max(self.ended_at - self.started_at, 0.0)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "started_at": iso_time(self.started_at), "ended_at": iso_time(self.ended_at)}


async def watch(
    guarded: GuardLine,
    assignment: Assignment,
    outcome: Outcome,
    *,
    ttl_s: float,
    grace_s: float,
    on_ending: Callable[[LeaseEnding | None], None],
) -> Outcome:
    """Wait until no process of a started command is left; what became of it. GuardDied where that is not known.

    `grace_s` is the time between SIGTERM and SIGKILL. `on_ending` is called with each warning that the lease will end.
    """
    lost: list[str] = []

    def lose(reason: str) -> None:
        if not end_if_announced(guarded, assignment, grace_s):
            lost.append(reason)
            guarded.end(grace_s)

    warnings = warn_command(guarded, assignment, grace_s, on_ending)
    code = await wait_for_end(guarded, assignment, ttl_s, lose, warnings)
    if lost:
        return replace(outcome, exit_code=None, why=f"its GPU was lost: {lost[0]}")
    reason, ending = ended_because(guarded, assignment, code), assignment.ending
    if reason is None and code != 0 and ending is not None:
        reason = ending.reason  # it was told to end, and ended with a code of its own
    if reason is None:
        return replace(outcome, exit_code=code)
    return replace(outcome, why=end_text(reason, assignment), end_reason=reason)
