"""What `gpu-pool run` does: request GPUs, run the command, watch both, release the GPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, TypeVar

from gpu_worker_pool.cli.output import err, pass_on_warnings
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.acquire.acquisition import ONE_TRY_S
from gpu_worker_pool.client.asking import take_inside
from gpu_worker_pool.client.inherited_lease import LEASE_GPUS_VARIABLE, InheritedLease
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.errors import PoolError, WorkerTimeoutError
from gpu_worker_pool.failure import FAILED, SIGNAL_BASE, TIMED_OUT, USAGE, Failure
from gpu_worker_pool.host.guarded import Guarded, check_can_run
from gpu_worker_pool.jobs.leases import UNLIMITED_S, GpuRequest, acquire, release
from gpu_worker_pool.jobs.signals import ENDING, Received, Signals, has_controlling_terminal
from gpu_worker_pool.jobs.supervise import Outcome, SupervisedCommand, supervise

from .gang import Gang, OtherBoxes, join_line
from .reporter import RunReporter
from .sources import ELSEWHERE, Sources, check_inside, choose_sources, find_lease_around, leave_out_if_elsewhere
from .waiting_line import WaitingLine

_WaitedT = TypeVar("_WaitedT")


class _Interrupted(Exception):  # noqa: N818 - what happened
    """A signal ended the wait; `code` is the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = SIGNAL_BASE + number


@dataclass(frozen=True)
class Runner:
    """Runs one command on its own lease. `grace_s` is the time between SIGTERM and SIGKILL when the lease is lost."""

    command: Sequence[str]
    request: GpuRequest
    grace_s: float
    is_remote: bool
    endpoints: Sequence[str] | None
    reporter: RunReporter
    # Inside a lease: whether the command has all its GPUs, and not as many as the request says.
    takes_all: bool = False
    # On several boxes of a fleet: whether ssh starts the command on the others, and with which variables.
    uses_ssh: bool = False
    env_names: Sequence[str] = ()
    _began: float = field(default_factory=monotonic, init=False)

    async def run(self) -> int:
        pass_on_warnings(self.reporter.warn)
        signals = Signals()
        try:
            code = await self._find_and_run(signals)
        except _Interrupted as interrupted:
            code = interrupted.code
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
            sources = replace(sources, scope="fleet", among=None)
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
        taking = take_inside(
            lease,
            request,
            UNLIMITED_S if self.request.timeout_s is None else self.request.timeout_s,
            is_multi=":" in os.environ.get(LEASE_GPUS_VARIABLE, ""),
            takes_all=self.takes_all,
            on_waiting=lambda: self.reporter.note(f"waiting: {lease.busy_text}"),
        )
        try:
            assignment = await _unless_interrupted(taking, signals)
        except WorkerTimeoutError as error:
            raise Failure(f"no GPU within --timeout: {error.reason}", TIMED_OUT) from None
        try:
            self.reporter.inside(assignment)
            # While the guard lives, others inside the lease wait, also if this process is killed.
            async with Guarded.start(keeps_open=lease.locks(assignment)) as guarded:
                return (await self._run_on(assignment, guarded, signals)).code_of_run
        finally:
            lease.release(assignment)

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
                    request = replace(self.request, timeout_s=self._left_s, among=sources.among)
                    acquired = await _unless_interrupted(acquire(client, request, guarded.pid), signals)
                finally:
                    await line.close()
                left = await leave_out_if_elsewhere(servers, sources, acquired.endpoint_id)
                if left is not None:
                    self.reporter.note(f"{acquired.endpoint_id} is left out: {ELSEWHERE}")
                    await release(client, acquired)
                    return left
                if self.request.nodes > 1:
                    return await self._run_gang(client, servers, acquired, guarded, signals, line)
                self.reporter.granted(acquired, line.waited_s, has_waited=line.has_waited)
                outcome = await self._run_on(acquired, guarded, signals)
                await release(client, acquired)
                return outcome.code_of_run

    async def _run_on(self, assignment: Assignment, guarded: Guarded, signals: Signals) -> Outcome:
        outcome = await supervise(
            guarded,
            assignment,
            SupervisedCommand(
                argv=self.command,
                env=os.environ,
                group=os.getpgrp() if has_controlling_terminal() else 0,
                grace_s=self.grace_s,
            ),
            on_warning=self.reporter.ending,
            on_lost=self.reporter.lost,
            signals=signals,
        )
        if outcome.end_reason is not None and outcome.why is not None:
            self.reporter.stopped(outcome.end_reason, outcome.why)
        return outcome

    async def _run_gang(
        self,
        client: GPUWorkerPoolClient,
        servers: Servers,
        assignment: Assignment,
        guarded: Guarded,
        signals: Signals,
        line: WaitingLine,
    ) -> int:
        """Run this box's part, have the others run theirs, and wait for all of them."""
        lease_id = assignment.lease_id or ""
        async with OtherBoxes() as others:
            try:
                gang = await Gang.of(servers, tuple(assignment.node_envs))
                assignment.gpu_ids = gang.gpu_names(assignment)
                self.reporter.granted(assignment, line.waited_s, has_waited=line.has_waited)
                if not (gang.has_part_here or self.uses_ssh):
                    where = ", ".join(gang.nodes)
                    raise Failure(
                        f"this machine has no part in the lease, which was on {where}, so it was released; run the command on "
                        "one of these, or add --ssh"
                    )
                if self.uses_ssh:
                    await others.start(gang, lease_id, self.command, self.env_names)
                else:
                    # Also of a quiet run: nobody else knows the lease's name.
                    self.reporter.warn(
                        f"on {', '.join(gang.others)}, as the same user and in the same directory: "
                        f"{join_line(lease_id, self.command)}"
                    )
                failing = asyncio.create_task(self._end_on_failure(others, guarded))
                try:
                    if gang.has_part_here:
                        outcome = await self._run_on(gang.part(assignment, os.environ), guarded, signals)
                        is_told = outcome.signal is not None or outcome.why is not None
                        has_other_failed = failing.done() and failing.result() != 0
                        if is_told or (outcome.exit_code and not has_other_failed):
                            return outcome.code_of_run
                    # When the lease is lost they end by themselves.
                    await _unless_interrupted(asyncio.wait({failing}), signals)
                    return failing.result()
                finally:
                    await cancel_and_wait(failing)
            finally:
                await release(client, assignment)

    async def _end_on_failure(self, others: OtherBoxes, guarded: Guarded) -> int:
        """End the command here when that of another box has failed; its exit code, or 0 when all have ended well."""
        failed = await others.wait()
        if failed is None:
            return 0
        code, text = failed
        self.reporter.warn(text)
        guarded.end(self.grace_s)
        return code


async def _unless_interrupted(waiting: Coroutine[Any, Any, _WaitedT], signals: Signals) -> _WaitedT:
    """What it returns; _Interrupted where a signal comes before, with the request cancelled or the lease released."""
    task = asyncio.create_task(waiting)
    ended_by: list[int] = []

    def end(received: Received) -> None:
        if received.number in ENDING:
            ended_by.append(received.number)
            task.cancel()

    try:
        async with signals.passed_to(end):
            await asyncio.wait({task})
    finally:
        await cancel_and_wait(task)
    if ended_by:
        raise _Interrupted(ended_by[0])
    return task.result()
