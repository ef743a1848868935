"""What `gpu-pool run` does: ask, wait, run, watch, give back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpu_worker_pool.cli.failure import FAILED, SIGNAL_BASE, USAGE, Failure
from gpu_worker_pool.cli.options import OnLost
from gpu_worker_pool.cli.output import complain, err, pass_on_warnings
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.units import show_duration
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.errors import PoolError, StaleAssignmentError

from .asking import (
    Sources,
    Wanted,
    ask,
    command_env,
    find_sources,
    grace_within,
    has_terminal,
    safe_until,
    settle,
    tell_guard,
    until_lost,
)
from .job import GuardDied, GuardedCommand, check_can_run
from .signals import ENDING, Received, SignalThread
from .waiting_line import WaitingLine


@dataclass(frozen=True)
class Plan:
    """What is to be done, and how."""

    command: tuple[str, ...]
    wanted: Wanted
    on_lost: OnLost
    grace_s: float
    is_remote: bool
    is_quiet: bool
    is_json: bool


class Runner:
    """One command."""

    def __init__(self, plan: Plan, endpoints: Sequence[str] | None) -> None:
        self._plan = plan
        self._endpoints = endpoints
        self._signals: asyncio.Queue[Received] = asyncio.Queue()

    async def run(self) -> int:
        """All of it; the exit code."""
        pass_on_warnings(self._warn)
        SignalThread(self._signals.put_nowait).start()
        try:
            code = await self._ask_and_run()
        except (Failure, PoolError) as error:
            if not self._plan.is_json:
                raise
            code = error.code if isinstance(error, Failure) and error.code != USAGE else FAILED
            self._say("failed", message=str(error))
        self._say("ended", exit_code=code)
        return code

    async def _ask_and_run(self) -> int:
        check_can_run(self._plan.command[0], os.environ)
        async with Servers(self._endpoints) as servers:
            sources = await find_sources(servers, os.environ, is_remote=self._plan.is_remote, warn=self._warn)
        job = GuardedCommand()
        try:
            return await self._hold(job, sources)
        finally:
            job.close()

    async def _hold(self, job: GuardedCommand, sources: Sources) -> int:
        plan, console = self._plan, err()
        async with Servers(sources.urls) as servers:
            line = WaitingLine(servers, console, is_quiet=plan.is_quiet or plan.is_json)
            async with sources.client(line.note) as client:
                try:
                    assignment = await self._wait_for_gpus(client, sources, job)
                finally:
                    await line.close()
                if isinstance(assignment, int):
                    return assignment
                gpu_ids = ", ".join(map(str, assignment.gpu_ids))
                self._say(
                    "granted",
                    gpus=list(assignment.gpu_ids),
                    lease_id=assignment.lease_id,
                    waited_s=round(line.waited_s, 3),
                )
                if not (plan.is_quiet or plan.is_json) and (console.is_terminal or line.has_waited):
                    complain(f"GPU {gpu_ids} granted after {show_duration(line.waited_s)}")
                return await self._use(client, assignment, job, sources.ttl_s)

    async def _wait_for_gpus(
        self, client: GPUWorkerPoolClient, sources: Sources, job: GuardedCommand
    ) -> Assignment | int:
        """The GPUs; or the exit code, where a signal came: then the queue is left, or the GPU given back, at once."""
        asking = asyncio.create_task(ask(client, sources, self._plan.wanted, job.pid))
        signalled = asyncio.create_task(self._signals.get())
        try:
            while True:
                await asyncio.wait({asking, signalled}, return_when=asyncio.FIRST_COMPLETED)
                if signalled.done():
                    number = signalled.result().number
                    if number in ENDING:
                        return SIGNAL_BASE + number
                    signalled = asyncio.create_task(self._signals.get())
                if asking.done():
                    return asking.result()
        finally:
            await settle(asking, signalled)

    async def _use(self, client: GPUWorkerPoolClient, assignment: Assignment, job: GuardedCommand, ttl_s: float) -> int:
        grace_s = grace_within(self._plan.grace_s, ttl_s)
        shares_terminal, stops = has_terminal(), self._plan.on_lost is OnLost.STOP
        telling: list[asyncio.Task[None]] = []
        try:
            await job.start(
                self._plan.command,
                command_env(os.environ, assignment),
                (0, 1, 2),
                group=os.getpgrp() if shares_terminal else 0,
                grace_s=grace_s,
                safe_until=safe_until(assignment) if stops else None,
            )
            if stops:
                telling.append(asyncio.create_task(tell_guard(job, assignment, ttl_s)))
            code = await self._watch(assignment, job, grace_s, has_terminal=shares_terminal)
        except GuardDied:
            raise Failure("the guard of the command was killed, and the command with it") from None
        except BaseException:
            job.close()  # whatever it was, the GPU is given back only when the command is gone
            raise
        finally:
            await settle(*telling)
        with contextlib.suppress(StaleAssignmentError):  # told already; or it was lost after the command had ended
            await client.release_gpu(assignment)
        return code

    async def _watch(self, assignment: Assignment, job: GuardedCommand, grace_s: float, *, has_terminal: bool) -> int:
        """Until nothing of the command is left; the exit code."""
        ended = asyncio.create_task(job.wait())
        signalled = asyncio.create_task(self._signals.get())
        lost = asyncio.create_task(until_lost(assignment))
        waiting: set[asyncio.Task[Any]] = {ended, lost}
        is_stopped = False
        try:
            while not ended.done():
                await asyncio.wait({*waiting, signalled}, return_when=asyncio.FIRST_COMPLETED)
                if signalled.done():
                    received = signalled.result()
                    # What was typed at the terminal has reached the command already.
                    if not (has_terminal and received.is_from_terminal):
                        job.send_signal(received.number)
                    signalled = asyncio.create_task(self._signals.get())
                if lost in waiting and lost.done() and not ended.done():
                    waiting.remove(lost)
                    is_stopped = self._act_on_loss(lost.result(), job, grace_s)
            code = ended.result()
            if job.was_late and not is_stopped:
                # We were stopped, or did not get our turn, and the guard acted without us.
                self._tell_loss("the lease could not be renewed in time", is_stopped=True)
            return FAILED if is_stopped or job.was_late else code
        finally:
            await settle(ended, signalled, lost)

    def _act_on_loss(self, reason: str, job: GuardedCommand, grace_s: float) -> bool:
        """Whether the command is stopped for it."""
        is_stopped = self._plan.on_lost is OnLost.STOP
        self._tell_loss(reason, is_stopped=is_stopped)
        if is_stopped:
            job.end(grace_s)
        return is_stopped

    def _tell_loss(self, reason: str, *, is_stopped: bool) -> None:
        self._say("lost", reason=reason, is_stopped=is_stopped)
        if not self._plan.is_json:
            what = "is stopped (--on-lost finish would let it go on)" if is_stopped else "goes on (--on-lost finish)"
            complain(f"the GPU is no longer ours ({reason}); the command {what}")

    def _warn(self, message: str) -> None:
        if self._plan.is_json:
            self._say("warning", message=message)
        else:
            complain(message)

    def _say(self, event: str, **facts: Any) -> None:
        if self._plan.is_json:
            line = {"schema": "gpu-pool/run/1", "event": event, **facts}
            print(json.dumps(line), file=sys.stderr, flush=True)  # noqa: T201 - that is what it is for
