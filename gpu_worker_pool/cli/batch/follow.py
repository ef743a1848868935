"""A batch from its submission to its end: what became of each line is said, and written to the state file; a signal ends it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.cli.jobs.job_control import cancel_tasks
from gpu_worker_pool.cli.jobs.submit import wake_for
from gpu_worker_pool.cli.output import complain
from gpu_worker_pool.cli.run.asking import (
    check_inside,
    check_servers,
    endpoints_outside,
    environment_to_keep,
    find_lease_around,
    request_of,
)
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.inherited_lease import InheritedLease
from gpu_worker_pool.client.local_client import UNLIMITED_S, LocalClient
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.failure import SIGNAL_BASE, Failure
from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.host.guarded import Guarded
from gpu_worker_pool.host.processes import ProcessTable, own_proc
from gpu_worker_pool.jobs.gpu_wait import until_gone, wishes_of
from gpu_worker_pool.jobs.job_record import JobRecord
from gpu_worker_pool.jobs.job_spec import BatchFacts, JobSpec
from gpu_worker_pool.jobs.job_store import JobStore
from gpu_worker_pool.jobs.keeper_process import wake_keeper
from gpu_worker_pool.jobs.leases import Adopted
from gpu_worker_pool.jobs.submission import JobState
from gpu_worker_pool.jobs.supervisor import Supervisor

from .lines import StateFile, is_good
from .progress import Progress, attempt_facts

SOME_FAILED: Final = 1
# Jobs that share GPUs: how many request at once for each GPU. Those that do not fit wait in the queue.
_SHARERS_PER_GPU: Final = 8
_LOOK_S: Final = 0.1
# How often the keeper is looked for: one that was killed is started again.
_KEEPER_S: Final = 2.0
_RELEASE_S: Final = 5.0
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def done_before(kept: StateFile) -> dict[str, dict[str, Any]]:
    """The records of the lines that were done, by key. A batch that was killed is waited for: the keeper ends it, and its
    journal says what became of each line.
    """
    done, last = kept.load()
    store = JobStore(Path("" if last is None else str(last["folder"])))
    record = None if last is None else store.load_one(int(last["submission"]))
    if last is None or record is None or record.trouble is not None:
        return done
    told: set[int | None] = set()
    looked_at = -_KEEPER_S
    while not record.submission.is_over:
        if time.monotonic() - looked_at >= _KEEPER_S:
            looked_at = time.monotonic()
            wake_keeper(store)
        for task in record.submission.running():
            run = record.submission.runs.get(task.run or "")
            if task.index not in told and run is not None:
                told.add(task.index)
                complain(
                    f"job {task.index} still runs (pid {run.guard_pid}) under the batch that was killed; waiting for it"
                )
        time.sleep(_LOOK_S)
        record.refresh()
    for index, key in last["keys"].items():
        task = record.submission.task(int(index))
        if task.state is JobState.ENDED and key not in done:
            done[key] = attempt_facts(record, task, key)
            kept.append(done[key])
    return done


def submit_lines(
    store: JobStore, spec: JobSpec, progress: Progress, kept: StateFile | None, *, is_new: bool
) -> tuple[InheritedLease | None, JobRecord]:
    """Submit the lines that are not done; the lease around this process, if they are run on its GPUs, and the submission."""
    lines, proc = progress.to_run, own_proc()
    lease = None if is_new else find_lease_around(spec.endpoints, os.environ)
    environ = dict(os.environ)
    if lease is not None:
        config = ClientConfig.build(service_endpoint=lease.url.url)
        check_inside(lease, request_of(spec, config).wishes, os.environ)
        spec = replace(spec, is_inside=True, at_once=spec.at_once or max(len(lease.gpus) // spec.gpus, 1))
    else:
        endpoints = endpoints_outside(spec.endpoints, os.environ) if is_new else spec.endpoints
        spec = replace(spec, endpoints=None if endpoints is None else tuple(endpoints))
        environ = environment_to_keep(environ)
        servers = check_servers(spec, environ)
        if spec.memory_mb is not None and spec.at_once is None and servers is not None:
            spec = replace(spec, at_once=max(servers.gpu_count * _SHARERS_PER_GPU // spec.gpus, 1))
    facts = BatchFacts(
        lines=tuple(line.command for line in lines),
        logs=tuple(str(line.log_in(progress.logs).absolute()) for line in lines),
        pid=os.getpid(),
        pid_started=ProcessTable(proc).started(os.getpid()) if proc else None,
        boot_id=boot_id(),
    )
    number = store.submit(replace(spec, batch=facts, array=tuple(line.number for line in lines)), environ)
    record = store.load_one(number)
    if record is None:
        raise Failure(f"the submission {number} of this batch was removed")
    if kept is not None:
        keys = {str(line.number): line.key for line in lines}
        kept.append({"submission": number, "folder": str(store.root), "keys": keys})
    wake_for(store, number)
    return lease, record


class BatchFollower:
    """Follows a batch to its end. Where it is inside a `lease`, its jobs are run by this process."""

    def __init__(
        self,
        store: JobStore,
        record: JobRecord,
        progress: Progress,
        kept: StateFile | None,
        lease: InheritedLease | None,
    ) -> None:
        self._store, self._record, self._progress, self._kept, self._lease = store, record, progress, kept, lease
        self._keys = {line.number: line.key for line in progress.lines}
        progress.record = record
        self._ended_by: int | None = None
        self._inside: list[Supervisor] = []

    async def run(self) -> int:
        """Follow it; the exit code."""
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            # A signal that was ignored before (by nohup, say) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._end, number)
        # What cancels tasks sends these to their supervisors, which may be in this process.
        loop.add_signal_handler(signal.SIGUSR1, lambda: list(map(Supervisor.look, self._inside)))
        loop.add_signal_handler(signal.SIGUSR2, lambda: list(map(Supervisor.cancel, self._inside)))
        async with AsyncExitStack() as running:
            tasks = [] if self._lease is None else await self._run_inside(self._lease, running)
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
            if time.monotonic() - looked_at >= _KEEPER_S:
                looked_at = time.monotonic()
                wake_keeper(self._store)
            self._progress.show_running()
            await asyncio.sleep(_LOOK_S)
        for task in tasks:
            await task
        self._take_in()
        with suppress(TimeoutError):  # once the guards are gone, the GPUs are released
            async with asyncio.timeout(0.0 if tasks else _RELEASE_S):
                await until_gone(*(run.guard for run in submission.runs.values()))
        if self._record.trouble is not None:
            raise Failure(f"the journal of the batch cannot be read: {self._record.trouble}")

    def _take_in(self) -> None:
        for before, task in self._record.refresh():
            if before.state is not JobState.RUNNING or task.state is JobState.RUNNING or task.index is None:
                continue
            facts = attempt_facts(self._record, task, self._keys[task.index])
            if self._kept is not None and (self._ended_by is None or is_good(facts)):
                self._kept.append(facts)
            if self._ended_by is None:
                self._progress.tell_end(facts, is_again=task.state is JobState.SUBMITTED)

    def _cancel(self) -> None:
        """Cancel what is left. By another reader of the journal: this one must see each change."""
        record = self._store.load_one(self._record.number)
        if record is not None:
            cancel_tasks(record, record.spec.indices)

    def _end(self, number: int) -> None:
        """The first time, cancel what waits and ask what runs to end. The second time, kill it."""
        if self._ended_by is not None:
            for run in self._record.submission.open_runs.values():
                os.kill(run.guard_pid, signal.SIGKILL)
            return
        self._ended_by = number
        self._cancel()
        wake_keeper(self._store)  # it withdraws the request

    async def _run_inside(self, lease: InheritedLease, running: AsyncExitStack) -> list[asyncio.Task[None]]:
        """Take the lines in this process, each on GPUs of the lease around it."""
        config, spec = ClientConfig.build(service_endpoint=lease.url.url), self._record.spec
        client = await running.enter_async_context(LocalClient(config, os.environ, lease=lease))
        tasks = []
        for _ in range(min(spec.at_once or 1, len(spec.indices))):
            guarded = await running.enter_async_context(Guarded.start())
            assignment = await client.request(UNLIMITED_S, {**wishes_of(spec), "pid": guarded.pid})
            record = self._store.load_one(self._record.number)
            assert record is not None  # noqa: S101 - it was submitted a moment ago
            supervisor = Supervisor(
                self._store, record, run_id=secrets.token_hex(8), guarded=guarded, lease=Adopted(assignment)
            )
            self._inside.append(supervisor)
            tasks.append(asyncio.create_task(supervisor.run()))
        return tasks
