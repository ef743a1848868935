"""Runs a command on a lease: its environment, warnings, the loss of the lease, signals, and what became of the command.

    async with Guarded.start() as guarded:
        assignment = await acquire(client, request, guarded.pid)        # or that of `async with adopted(...) as lease`
        outcome = await supervise(guarded, assignment, SupervisedCommand(argv, os.environ))
        await release(client, assignment)

The lease must be released only after `supervise` has returned or raised: nothing of the command is left then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from gpu_worker_pool.client.guarded_lease import command_env, grace_after_loss, limit_of, on_lease_clock
from gpu_worker_pool.core.model.bounds import DEFAULT_TTL_S, show_span
from gpu_worker_pool.core.model.lease import END_TEXTS, EndReason
from gpu_worker_pool.failure import FAILED, SIGNAL_BASE, TAKEN_BACK, TIME_LIMIT, Failure
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.enforcement import is_denying, wait_for_access
from gpu_worker_pool.host.guarded import Ended, Guarded
from gpu_worker_pool.models import Assignment, LeaseEnding
from gpu_worker_pool.notices import Loss

from .out_of_memory import cause_by_kernel, kernel_kills
from .signals import ENDING, Received, Signals

logger = logging.getLogger("gpu_worker_pool.jobs")
_ToldT = TypeVar("_ToldT")

_TIME_LIMIT: Final = "time_limit"
# The exit code of `run`, by the reason for which its lease was ended.
_EXIT_CODES: Final = {_TIME_LIMIT: TIME_LIMIT, "preempted": TAKEN_BACK, "idle": TAKEN_BACK}
# On another machine than the server's, a command that has been warned is killed this long before the end, so that it is
# gone when the GPU is granted again.
_KILL_AHEAD_S: Final = 0.5
# How a command ends that does as it is told.
_OBEYED: Final = frozenset({SIGNAL_BASE + signal.SIGTERM, SIGNAL_BASE + signal.SIGKILL})
_NOT_RENEWED_IN_TIME: Final = "the lease could not be renewed in time"
_UPDATES_PER_TTL: Final = 20
_MAX_UPDATE_INTERVAL_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedCommand:
    """A command, and how to run it. Its environment is `env` with the variables of the lease.

    `group` is its process group; 0: one of its own. `grace_s` is the time between SIGTERM and SIGKILL, less where the GPU
    would be granted to another holder before. One that `finishes_work` is not told by SIGTERM of a warning, but `grace_s`
    before the end.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    streams: tuple[int, int, int] = (0, 1, 2)
    cwd: str | None = None
    umask: int = -1
    group: int = 0
    grace_s: float = 10.0
    finishes_work: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a command.

    `exit_code` is the command's own, as in a shell. `end_reason` is set where it was told to end, or its lease was ended,
    as announced (`time_limit`, `preempted` or `idle`), whatever its exit code is. `why` is set where it did not end by
    itself but was stopped: the reason in words. `signal` is the first signal to this process that was to end it.
    """

    exit_code: int
    end_reason: str | None = None
    why: str | None = None
    signal: int | None = None
    # The command's, as wait(2) has it.
    status: int = field(default=0, compare=False)
    # That the kernel killed it because the machine had no memory left, in words.
    out_of_memory: str | None = None

    @property
    def is_lost(self) -> bool:
        """Whether it was stopped because its lease was lost, and not as announced."""
        return self.why is not None and self.end_reason is None

    @property
    def note(self) -> str | None:
        """How it ended, for all who look at its lease afterwards; None where it ended well, or the lease says how."""
        if self.end_reason is not None or not self.exit_code:
            return None
        if self.out_of_memory is not None:
            return f"exit code {self.exit_code}, {self.out_of_memory}"
        if os.WIFSIGNALED(self.status):
            return f"signal {signal.Signals(os.WTERMSIG(self.status)).name}"
        return f"exit code {self.exit_code}"

    @property
    def code_of_run(self) -> int:
        """The exit code of `gpu-pool run`: the command's own where it ended by itself, even after a warning."""
        if self.why is None:
            return self.exit_code
        return FAILED if self.end_reason is None else _EXIT_CODES[self.end_reason]


