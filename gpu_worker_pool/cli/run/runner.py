"""What `gpu-pool run` does: request GPUs, run the command, watch both, release the GPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from gpu_worker_pool.cli.failure import FAILED, SIGNAL_BASE, USAGE, Failure
from gpu_worker_pool.cli.options import OnLost
from gpu_worker_pool.cli.output import err, pass_on_warnings
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.errors import PoolError

from .environment import command_env
from .gpu_request import GpuRequest, acquire, release
from .guarded_command import GuardDied, GuardedCommand, check_can_run
from .lease_loss import NOT_RENEWED_IN_TIME, grace_after_loss, guard_updates, safe_until, wait_until_lost
from .reporter import RunReporter
from .signals import ENDING, Received, SignalThread
from .sources import Sources, find_sources
from .tasks import cancel_and_wait
from .terminal import has_controlling_terminal
from .waiting_line import WaitingLine


@dataclass(frozen=True)
class RunPlan:
    """A command, the GPUs it needs, and what to do when it loses them."""

    command: tuple[str, ...]
    request: GpuRequest
    on_lost: OnLost
    grace_s: float
    is_remote: bool


class Runner:
    """Runs one command on its own lease."""

    def __init__(self, plan: RunPlan, endpoints: Sequence[str] | None, reporter: RunReporter) -> None:
        self._plan = plan
        self._endpoints = endpoints
        self._reporter = reporter
        self._signals: asyncio.Queue[Received] = asyncio.Queue()

    async def run(self) -> int:
        """Run the command to its end; the exit code."""
        pass_on_warnings(self._reporter.warn)
        SignalThread(self._signals.put_nowait).start()
        try:
            code = await self._find_and_run()
        except (Failure, PoolError) as error:
            if not self._reporter.is_json:
                raise
            code = error.code if isinstance(error, Failure) and error.code != USAGE else FAILED
            self._reporter.failed(str(error))
        self._reporter.ended(code)
        return code

    async def _find_and_run(self) -> int:
        check_can_run(self._plan.command[0], os.environ)
        async with Servers(self._endpoints) as servers:
            sources = await find_sources(servers, os.environ, is_remote=self._plan.is_remote, warn=self._reporter.warn)
        guarded = GuardedCommand()
        try:
            return await self._acquire_and_run(guarded, sources)
        finally:
            guarded.close()

    async def _acquire_and_run(self, guarded: GuardedCommand, sources: Sources) -> int:
        async with Servers(sources.urls) as servers:
            line = WaitingLine(servers, err(), is_quiet=self._reporter.is_quiet or self._reporter.is_json)
            async with sources.client(line.note) as client:
                try:
                    acquired = await self._acquire(client, sources, guarded.pid)
                finally:
                    await line.close()
                if isinstance(acquired, int):
                    return acquired
                self._reporter.granted(acquired, line.waited_s, has_waited=line.has_waited)
                return await self._run_on(client, acquired, guarded, sources.ttl_s)

    async def _acquire(self, client: GPUWorkerPoolClient, sources: Sources, holder_pid: int) -> Assignment | int:
        """The assignment; or the exit code where a signal came, with the request cancelled or the lease released."""
        acquiring = asyncio.create_task(acquire(client, sources, self._plan.request, holder_pid))
        signalled = asyncio.create_task(self._signals.get())
        try:
            while True:
                await asyncio.wait({acquiring, signalled}, return_when=asyncio.FIRST_COMPLETED)
                if signalled.done():
                    number = signalled.result().number
                    if number in ENDING:
                        return SIGNAL_BASE + number
                    signalled = asyncio.create_task(self._signals.get())
                if acquiring.done():
                    return acquiring.result()
        finally:
            await cancel_and_wait(acquiring, signalled)

    async def _run_on(
        self, client: GPUWorkerPoolClient, assignment: Assignment, guarded: GuardedCommand, ttl_s: float
    ) -> int:
        grace_s = grace_after_loss(self._plan.grace_s, ttl_s)
        shares_terminal, stops = has_controlling_terminal(), self._plan.on_lost is OnLost.STOP
        try:
            await guarded.start(
                self._plan.command,
                command_env(os.environ, assignment),
                (0, 1, 2),
                group=os.getpgrp() if shares_terminal else 0,
                grace_s=grace_s,
                safe_until=safe_until(assignment) if stops else None,
            )
            async with guard_updates(guarded, assignment, ttl_s) if stops else nullcontext():
                code = await self._watch(assignment, guarded, grace_s, shares_terminal=shares_terminal)
        except GuardDied:
            raise Failure("the guard of the command was killed, and the command with it") from None
        except BaseException:
            guarded.close()  # whatever it was, the lease is released only when the command is gone
            raise
        await release(client, assignment)
        return code

    async def _watch(
        self, assignment: Assignment, guarded: GuardedCommand, grace_s: float, *, shares_terminal: bool
    ) -> int:
        """Wait until no process of the command is left; the exit code."""
        ended = asyncio.create_task(guarded.wait())
        signalled = asyncio.create_task(self._signals.get())
        lost = asyncio.create_task(wait_until_lost(assignment))
        pending: set[asyncio.Task[Any]] = {ended, lost}
        is_stopped = False
        try:
            while not ended.done():
                await asyncio.wait({*pending, signalled}, return_when=asyncio.FIRST_COMPLETED)
                if signalled.done():
                    received = signalled.result()
                    # What was typed at the terminal has reached the command already.
                    if not (shares_terminal and received.is_from_terminal):
                        guarded.send_signal(received.number)
                    signalled = asyncio.create_task(self._signals.get())
                if lost in pending and lost.done() and not ended.done():
                    pending.remove(lost)
                    is_stopped = self._plan.on_lost is OnLost.STOP
                    self._reporter.lost(lost.result(), is_stopped=is_stopped)
                    if is_stopped:
                        guarded.end(grace_s)
            code = ended.result()
            if guarded.was_late and not is_stopped:
                # This process was stopped, or did not get its turn, and the guard acted without it.
                self._reporter.lost(NOT_RENEWED_IN_TIME, is_stopped=True)
            return FAILED if is_stopped or guarded.was_late else code
        finally:
            await cancel_and_wait(ended, signalled, lost)
