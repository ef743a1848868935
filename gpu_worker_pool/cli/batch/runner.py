"""Runs the jobs of a batch: each on GPUs of its own, as they come free."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_worker_pool.cli.failure import TIMED_OUT, Failure
from gpu_worker_pool.cli.run.asking import (
    Sources,
    Wanted,
    ask,
    command_env,
    grace_within,
    label,
    safe_until,
    settle,
    tell_guard,
    until_lost,
)
from gpu_worker_pool.cli.run.job import GuardDied, GuardedCommand
from gpu_worker_pool.cli.run.signals import ENDING, Received, SignalThread
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.errors import StaleAssignmentError

from .jobs import Batch, Job, Outcome
from .state import StateFile

SHELL = "/bin/sh"
# How many that share GPUs are let ask at once, for each GPU: what does not fit waits in the queue.
SHARERS_PER_GPU = 8


@dataclass(frozen=True, slots=True)
class Started:
    """A job that has its GPUs."""

    job: Job
    attempt: int
    gpus: tuple[int | str, ...]
    started_at: float


@dataclass(frozen=True)
class BatchPlan:
    """What is to be done, and how."""

    batch: Batch
    wanted: Wanted
    logs: Path
    grace_s: float
    parallel: int | None
    is_remote: bool


class BatchRunner:
    """One batch. `running` is what runs at present, by key; `on_end` is called when an attempt at a job is over."""

    def __init__(
        self,
        plan: BatchPlan,
        sources: Sources,
        state: StateFile | None,
        on_end: Callable[[Started, Outcome], None],
    ) -> None:
        self._plan = plan
        self._batch = plan.batch
        self._sources = sources
        self._state = state
        self._on_end = on_end
        self._grace_s = grace_within(plan.grace_s, sources.ttl_s)
        self._signals: asyncio.Queue[Received] = asyncio.Queue()
        self._attempts: dict[asyncio.Task[Outcome | None], Job] = {}
        self._guards: set[GuardedCommand] = set()
        self._trouble: Exception | None = None
        self.running: dict[str, Started] = {}
        self.interrupted_by: int | None = None

    @property
    def parallel(self) -> int:
        """How many jobs are asked for at once: as many as there are GPUs for, so that all of those can be used."""
        if self._plan.parallel is not None:
            return self._plan.parallel
        wanted = self._plan.wanted
        per_gpu = 1 if wanted.memory_mb is None else SHARERS_PER_GPU
        return max(self._sources.gpu_count * per_gpu // wanted.gpus, 1)

    async def run(self) -> None:
        """Until all are done, or failed, or one failed and we do not keep going. Raises what made it impossible."""
        SignalThread(self._signals.put_nowait).start()
        signalled = asyncio.create_task(self._signals.get())
        async with self._sources.client() as client:
            try:
                while self._start_some(client) or self._attempts:
                    await asyncio.wait({*self._attempts, signalled}, return_when=asyncio.FIRST_COMPLETED)
                    if signalled.done():
                        self._interrupt(signalled.result())
                        signalled = asyncio.create_task(self._signals.get())
                    for task in [task for task in self._attempts if task.done()]:
                        self._take_in(task, self._attempts.pop(task))
            finally:
                await settle(signalled, *self._attempts)
        if self._trouble is not None:
            raise self._trouble

    def _start_some(self, client: GPUWorkerPoolClient) -> bool:
        has_started = False
        while len(self._attempts) < self.parallel and (job := self._batch.next_job()) is not None:
            self._attempts[asyncio.create_task(self._attempt(client, job))] = job
            has_started = True
        return has_started

    def _interrupt(self, received: Received) -> None:
        """The first time: leave the queue and ask what runs to end. Again: do not wait for it."""
        if received.number not in ENDING:
            for guard in self._guards:
                guard.send_signal(received.number)
            return
        grace_s = self._grace_s if self.interrupted_by is None else 0.0
        self.interrupted_by = self.interrupted_by or received.number
        self._batch.is_stopping = True
        for task, job in self._attempts.items():
            if job.key not in self.running:
                task.cancel()
        for guard in self._guards:
            guard.end(grace_s)

    def _take_in(self, task: asyncio.Task[Outcome | None], job: Job) -> None:
        started = self.running.pop(job.key, None)
        if task.cancelled():
            self._batch.interrupted(job)
            return
        error = task.exception()
        if error is not None:
            # What cannot be had at all is nobody's job's fault: nothing more is started, what runs is let finish.
            self._trouble = self._trouble or (error if isinstance(error, Exception) else None)
            self._batch.is_stopping = True
            self._batch.interrupted(job)
            return
        outcome = task.result()
        if outcome is None:
            self._batch.interrupted(job)
            return
        attempt = self._batch.progress[job.key].attempts
        self._batch.ended(job, outcome)
        self._on_end(started or Started(job, attempt, (), time.time()), outcome)

    async def _attempt(self, client: GPUWorkerPoolClient, job: Job) -> Outcome | None:
        guard = GuardedCommand()
        try:
            wanted = replace(self._plan.wanted, labels={**self._plan.wanted.labels, "job": label(f"line {job.line}")})
            try:
                assignment = await ask(client, self._sources, wanted, guard.pid)
            except Failure as failure:
                if failure.code != TIMED_OUT:
                    raise
                return Outcome(None, str(failure))
            self._guards.add(guard)
            return await self._run(client, assignment, guard, job)
        finally:
            self._guards.discard(guard)
            guard.close()

    async def _run(
        self, client: GPUWorkerPoolClient, assignment: Assignment, guard: GuardedCommand, job: Job
    ) -> Outcome | None:
        attempt = self._batch.progress[job.key].attempts
        started = Started(job, attempt, tuple(assignment.gpu_ids), time.time())
        self.running[job.key] = started
        outcome = await self._run_on(assignment, guard, started)
        outcome = replace(outcome, log=str(log_path(self._plan.logs, job)), ended_at=time.time())
        if self.interrupted_by is not None:
            return None
        if self._state is not None:
            # Before the GPU is given back, which takes a moment: what is done and not written down is done again.
            self._state.note(job, attempt, outcome)
        with contextlib.suppress(StaleAssignmentError):  # told already
            await client.release_gpu(assignment)
        return outcome

    async def _run_on(self, assignment: Assignment, guard: GuardedCommand, started: Started) -> Outcome:
        outcome = Outcome(None, gpus=started.gpus, started_at=started.started_at)
        log = _open_log(self._plan.logs, started)
        lost = asyncio.create_task(until_lost(assignment))
        telling = asyncio.create_task(tell_guard(guard, assignment, self._sources.ttl_s))
        try:
            with open(os.devnull, "rb") as nothing:  # noqa: PTH123, ASYNC230 - opened at once
                await guard.start(
                    [SHELL, "-c", started.job.command],
                    self._env(assignment, started.job),
                    (nothing.fileno(), log, log),
                    group=0,
                    grace_s=self._grace_s,
                    safe_until=safe_until(assignment),
                )
            ended = asyncio.create_task(guard.wait())
            await asyncio.wait({ended, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                guard.end(self._grace_s)
                await asyncio.wait({ended})
                ended.exception()
                return replace(outcome, why=f"its GPU was lost: {lost.result()}")
            code = ended.result()
            if guard.was_late:
                return replace(outcome, why="its GPU was lost: the lease could not be renewed in time")
            return replace(outcome, exit_code=code)
        except GuardDied:
            return replace(outcome, why="its guard was killed, and the job with it")
        except Failure as failure:  # there is no shell, say
            return replace(outcome, exit_code=failure.code, why=str(failure))
        finally:
            os.close(log)
            await settle(lost, telling)

    def _env(self, assignment: Assignment, job: Job) -> Mapping[str, str]:
        return {**command_env(os.environ, assignment), "GPU_POOL_BATCH_LINE": str(job.line)}


def log_path(folder: Path, job: Job) -> Path:
    """The job's log. Its line is for people; the key keeps the logs of two jobs apart when lines are added."""
    return folder / f"line-{job.line:04d}-{job.key[:8]}.log"


def _open_log(folder: Path, started: Started) -> int:
    path = log_path(folder, started.job)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started.started_at))
    gpus = ", ".join(map(str, started.gpus))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.write(descriptor, f"# {when} attempt {started.attempt} on GPU {gpus}: {started.job.command}\n".encode())
    except OSError as error:
        raise Failure(
            f"the log {path} cannot be written: {error.strerror}; mend that, or name another --logs"
        ) from None
    return descriptor
