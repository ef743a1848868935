"""Follows a batch: says what became of each line, writes it to the state file, and ends the batch when a signal comes."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Final

from gpu_worker_pool.cli.jobs.job_control import cancel_tasks
from gpu_worker_pool.cli.run.sources import Sources, find_lease_around
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.failure import SIGNAL_BASE, Failure
from gpu_worker_pool.host.guarded import Guarded
from gpu_worker_pool.host.identity import Machine
from gpu_worker_pool.jobs.adopt import Supervisor, request_of
from gpu_worker_pool.jobs.gpu_wait import until_gone
from gpu_worker_pool.jobs.job_store import JobRecord, JobStore
from gpu_worker_pool.jobs.keeper_link import wake_keeper
from gpu_worker_pool.jobs.leases import Adopted, acquire
from gpu_worker_pool.jobs.life import JobState

from .lines import StateFile, is_good
from .progress import Attempts, Progress

SOME_FAILED: Final = 1
_LOOK_S: Final = 0.1
# How often the keeper is looked for: one that was killed is started again.
_KEEPER_S: Final = 2.0
_RELEASE_S: Final = 5.0
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class BatchFollower:
    def __init__(self, store: JobStore, record: JobRecord, progress: Progress, kept: StateFile | None) -> None:
        self._store, self._record, self._progress, self._kept = store, record, progress, kept
        self._lines = {line.number: line for line in progress.lines}
        self._attempts = Attempts(record, {line.number: line.key for line in progress.lines})
        self._over = progress.done
        self._ended_by: int | None = None
        self._inside: list[Supervisor] = []

    async def run(self, *, is_inside: bool) -> int:
        """Follow it to its end; the exit code. Where it `is_inside` a lease, its jobs are run by this process."""
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            # A signal that was ignored before (by nohup, say) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._end, number)
        # What cancels tasks sends these to their supervisors, which may be in this process.
        loop.add_signal_handler(signal.SIGUSR1, self._each_inside, Supervisor.look)
        loop.add_signal_handler(signal.SIGUSR2, self._each_inside, Supervisor.cancel)
        async with AsyncExitStack() as running:
            tasks = await self._run_inside(running) if is_inside else []
            try:
                await self._follow(tasks)
            finally:
                self._progress.close()
                await cancel_and_wait(*tasks)
        if self._ended_by is not None:
            return SIGNAL_BASE + self._ended_by
        return SOME_FAILED if self._progress.done < len(self._progress.lines) else 0

    async def _follow(self, tasks: list[asyncio.Task[None]]) -> None:
        submission, looked_at = self._record.submission, time.monotonic()
        while True:
            self._take_in()
            if submission.is_over or (tasks and all(task.done() for task in tasks)):
                break
            if submission.is_stopped and not submission.counts[JobState.RUNNING]:
                self._cancel()  # no more of them are started
                continue
            if not tasks and time.monotonic() - looked_at >= _KEEPER_S:
                looked_at = time.monotonic()
                wake_keeper(self._store)
            self._progress.show_running()
            await asyncio.sleep(_LOOK_S)
        for task in tasks:
            await task
        self._take_in()
        if not tasks:
            await self._until_released()
        if self._record.trouble is not None:
            raise Failure(f"the journal of the batch cannot be read: {self._record.trouble}")

    async def _until_released(self) -> None:
        """Wait for the end of its supervisors: their GPUs are released then."""
        machine = Machine.here()
        with suppress(TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                for run in self._record.submission.runs.values():
                    if machine.is_alive(ProcessId(run.guard_pid, run.guard_started)):
                        await until_gone(run.guard_pid)

    def _take_in(self) -> None:
        for event, noted in self._attempts.ended(self._record.refresh()):
            if self._kept is not None and (self._ended_by is None or is_good(noted)):
                self._kept.append(noted)
            if self._ended_by is None and event.index is not None:
                is_again = event.becomes is JobState.SUBMITTED
                self._over += not is_again
                self._progress.tell_end(self._lines[event.index], noted, self._over, is_again=is_again)

    def _cancel(self) -> None:
        """Cancel what is left. By another reader of the journal: this one must see each event."""
        record = self._store.load_one(self._record.number)
        if record is not None:
            cancel_tasks(record, record.submission.terms.indices)

    def _end(self, number: int) -> None:
        """The first time, cancel what waits and ask what runs to end. The second time, kill it."""
        if self._ended_by is not None:
            for run in self._record.submission.open_runs.values():
                os.kill(run.guard_pid, signal.SIGKILL)
            return
        self._ended_by = number
        self._cancel()
        self._each_inside(Supervisor.look)
        if not self._inside:
            wake_keeper(self._store)  # it withdraws the request

    def _each_inside(self, do: Callable[[Supervisor], None]) -> None:
        for supervisor in self._inside:
            do(supervisor)

    async def _run_inside(self, running: AsyncExitStack) -> list[asyncio.Task[None]]:
        """Take the lines in this process, each on GPUs of the lease around it."""
        lease = find_lease_around(self._record.spec.endpoints, os.environ)
        if lease is None:
            raise Failure("the lease around this command is gone")
        client = await running.enter_async_context(Sources.inside(lease).client())
        tasks = []
        for _ in range(min(self._record.spec.at_once or 1, len(self._record.submission.terms.indices))):
            guarded = await running.enter_async_context(Guarded.start())
            assignment = await acquire(client, request_of(self._record.spec), guarded.pid)
            record = self._store.load_one(self._record.number)
            assert record is not None  # noqa: S101 - it was submitted a moment ago
            supervisor = Supervisor(
                self._store, record, run_id=secrets.token_hex(8), guarded=guarded, lease=Adopted(assignment)
            )
            self._inside.append(supervisor)
            tasks.append(asyncio.create_task(supervisor.run()))
        return tasks
