"""What `gpu-pool run` does: request GPUs, run the command, watch both, release the GPUs."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from gpu_worker_pool.cli.output import err, pass_on_warnings
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.asking import take_inside
from gpu_worker_pool.client.inherited_lease import LEASE_GPUS_VARIABLE, InheritedLease
from gpu_worker_pool.client.local_client import UNLIMITED_S, LocalClient, environ_outside
from gpu_worker_pool.client.options import RequestWishes
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.errors import PoolError
from gpu_worker_pool.failure import FAILED, SIGNAL_BASE, USAGE, Failure
from gpu_worker_pool.host.guarded import Guarded, check_can_run
from gpu_worker_pool.jobs.gpu_wait import wishes_of
from gpu_worker_pool.jobs.job_spec import JobSpec
from gpu_worker_pool.jobs.leases import acquire, in_time
from gpu_worker_pool.jobs.signals import ENDING, Received, Signals, has_controlling_terminal
from gpu_worker_pool.jobs.supervise import Outcome, SupervisedCommand, supervise
from gpu_worker_pool.models import Assignment

from .asking import check_inside, endpoints_outside, find_lease_around, request_of, told_as_failures
from .gang import Gang, join_command
from .reporter import RunReporter
from .ssh import SSH_FAILED, SshCommands
from .waiting_line import WaitingLine

_WaitedT = TypeVar("_WaitedT")


class _Interrupted(Exception):  # noqa: N818 - what happened
    """A signal ended the wait; `code` is the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = SIGNAL_BASE + number