async def supervise(
    guarded: Guarded,
    assignment: Assignment,
    command: SupervisedCommand,
    *,
    on_started: Callable[[], None] = lambda: None,
    on_warning: Callable[[LeaseEnding | None], None] = lambda _: None,
    on_lost: Callable[[str], None] = lambda _: None,
    signals: Signals | None = None,
) -> Outcome:
    """Run the command and wait until no process of it is left.

    `on_started` is called when it runs; `on_warning` with each warning that the lease will end, and with None where one is
    withdrawn; `on_lost` with the reason of a loss. Signals are passed on to the command. Failure where it cannot be run (126, 127) or its guard was killed (GuardDied). Where this
    raises anything else, or is cancelled, the guard is closed and cannot be used again.
    """
    run = _Supervised(guarded, assignment, command, on_warning, on_lost)
    try:
        await run.start()
        on_started()
        async with AsyncExitStack() as passed_on:
            if signals is not None:
                await passed_on.enter_async_context(signals.passed_to(run.take_signal))
            return await run.wait()
    except Failure:
        raise
    except BaseException:
        await guarded.close()  # whatever it was, the lease is released only when the command is gone
        raise


class _Supervised:
    """A command that runs on its lease."""

    def __init__(
        self,
        guarded: Guarded,
        assignment: Assignment,
        command: SupervisedCommand,
        on_warning: Callable[[LeaseEnding | None], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._guarded, self._assignment, self._command = guarded, assignment, command
        self._on_warning, self._on_lost = on_warning, on_lost
        # An assignment that was made by hand, or is inside another lease, has no loss of its own.
        self._loss = assignment.lost if isinstance(assignment.lost, Loss) else None
        self._ttl_s = DEFAULT_TTL_S if self._loss is None else self._loss.ttl_s
        self._grace_s = grace_after_loss(command.grace_s, self._ttl_s)
        self._limit_grace_s = command.grace_s if command.finishes_work else self._grace_s
        self._lost: str | None = None
        self._signal: int | None = None
        self._kills: int | None = None

    async def start(self) -> None:
        command, uuids = self._command, self._assignment.uuids
        if is_denying() and not await asyncio.to_thread(wait_for_access, uuids):
            raise Failure(
                "the GPU is granted, but `gpu-pool enforce` has not let this user open it; is it running? see `gpu-pool doctor`"
            )
        self._kills = kernel_kills()
        await self._guarded.run(
            command.argv,
            command_env(command.env, self._assignment),
            command.streams,
            cwd=command.cwd,
            umask=command.umask,
            group=command.group,
            grace_s=self._grace_s,
            safe_until=self._safe_until,
            limit=self._limit,
            limit_grace_s=self._limit_grace_s,
        )

    async def wait(self) -> Outcome:
        losing = asyncio.create_task(self._watch_loss())
        watching = [losing, *map(asyncio.create_task, (self._watch_warnings(), self._update_guard()))]
        ending = asyncio.create_task(self._guarded.wait())
        try:
            await _first_of(ending, watching)
            ended = ending.result()
            if ended.was_late and not losing.done():
                self._lose(_NOT_RENEWED_IN_TIME)  # this process was stopped, or did not get its turn
            if ended.was_limited and self._loss is not None:
                # The server is about to end the lease, with the reason; a release would hide that.
                await asyncio.wait({losing}, timeout=2 * _KILL_AHEAD_S)
        finally:
            for task in (ending, *watching):
                task.cancel()
            await asyncio.wait([ending, *watching])
        return self._outcome(ended)

    def take_signal(self, received: Received) -> None:
        is_ending = received.number in ENDING
        if is_ending and self._signal is None:
            self._signal = received.number
        if not (received.is_typed and self._command.group):
            # What was typed at the terminal has reached a command in our process group already.
            self._guarded.send_signal(received.number)

    # --- the times that the guard must know ------------------------------------------------------------------------------

    @property
    def _safe_until(self) -> float | None:
        """When the lease is lost unless a heartbeat gets through; None where it cannot be lost so."""
        return None if self._loss is None else self._loss.ends_at

    @property
    def _limit(self) -> float | None:
        """When the command is to be gone: at the limit of the lease. A server may end it a little before."""
        return limit_of(self._assignment)

    async def _update_guard(self) -> None:
        """Keep the guard informed of how long the lease is safe: it must act if this process is stopped."""
        while True:
            if (at := self._safe_until) is not None:
                self._guarded.tell_safe_until(at)
            await asyncio.sleep(min(self._ttl_s / _UPDATES_PER_TTL, _MAX_UPDATE_INTERVAL_S))

    # --- warnings and the loss -------------------------------------------------------------------------------------------

    async def _watch_warnings(self) -> None:
        """Send SIGTERM to the command when its lease is about to be ended, and have the guard kill it at the end."""
        notice, known = self._assignment.warned, None
        while notice is not None:
            ending = notice.ending
            if ending is None and known is not None:
                self._guarded.tell_limit(self._limit, self._limit_grace_s)
            elif ending is not None and ending != known:
                ends = on_lease_clock(ending.ends_at)
                # Where the server sees the processes of the command, it waits for their end.
                is_seen = self._loss is not None and self._loss.is_local
                ahead_s = 0.0 if is_seen else min(_KILL_AHEAD_S, (ends - boot_time()) / 10)
                if self._command.finishes_work:
                    self._guarded.tell_limit(ends - ahead_s, self._limit_grace_s, ending.reason)
                else:
                    self._guarded.tell_limit(ends - ahead_s, 0.0, ending.reason)
                    if known is None:
                        self._guarded.send_signal(signal.SIGTERM)
            if ending != known:
                known = ending
                _report(self._on_warning, ending)
            await notice.changed()

    async def _watch_loss(self) -> None:
        if self._loss is None:
            return
        reason = await self._loss.wait()
        if self._loss.code in _EXIT_CODES:
            # As announced; at once if the command has been warned.
            self._guarded.end(self._grace_s if self._assignment.ending is None else 0.0)
        else:
            self._guarded.end(self._grace_s)
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._lost = reason
        _report(self._on_lost, reason)

    # --- the outcome -----------------------------------------------------------------------------------------------------

    def _outcome(self, ended: Ended) -> Outcome:
        if self._lost is not None:
            return Outcome(ended.exit_code, None, f"its GPU was lost: {self._lost}", self._signal, ended.status)
        reason = self._announced(ended)
        killed = cause_by_kernel(ended.exit_code, self._kills, kernel_kills()) if reason is None else None
        why = None if reason is None or not self._was_stopped(ended) else self._end_text(reason)
        return Outcome(ended.exit_code, reason, why, self._signal, ended.status, killed)

    def _announced(self, ended: Ended) -> str | None:
        """The reason for which it was told to end, whether it did so or not."""
        code, ending = None if self._loss is None else self._loss.code, self._assignment.ending
        if code in _EXIT_CODES:
            return code
        if ended.was_limited:
            return ended.warned_of or _TIME_LIMIT
        return None if ending is None else ending.reason

    def _was_stopped(self, ended: Ended) -> bool:
        """Not where it ended by itself: with 0 even after a warning, and with a code of its own before the lease ended."""
        if ended.exit_code == 0:
            return False
        is_over = ended.was_limited or (self._loss is not None and self._loss.code in _EXIT_CODES)
        return is_over or ended.exit_code in _OBEYED

    def _end_text(self, reason: str) -> str:
        """`the time limit of 2h is over`."""
        ends_at = self._assignment.ends_at
        if reason != _TIME_LIMIT or ends_at is None:
            return END_TEXTS[EndReason(reason)]
        limit_s = ends_at.timestamp() - self._assignment.assigned_at.timestamp()
        return f"the time limit of {show_span(round(limit_s))} is over"


def _report(tell: Callable[[_ToldT], None], what: _ToldT) -> None:
    """Tell the caller. If that fails (a full disk, say), the command is watched all the same."""
    try:
        tell(what)
    except Exception as error:  # noqa: BLE001 - whatever it is
        logger.warning("a message about the lease could not be written: %s", error)


async def _first_of(ending: asyncio.Task[Ended], watching: Sequence[asyncio.Task[None]]) -> None:
    """Wait for the end; a watch that fails is a fault of ours, and raises it."""
    left: set[asyncio.Task[Any]] = {ending, *watching}
    while not ending.done():
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {ending}:
            task.result()
