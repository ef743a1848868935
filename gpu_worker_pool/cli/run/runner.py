"""What `gpu-pool run` does: request GPUs, run the command, watch both, release the GPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from time import monotonic

from gpu_worker_pool.cli.failure import FAILED, SIGNAL_BASE, TIMED_OUT, USAGE, Failure
from gpu_worker_pool.cli.options import OnLost
from gpu_worker_pool.cli.output import err, pass_on_warnings
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.acquire.acquisition import ONE_TRY_S
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.errors import PoolError
from gpu_worker_pool.host.holder_mark import mark_names

from .gpu_request import GpuRequest, acquire, release
from .guarded_command import GuardDied, GuardedCommand, check_can_run
from .lease_facts import command_env
from .lease_loss import grace_after_loss, safe_until, wait_for_end
from .reporter import RunReporter
from .signals import ENDING, Received, Signals, has_controlling_terminal
from .sources import Sources, choose_sources
from .waiting_line import WaitingLine


@dataclass(frozen=True)
class Runner:
    """Runs one command on its own lease. `grace_s` is the time between SIGTERM and SIGKILL when the lease is lost."""

    command: Sequence[str]
    request: GpuRequest
    on_lost: OnLost
    grace_s: float
    is_remote: bool
    endpoints: Sequence[str] | None
    reporter: RunReporter
    _began: float = field(default_factory=monotonic, init=False)

    async def run(self) -> int:
        pass_on_warnings(self.reporter.warn)
        signals = Signals()
        try:
            code = await self._find_and_run(signals)
        except (Failure, PoolError) as error:
            if not self.reporter.is_json:
                raise
            code = error.code if isinstance(error, Failure) and error.code != USAGE else FAILED
            self.reporter.failed(str(error))
        self.reporter.ended(code)
        return code

    async def _find_and_run(self, signals: Signals) -> int:
        check_can_run(self.command[0], os.environ)
        async with self._in_time():
            sources = await choose_sources(
                self.endpoints,
                os.environ,
                is_remote=self.is_remote,
                is_new=self.request.is_new,
                warn=self.reporter.warn,
                note=self.reporter.note,
            )
        with closing(GuardedCommand()) as guarded:
            return await self._acquire_and_run(guarded, sources, signals)

    @property
    def _left_s(self) -> float | None:
        """What is left of --timeout; None: no limit."""
        limit_s = self.request.timeout_s
        return None if limit_s is None else max(limit_s - (monotonic() - self._began), 0.0)

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Bound by --timeout what is done before the request: a server may take its time for each answer."""
        left_s = self._left_s
        # A request that must not wait still asks once.
        limit = asyncio.timeout(None if left_s is None else max(left_s, ONE_TRY_S))
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise Failure("no GPU within --timeout: no server has answered in that time", TIMED_OUT) from None

    async def _acquire_and_run(self, guarded: GuardedCommand, sources: Sources, signals: Signals) -> int:
        async with sources.servers() as servers:
            line = WaitingLine(servers, err(), is_quiet=self.reporter.is_quiet or self.reporter.is_json)
            async with AsyncExitStack() as started:
                async with self._in_time():
                    client = await started.enter_async_context(sources.client(line.note))
                try:
                    acquired = await self._acquire(client, sources, guarded.pid, signals)
                finally:
                    await line.close()
                if isinstance(acquired, int):
                    return acquired
                self.reporter.granted(acquired, line.waited_s, has_waited=line.has_waited)
                code = await self._run_on(acquired, guarded, sources.ttl_s, signals)
                await release(client, acquired)
                return code

    async def _acquire(
        self, client: GPUWorkerPoolClient, sources: Sources, holder_pid: int, signals: Signals
    ) -> Assignment | int:
        """The assignment; or the exit code where a signal came, with the request cancelled or the lease released."""
        request = replace(self.request, timeout_s=self._left_s)
        acquiring = asyncio.create_task(acquire(client, sources, request, holder_pid))
        ended_by: list[int] = []

        def end(received: Received) -> None:
            if received.number in ENDING:
                ended_by.append(received.number)
                acquiring.cancel()

        try:
            async with signals.passed_to(end):
                await asyncio.wait({acquiring})
        finally:
            await cancel_and_wait(acquiring)
        return SIGNAL_BASE + ended_by[0] if ended_by else acquiring.result()

    async def _run_on(self, assignment: Assignment, guarded: GuardedCommand, ttl_s: float, signals: Signals) -> int:
        grace_s = grace_after_loss(self.grace_s, ttl_s)
        shares_terminal, stops, is_stopped = has_controlling_terminal(), self.on_lost is OnLost.STOP, False

        def pass_on(received: Received) -> None:
            # What was typed at the terminal has reached the command already.
            if not (shares_terminal and received.is_from_terminal):
                guarded.send_signal(received.number)

        def lose(reason: str) -> None:
            nonlocal is_stopped
            is_stopped = stops
            if stops:
                guarded.end(grace_s)
            self.reporter.lost(reason, is_stopped=stops)

        try:
            await guarded.start(
                self.command,
                command_env(os.environ, assignment),
                (0, 1, 2),
                group=os.getpgrp() if shares_terminal else 0,
                grace_s=grace_s,
                safe_until=safe_until(assignment) if stops else None,
                marks=mark_names(assignment.lease_id or "", assignment.uuids),
            )
            async with signals.passed_to(pass_on):
                code = await wait_for_end(guarded, assignment, ttl_s if stops else None, lose)
        except GuardDied:
            raise Failure("the guard of the command was killed, and the command with it") from None
        except BaseException:
            guarded.close()  # whatever it was, the lease is released only when the command is gone
            raise
        return FAILED if is_stopped else code