@dataclass(frozen=True)
class Runner:
    """Runs one command on its own lease. Inside a lease it has all GPUs of that lease if it `takes_all`, else as many as it asks
    for; where it `is_new`, others.
    """

    spec: JobSpec
    reporter: RunReporter
    is_new: bool = field(default=False, kw_only=True)
    takes_all: bool = field(default=False, kw_only=True)

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
        spec, environ = self.spec, os.environ if not self.is_new else environ_outside(os.environ)
        check_can_run(spec.command[0], os.environ)
        lease = None if self.is_new else find_lease_around(spec.endpoints, os.environ)
        if lease is not None:
            return await self._run_inside(lease, signals)
        async with Servers(endpoints_outside(spec.endpoints, os.environ) if self.is_new else spec.endpoints) as servers:
            line = WaitingLine(
                servers,
                err(),
                is_quiet=self.reporter.is_quiet,
                tell=self.reporter.waiting if self.reporter.is_json else None,
                looks_elsewhere=not spec.runs_itself,
            )
            config = servers.config
            if spec.runs_itself:
                config = replace(config, scope="fleet", is_multi=True)
            client = LocalClient(
                config,
                environ,
                is_remote=spec.is_remote or spec.is_anywhere,
                on_event=line.note,
                on_note=self.reporter.note,
                on_warning=self.reporter.warn,
            )
            try:
                async with Guarded.start() as guarded:
                    wishes: RequestWishes = {**wishes_of(spec), "pid": guarded.pid}
                    try:
                        with told_as_failures():
                            assignment = await _unless_interrupted(acquire(client, wishes, spec.timeout_s), signals)
                    finally:
                        await line.close()
                    if spec.runs_itself:
                        return await self._run_on_boxes(client, servers, assignment, guarded, signals, line)
                    self.reporter.granted(assignment, line.waited_s, has_waited=line.has_waited)
                    outcome = await self._run_on(assignment, guarded, signals)
                    await client.release(assignment, outcome.note)
                    return outcome.code_of_run
            finally:
                await client.stop()

    async def _run_inside(self, lease: InheritedLease, signals: Signals) -> int:
        """Run the command on the GPUs of the lease around this process. `run` outside ends it when that lease is lost."""
        request = request_of(self.spec, ClientConfig.build(service_endpoint=lease.url.url))
        check_inside(lease, request.wishes, os.environ)
        taking = take_inside(
            lease,
            request,
            UNLIMITED_S if self.spec.timeout_s is None else self.spec.timeout_s,
            is_multi=":" in os.environ.get(LEASE_GPUS_VARIABLE, ""),
            takes_all=self.takes_all,
            on_waiting=lambda: self.reporter.note(f"waiting: {lease.busy_text}"),
        )
        with in_time():
            assignment = await _unless_interrupted(taking, signals)
        try:
            self.reporter.inside(assignment)
            # While the guard lives, others inside the lease wait, also if this process is killed.
            async with Guarded.start(keeps_open=lease.locks(assignment)) as guarded:
                return (await self._run_on(assignment, guarded, signals)).code_of_run
        finally:
            lease.release(assignment)

    async def _run_on(self, assignment: Assignment, guarded: Guarded, signals: Signals) -> Outcome:
        outcome = await supervise(
            guarded,
            assignment,
            SupervisedCommand(
                argv=self.spec.command,
                env=os.environ,
                group=os.getpgrp() if has_controlling_terminal() else 0,
                grace_s=self.spec.grace_s,
            ),
            on_warning=self.reporter.ending,
            on_lost=self.reporter.lost,
            signals=signals,
        )
        if outcome.end_reason is not None and outcome.why is not None:
            self.reporter.stopped(outcome.end_reason, outcome.why)
        if outcome.out_of_memory is not None:
            self.reporter.warn(f"the command was killed: {outcome.out_of_memory}")
        return outcome

    async def _run_on_boxes(
        self,
        client: LocalClient,
        servers: Servers,
        assignment: Assignment,
        guarded: Guarded,
        signals: Signals,
        line: WaitingLine,
    ) -> int:
        """Run this box's part, have the others run theirs, and wait for all of them."""
        spec, note = self.spec, None
        has_terminal = spec.is_anywhere and not spec.env_names and sys.stdin.isatty() and sys.stdout.isatty()
        async with SshCommands(spec.grace_s, has_terminal=has_terminal) as others:
            try:
                gang = await Gang.of(servers, tuple(assignment.node_envs or dict.fromkeys(assignment.nodes)))
                part = gang.part(assignment, os.environ) if gang.has_part_here else None
                assignment.gpu_ids = gang.gpu_names(assignment)
                granted = part if part is not None and spec.is_anywhere else assignment
                self.reporter.granted(granted, line.waited_s, has_waited=line.has_waited)
                command = join_command(assignment.lease_id or "", spec.command)
                if spec.uses_ssh or spec.is_anywhere:
                    given = {name: os.environ[name] for name in spec.env_names}
                    given |= gang.master(os.environ) if spec.nodes > 1 else {}
                    for node in gang.others:
                        await others.start(node, gang.hosts[node], command, given)
                elif part is None:
                    raise Failure(
                        f"this machine has no part in the lease, which was on {', '.join(gang.nodes)}, so it was released; run the "
                        "command on one of these, or add --ssh"
                    )
                else:
                    # Also of a quiet run: nobody else knows the lease's name.
                    where = ", ".join(gang.others)
                    self.reporter.warn(f"on {where}, as the same user and in the same directory: {shlex.join(command)}")
                failing = asyncio.create_task(self._end_on_failure(others, guarded))
                try:
                    if part is not None:
                        outcome = await self._run_on(part, guarded, signals)
                        note, is_told = outcome.note, outcome.signal is not None or outcome.why is not None
                        has_other_failed = failing.done() and failing.result() != 0
                        if is_told or (outcome.exit_code and not has_other_failed):
                            return outcome.code_of_run
                    # When the lease is lost they end by themselves.
                    async with signals.passed_to(others.take_signal):
                        return await failing
                finally:
                    await cancel_and_wait(failing)
            finally:
                await client.release(assignment, note)

    async def _end_on_failure(self, others: SshCommands, guarded: Guarded) -> int:
        """End the command here when that of another box has failed; its exit code, or 0 when all have ended well."""
        code, node = await others.wait() or (0, "")
        if code:
            ended = f"the command on {node} ended with exit code {code}"
            ended += ", or ssh could not connect" if code == SSH_FAILED else ""
            if self.spec.nodes > 1:
                self.reporter.warn(f"{ended}; the other boxes' commands are ended")
            elif code == SSH_FAILED:
                self.reporter.warn(ended)
            guarded.end(self.spec.grace_s)
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
        raise _Interrupted(ended_by[-1])
    return task.result()
