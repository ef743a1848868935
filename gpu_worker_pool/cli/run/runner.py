"""What `gpu-pool run` does: request GPUs, run the command, watch both, release the GPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from gpu_worker_pool.cli.failure import FAILED, SIGNAL_BASE, TIMED_OUT, USAGE, Failure
from gpu_worker_pool.cli.output import err, pass_on_warnings
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.acquire.acquisition import ONE_TRY_S
from gpu_worker_pool.client.inherited_lease import LEASE_GPUS_VARIABLE, InheritedLease
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.errors import PoolError
from gpu_worker_pool.host.guarded import Guarded, check_can_run
from gpu_worker_pool.jobs.leases import GpuRequest, acquire, release
from gpu_worker_pool.jobs.signals import ENDING, Received, Signals, has_controlling_terminal
from gpu_worker_pool.jobs.supervise import Command, supervise

from .gang import FailedBox, Gang, OtherBoxes, gang_sources, join_line
from .reporter import RunReporter
from .sources import ELSEWHERE, Sources, check_inside, choose_sources, find_lease_around, leave_out_if_elsewhere
from .waiting_line import WaitingLine


@dataclass(frozen=True)
class Runner:
    """Runs one command on its own lease. `grace_s` is the time between SIGTERM and SIGKILL when the lease is lost."""

    command: Sequence[str]
    request: GpuRequest
    grace_s: float
    is_remote: bool
    endpoints: Sequence[str] | None
    reporter: RunReporter
    # On several boxes of a fleet: whether ssh starts the command on the others, and with which variables.
    uses_ssh: bool = False
    env_names: Sequence[str] = ()
    _began: float = field(default_factory=monotonic, init=False)

    async def run(self) -> int:
        pass_on_warnings(self.reporter.warn)
        signals = Signals()
        try:
            code = await self._find_and_run(signals)
        except (Failure, PoolError) as error:
            code = error.code if isinstance(error, Failure) and error.code != USAGE else FAILED
            self.reporter.failed(str(error))
            self.reporter.ended(code, str(error))
            if not self.reporter.is_json:
                raise
            return code
        self.reporter.ended(code)
        return code

    async def _find_and_run(self, signals: Signals) -> int:
        check_can_run(self.command[0], os.environ)
        lease = None if self.request.is_new else find_lease_around(self.endpoints, os.environ)
        if lease is not None:
            return await self._run_inside(lease, signals)
        async with self._in_time():
            sources = await choose_sources(
                self.endpoints,
                os.environ,
                is_remote=self.is_remote,
                is_new=self.request.is_new,
                counts_gpus=False,
                warn=self.reporter.warn,
                note=self.reporter.note,
            )
        if self.request.nodes > 1:
            sources = gang_sources(sources)
        async with Guarded.start() as guarded:
            while True:
                done = await self._acquire_and_run(guarded, sources, signals)
                if isinstance(done, int):
                    return done
                sources = done

    async def _run_inside(self, lease: InheritedLease, signals: Signals) -> int:
        """Run the command on the GPUs of the lease around this process. `run` outside ends it when that lease is lost."""
        request = self.request.as_request()
        check_inside(lease, request.wishes, os.environ)
        assignment = lease.assignment(request, lease.gpus, is_multi=":" in os.environ.get(LEASE_GPUS_VARIABLE, ""))
        self.reporter.inside(assignment)
        async with Guarded.start() as guarded:
            return await self._run_on(assignment, guarded, signals)

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

    async def _acquire_and_run(self, guarded: Guarded, sources: Sources, signals: Signals) -> int | Sources:
        """Return the exit code; or the sources that are left, if the GPUs turn out to be in another machine."""
        async with sources.servers() as servers:
            line = WaitingLine(
                servers,
                err(),
                is_quiet=self.reporter.is_quiet,
                tell=self.reporter.waiting if self.reporter.is_json else None,
            )
            async with AsyncExitStack() as started:
                async with self._in_time():
                    client = await started.enter_async_context(sources.client(line.note))
                try:
                    acquired = await self._acquire(client, sources, guarded.pid, signals)
                finally:
                    await line.close()
                if isinstance(acquired, int):
                    return acquired
                left = await leave_out_if_elsewhere(servers, sources, acquired.endpoint_id)
                if left is not None:
                    self.reporter.note(f"{acquired.endpoint_id} is left out: {ELSEWHERE}")
                    await release(client, acquired)
                    return left
                self.reporter.granted(acquired, line.waited_s, has_waited=line.has_waited)
                if self.request.nodes > 1:
                    return await self._run_gang(client, servers, acquired, guarded, signals)
                code = await self._run_on(acquired, guarded, signals)
                await release(client, acquired)
                return code

    async def _run_gang(
        self,
        client: GPUWorkerPoolClient,
        servers: Servers,
        assignment: Assignment,
        guarded: Guarded,
        signals: Signals,
    ) -> int:
        """Run this box's part, and have the others run theirs."""
        gang, others = await Gang.find(servers, assignment), OtherBoxes(self.env_names)
        lease_id = assignment.lease_id or ""
        try:
            if self.uses_ssh:
                await others.start(gang, lease_id, self.command)
            else:
                # Also of a quiet run: nobody else knows the lease's name.
                self.reporter.warn(
                    f"on {', '.join(gang.others)}, as the same user and in the same directory: "
                    f"{join_line(lease_id, self.command)}"
                )
            if gang.has_part_here and gang.own is not None:
                assignment.env = {**assignment.node_envs[gang.own], **gang.env(gang.own, os.environ)}
                return await self._run_on(assignment, guarded, signals, others)
            here = gang.own or "this machine"
            self.reporter.warn(
                f"{here} has no part in the lease {lease_id} (it is on {', '.join(gang.nodes)}), so nothing is started here; "
                + ("it lasts until the others have ended" if self.uses_ssh else "Ctrl-C ends the lease")
            )
            return await self._hold(assignment, others.failure() if self.uses_ssh else asyncio.Event().wait(), signals)
        finally:
            await release(client, assignment)
            await others.end()

    async def _hold(self, assignment: Assignment, until: Coroutine[Any, Any, Any], signals: Signals) -> int:
        """Hold the lease for the other boxes, until they have ended, it is lost, or a signal comes."""
        done = asyncio.ensure_future(until)
        lost = asyncio.ensure_future(assignment.lost.wait()) if assignment.lost is not None else done
        ended_by: list[int] = []

        def end(received: Received) -> None:
            if received.number in ENDING:
                ended_by.append(received.number)
                done.cancel()

        try:
            async with signals.passed_to(end):
                await asyncio.wait({done, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(done, lost)
        if ended_by:
            return SIGNAL_BASE + ended_by[0]
        if not done.cancelled():
            return self._tell_failure(done.result())
        self.reporter.lost(str(lost.result()))
        return FAILED

    def _tell_failure(self, failed: FailedBox | None) -> int:
        if failed is None:
            return 0
        self.reporter.warn(str(failed))
        return failed.code

    async def _acquire(
        self, client: GPUWorkerPoolClient, sources: Sources, holder_pid: int, signals: Signals
    ) -> Assignment | int:
        """The assignment; or the exit code where a signal came, with the request cancelled or the lease released."""
        request = replace(self.request, timeout_s=self._left_s, among=sources.among)
        acquiring = asyncio.create_task(acquire(client, request, holder_pid))
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

    async def _run_on(
        self, assignment: Assignment, guarded: Guarded, signals: Signals, others: OtherBoxes | None = None
    ) -> int:
        command = Command(
            argv=self.command,
            env=os.environ,
            group=os.getpgrp() if has_controlling_terminal() else 0,
            grace_s=self.grace_s,
        )
        failing = asyncio.create_task(self._end_on_failure(others, assignment, guarded))
        try:
            outcome = await supervise(
                guarded,
                assignment,
                command,
                on_warning=self.reporter.ending,
                on_lost=self.reporter.lost,
                signals=signals,
            )
            failed = failing.result() if failing.done() and outcome.signal is None else None
        finally:
            await cancel_and_wait(failing)
        if outcome.end_reason is not None and outcome.why is not None:
            self.reporter.stopped(outcome.end_reason, outcome.why)
        return failed.code if failed is not None and outcome.why is None else outcome.code_of_run

    async def _end_on_failure(
        self, others: OtherBoxes | None, assignment: Assignment, guarded: Guarded
    ) -> FailedBox | None:
        """End the command where that of another box has failed."""
        failed = None if others is None else await others.failure()
        # When the lease is lost the others end.
        if failed is not None and not assignment.is_lost:
            self._tell_failure(failed)
            guarded.end(self.grace_s)
        return failed
