"""Runs the jobs of a batch, each on a lease of its own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpu_worker_pool.cli.failure import TIMED_OUT, Failure
from gpu_worker_pool.cli.run.attempt import Outcome, watch
from gpu_worker_pool.cli.run.gpu_request import GpuRequest, acquire, release
from gpu_worker_pool.cli.run.guarded_command import GuardDied, GuardedCommand
from gpu_worker_pool.cli.run.signals import ENDING, Received, Signals
from gpu_worker_pool.cli.run.sources import Sources
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.command_label import label_text
from gpu_worker_pool.client.events import ending_text
from gpu_worker_pool.client.guarded_lease import command_env, grace_after_loss, limit_of, safe_until
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.models import LeaseEnding

from .jobs import Batch, Job
from .state import StateFile

SHELL = "/bin/sh"
# Jobs that share GPUs: how many request at once for each GPU. Those that do not fit wait in the queue.
SHARERS_PER_GPU = 8


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt at a job that has its GPUs."""

    job: Job
    attempt: int
    gpus: tuple[int | str, ...]
    started_at: float


@dataclass(frozen=True)
class BatchPlan:
    """The jobs, the GPUs each needs, and how to run them. `parallel`: how many at once; None: as the GPUs allow."""

    batch: Batch
    request: GpuRequest
    logs: Path
    grace_s: float
    parallel: int | None
    is_remote: bool


@dataclass
class BatchRunner:
    """Runs one batch. `running` has the attempts that run now, by key; `on_end` is called when one has ended."""

    plan: BatchPlan
    sources: Sources
    state: StateFile | None
    on_end: Callable[[Job, Outcome], None]
    running: dict[str, Started] = field(default_factory=dict)
    interrupted_by: int | None = None
    _attempts: dict[asyncio.Task[Outcome | None], Job] = field(default_factory=dict)
    _guarded: set[GuardedCommand] = field(default_factory=set)
    _error: Exception | None = None

    def __post_init__(self) -> None:
        self._batch = self.plan.batch
        self._grace_s = grace_after_loss(self.plan.grace_s, self.sources.ttl_s)

    @property
    def parallel(self) -> int:
        """How many jobs request GPUs or run at once; by default enough to use every GPU."""
        if self.plan.parallel is not None:
            return self.plan.parallel
        request = self.plan.request
        # Inside a lease no server counts the memory of those that share a GPU.
        per_gpu = 1 if request.memory_mb is None or self.sources.is_inside else SHARERS_PER_GPU
        return max(self.sources.gpu_count * per_gpu // request.gpus, 1)

    async def run(self) -> None:
        """Run until each job is done or failed, or the batch stops. Raises the first error that is not a job's."""
        signals = Signals()
        async with self.sources.client() as client, signals.passed_to(self._interrupt):
            try:
                self._start_some(client)
                while self._attempts:
                    await asyncio.wait(self._attempts, return_when=asyncio.FIRST_COMPLETED)
                    for task in [task for task in self._attempts if task.done()]:
                        self._settle(task, self._attempts.pop(task))
                    self._start_some(client)
            finally:
                await cancel_and_wait(*self._attempts)
        if self._error is not None:
            raise self._error

    def _start_some(self, client: GPUWorkerPoolClient) -> None:
        while len(self._attempts) < self.parallel and (job := self._batch.next_job()) is not None:
            self._attempts[asyncio.create_task(self._attempt(client, job))] = job

    def _interrupt(self, received: Received) -> None:
        """The first time, cancel what waits and ask what runs to end. The second time, kill it."""
        if received.number not in ENDING:
            for guarded in self._guarded:
                guarded.send_signal(received.number)
            return
        grace_s = self._grace_s if self.interrupted_by is None else 0.0
        self.interrupted_by = self.interrupted_by or received.number
        self._batch.is_stopping = True
        for task, job in self._attempts.items():
            if job.key not in self.running:
                task.cancel()
        for guarded in self._guarded:
            guarded.end(grace_s)

    def _settle(self, task: asyncio.Task[Outcome | None], job: Job) -> None:
        self.running.pop(job.key, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # The pool failed, and not the job: no more jobs are started, and those that run may finish.
            self._error = self._error or (error if isinstance(error, Exception) else None)
            self._batch.is_stopping = True
        if task.cancelled() or error is not None or (outcome := task.result()) is None:
            self._batch.interrupted(job)
            return
        self._batch.ended(job, outcome)
        self.on_end(job, self._batch.progress[job.key].outcome or outcome)

    async def _attempt(self, client: GPUWorkerPoolClient, job: Job) -> Outcome | None:
        guarded = GuardedCommand([] if self.state is None else [self.state.descriptor])
        try:
            request = self.plan.request
            request = replace(request, labels={**request.labels, "job": label_text(f"line {job.line}")})
            try:
                assignment = await acquire(client, self.sources, request, guarded.pid)
            except Failure as failure:
                if failure.code != TIMED_OUT:
                    raise
                return Outcome(None, str(failure))
            self._guarded.add(guarded)
            return await self._run(client, assignment, guarded, job)
        finally:
            self._guarded.discard(guarded)
            guarded.close()

    async def _run(
        self, client: GPUWorkerPoolClient, assignment: Assignment, guarded: GuardedCommand, job: Job
    ) -> Outcome | None:
        attempt = self._batch.progress[job.key].attempts
        started = Started(job, attempt, tuple(assignment.gpu_ids), time.time())
        self.running[job.key] = started
        if self.state is not None:
            self.state.note_start(job, guarded.pid)
        outcome = await self._run_on(assignment, guarded, started)
        outcome = replace(outcome, log=str(log_path(self.plan.logs, job)), ended_at=time.time())
        if self.interrupted_by is not None:
            return None
        if self.state is not None:
            # Before the release, which takes a moment: a job that is done and not written down is run again.
            self.state.note(job, attempt, outcome)
        await release(client, assignment)
        return outcome

    async def _run_on(self, assignment: Assignment, guarded: GuardedCommand, started: Started) -> Outcome:
        outcome = Outcome(None, gpus=started.gpus, started_at=started.started_at)
        log = _open_log(self.plan.logs, started)

        def warn(ending: LeaseEnding | None) -> None:
            os.write(log, f"# {ending_text(ending)}\n".encode())

        try:
            with open(os.devnull, "rb") as nothing:  # noqa: PTH123, ASYNC230 - opened at once
                await guarded.start(
                    [SHELL, "-c", started.job.command],
                    {**command_env(os.environ, assignment), "GPU_POOL_BATCH_LINE": str(started.job.line)},
                    (nothing.fileno(), log, log),
                    group=0,
                    grace_s=self._grace_s,
                    safe_until=safe_until(assignment),
                    limit=limit_of(assignment),
                )
            ttl_s = self.sources.ttl_s
            return await watch(guarded, assignment, outcome, ttl_s=ttl_s, grace_s=self._grace_s, on_ending=warn)
        except GuardDied:
            return replace(outcome, why="its guard was killed, and the job with it")
        except Failure as failure:  # there is no shell, say
            return replace(outcome, exit_code=failure.code, why=str(failure))
        finally:
            os.close(log)


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
            f"the log {path} cannot be written: {error.strerror}; fix that, or name another folder with --logs"
        ) from None
    return descriptor
