"""One attempt at a job: wait for its GPUs, start its command, follow both to the end; or find a command that runs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Final

from gpu_worker_pool.cli.failure import TIMED_OUT, Failure
from gpu_worker_pool.cli.run.attempt import Outcome, watch
from gpu_worker_pool.cli.run.gpu_request import GpuRequest, acquire, release
from gpu_worker_pool.cli.run.guarded_command import GuardDied, exit_code
from gpu_worker_pool.cli.run.sources import Sources
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.acquire.acquisition import ONE_TRY_S
from gpu_worker_pool.client.events import ClientEvent
from gpu_worker_pool.client.guarded_lease import command_env, grace_after_loss, limit_of, safe_until
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.core.model.bounds import DEFAULT_TTL_S
from gpu_worker_pool.errors import PoolError, RequestRefusedError
from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.jobs.life import (
    GuardOutcome,
    JobClosed,
    JobEvent,
    JobState,
    RunEnded,
    RunLease,
    RunNotStarted,
    RunStarted,
    ended,
    found_again,
)
from gpu_worker_pool.models import GPUAssignment, LeaseEnding
from gpu_worker_pool.wire.reader import read

from .adopted_lease import adopted_lease
from .detached_command import DetachedCommand
from .job_pools import JobPool
from .job_store import JobRecord, JobStore, read_outcome
from .keeper_link import GPU_POOL, keeper_to_start
from .usage_meter import UsageMeter

_SPAWN_AGAIN_S: Final = 1.0
# A process that cannot be started now may be later, but a machine that has none left must not be asked for ever.
_SPAWN_S: Final = 600.0
Note = Callable[[JobRecord, JobEvent], Awaitable[None]]


@dataclass(eq=False)
class JobRun:
    """One attempt. `note` writes an event of the job to the disk; `warn` is told when its lease is about to end; `say` is for the
    keeper's log.

    `on_granted` is called when the GPUs are there. It may give this run another job, of those that ask for the same.
    """

    store: JobStore
    record: JobRecord
    pool: JobPool
    environ: Mapping[str, str]
    note: Note
    warn: Callable[[JobRecord, LeaseEnding | None], None]
    say: Callable[[str], None]
    on_granted: Callable[[JobRun], None]
    is_granted: bool = False
    # How the request waits, once it does.
    queued: ClientEvent | None = None
    meter: UsageMeter = field(default_factory=UsageMeter)
    _guarded: DetachedCommand | None = None
    _can_be_told: bool = False

    async def attempt(self) -> None:
        """Wait and run, and note what became of it."""
        try:
            while not await (self._run_gang() if self.record.spec.nodes > 1 else self._request_and_run()):
                pass
        except RequestRefusedError as error:
            await self._close(JobState.CANCELLED if error.was_ended else JobState.FAILED, error)
        except (Failure, PoolError) as error:
            await self._close(JobState.FAILED, error)

    async def adopt(self) -> None:
        """Find the command that an earlier keeper started, follow it, and note what became of it."""
        life, spec = self.record.life, self.record.spec
        assert life.guard is not None  # noqa: S101 - it runs
        assert life.lease is not None  # noqa: S101
        self.meter = UsageMeter.going_on(life.usage)
        guarded = await DetachedCommand.find(life.guard)
        if guarded is None:
            await self._finish(self._what_became())
            return
        self.say(f"job {self.record.key} goes on (pid {life.guard.pid})")
        self._guarded, self._can_be_told = guarded, True
        if self.record.life.is_cancel_asked:  # perhaps while the guard was being found
            self.end()
        try:
            async with adopted_lease(life.lease, life.started_at or time.time(), self.environ) as assignment:
                await self._finish(
                    await self._watch(guarded, assignment, grace_after_loss(spec.grace_s, life.lease.ttl_s))
                )
        finally:
            guarded.close()

    def is_like(self, other: JobRun) -> bool:
        """Whether both ask for the same of the same servers, so that a grant may be used for either."""
        return self.pool is other.pool and self.record.spec.asks_like(other.record.spec)

    def end(self) -> None:
        """End the command of a job that is being cancelled; one that has not quite started ends when it has."""
        if self._can_be_told and self._guarded is not None:
            self._guarded.end(self.record.spec.grace_s)

    # --- the request ---------------------------------------------------------------------------------------------------

    @property
    def _left_s(self) -> float | None:
        limit_s, since = self.record.spec.timeout_s, self.record.life.requested_at
        return None if limit_s is None else max(limit_s - (time.time() - (since or time.time())), 0.0)

    async def _request_and_run(self) -> bool:
        """False where the process that waited for the job was killed: GPUs are requested again."""
        self.is_granted = False
        left_s = self._left_s
        try:
            async with asyncio.timeout(None if left_s is None else max(left_s, ONE_TRY_S)):
                client, sources = await self.pool.open()
                await self.pool.gate.acquire()
        except TimeoutError:
            why = f"no server has answered: {self.pool.trouble}" if self.pool.trouble else "others were before it"
            raise Failure(f"no GPU within --timeout: {why}", TIMED_OUT) from None
        acquiring: asyncio.Task[Assignment] | None = None
        try:
            try:
                self._guarded = guarded = await self._spawn()
                acquiring = asyncio.create_task(acquire(client, sources, self._request(), guarded.pid))
                await self._until_queued(acquiring)
            finally:
                # The next request may enter the queue, behind this one.
                self.pool.gate.release()
            try:
                assignment = await acquiring
            except RequestRefusedError:
                if guarded.is_alive:
                    raise
                return False  # a server refuses a holder that is dead
            self.on_granted(self)
            self.is_granted = True
            return await self._run_on(client, sources, assignment, guarded)
        finally:
            if acquiring is not None and not acquiring.done():
                await cancel_and_wait(acquiring)
            self._can_be_told = False
            if self._guarded is not None:
                self._guarded.close()

    async def _spawn(self) -> DetachedCommand:
        give_up_at = time.monotonic() + _SPAWN_S
        while True:
            try:
                return DetachedCommand.spawn()
            except OSError as error:
                if time.monotonic() >= give_up_at:
                    raise Failure(f"no process can be started for it: {error.strerror}") from None
                self.say(f"no process can be started for job {self.record.key}: {error.strerror}; trying again")
                await asyncio.sleep(_SPAWN_AGAIN_S)

    def _request(self) -> GpuRequest:
        spec = self.record.spec
        return GpuRequest(
            spec.gpus,
            spec.memory_mb,
            spec.model,
            spec.priority,
            self._left_s,
            {"command": spec.label},
            is_new=True,
            time_limit_s=spec.time_limit_s,
            is_preemptible=spec.is_preemptible,
        )

    async def _until_queued(self, acquiring: asyncio.Task[Assignment]) -> None:
        """Wait until the request has its place in a queue, or its GPUs."""
        queued = asyncio.Event()

        def note(event: ClientEvent) -> None:
            self.queued = event
            queued.set()

        self.pool.expect(note)
        waiting = asyncio.create_task(queued.wait())
        try:
            await asyncio.wait({acquiring, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(waiting)

    async def _run_gang(self) -> bool:
        """Run a job on several boxes: `gpu-pool run --nodes` requests the GPUs, starts the others, and writes to the log
        of the job. False where its guard was killed before.
        """
        record, spec = self.record, self.record.spec
        self.is_granted = True
        guarded = self._guarded = await self._spawn()
        nothing = GPUAssignment(0, "keeper", datetime.now())  # noqa: DTZ005 - it is not used
        try:
            await guarded.wake(record.outcome_of(record.life.attempts + 1), keeper_to_start(self.store))
            log = self._open_log()
            try:
                lease = RunLease(id="", url=None, gpus=(), uuids=(), is_local=True, ttl_s=DEFAULT_TTL_S)
                await self.note(record, RunStarted(at=time.time(), guard=guarded.facts, lease=lease))
                self._name_log()
                command, env = spec.gang_command(record.key, GPU_POOL), {**self.environ, **spec.variables(record.key)}
                started = await self._start(command, env, nothing, guarded, spec.grace_s, log)
            finally:
                os.close(log)
            await self._finish(started or await self._watch(guarded, nothing, spec.grace_s))
        except GuardDied:
            if record.life.state is not JobState.RUNNING:
                return False
            await self._finish(self._what_became())
        finally:
            self._can_be_told = False
            guarded.close()
        return True

    # --- the run -------------------------------------------------------------------------------------------------------

    async def _run_on(
        self, client: GPUWorkerPoolClient, sources: Sources, assignment: Assignment, guarded: DetachedCommand
    ) -> bool:
        record, spec = self.record, self.record.spec
        grace_s = grace_after_loss(spec.grace_s, sources.ttl_s)
        try:
            await guarded.wake(record.outcome_of(record.life.attempts + 1), keeper_to_start(self.store))
        except BaseException as error:
            await release(client, assignment)
            if isinstance(error, GuardDied):
                return False
            raise
        try:
            log = self._open_log()
            try:
                # From here on the command may run: what follows is known to the next keeper.
                await self.note(record, self._started(assignment, sources, guarded))
                self._name_log()
                env = {**command_env(self.environ, assignment), **spec.variables(record.key)}
                command = spec.command_of(record.key)
                started = await self._start(command, env, assignment, guarded, grace_s, log)
            finally:
                os.close(log)
            await self._finish(started or await self._watch(guarded, assignment, grace_s))
        except GuardDied:
            await self._finish(self._what_became())
        except Failure as failure:
            await self._close(JobState.FAILED, failure)
        await release(client, assignment)
        return True

    async def _finish(self, last: RunEnded | RunNotStarted) -> None:
        """Note how a run ended. That comes before the release of its lease, which may take its time."""
        if isinstance(last, RunEnded):
            await self.note(self.record, self.meter.measured(last.at))
        else:
            self.record.log.unlink(missing_ok=True)  # nothing has run, and the next attempt has the same number
        await self.note(self.record, last)

    async def _close(self, becomes: JobState, error: Exception) -> None:
        """Note that it is over without a run."""
        code = error.code if isinstance(error, Failure) else None
        await self.note(self.record, JobClosed(at=time.time(), becomes=becomes, why=str(error), exit_code=code))

    def _started(self, assignment: Assignment, sources: Sources, guarded: DetachedCommand) -> RunStarted:
        spec = self.record.spec
        lease = RunLease(
            id=assignment.lease_id or "",
            url=assignment.server_url,
            gpus=tuple(assignment.gpu_ids),
            uuids=tuple(assignment.uuids),
            is_local=bool(getattr(assignment.lost, "is_local", False)),
            ttl_s=sources.ttl_s,
            limit_at=limit_of(assignment),
            is_shared=spec.memory_mb is not None,
            nodes=tuple(assignment.nodes),
        )
        return RunStarted(at=time.time(), guard=guarded.facts, lease=lease)

    async def _start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        assignment: Assignment,
        guarded: DetachedCommand,
        grace_s: float,
        log: int,
    ) -> RunEnded | None:
        """Start the command; how the job ended where that was not possible."""
        record, spec = self.record, self.record.spec
        try:
            with open(os.devnull, "rb") as nothing:  # noqa: PTH123, ASYNC230 - opened at once
                await guarded.start(
                    command,
                    env,
                    (nothing.fileno(), log, log),
                    group=0,
                    grace_s=grace_s,
                    safe_until=safe_until(assignment),
                    limit=limit_of(assignment),
                    cwd=spec.cwd,
                    umask=spec.umask,
                    log=str(record.log),
                    log_limit=spec.log_limit_bytes,
                )
        except Failure as failure:
            return self._ended(Outcome(failure.code, str(failure)))
        self._can_be_told = True
        if record.life.is_cancel_asked:
            self.end()
        return None

    def _open_log(self) -> int:
        """The log of the attempt that is about to start. Failure where it, or the job's directory, cannot be used."""
        spec, path = self.record.spec, self.record.new_log
        if not os.path.isdir(spec.cwd):  # noqa: PTH112 - Path.is_dir raises where this user may not look
            raise Failure(f"its directory {spec.cwd} is not there any more; make it, and use `gpu-pool retry`")
        try:
            self.record.make_folder()
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Failure(f"its log {path} cannot be written: {error.strerror}") from None

    def _name_log(self) -> None:
        """Give the log its name, now that the journal knows of the attempt."""
        with suppress(OSError):
            self.record.new_log.replace(self.record.log)

    async def _watch(
        self, guarded: DetachedCommand, assignment: Assignment, grace_s: float
    ) -> RunEnded | RunNotStarted:
        lease = self.record.life.lease
        ttl_s = lease.ttl_s if lease is not None else 0.0
        try:
            outcome = await watch(
                guarded,
                assignment,
                Outcome(None),
                ttl_s=ttl_s,
                grace_s=grace_s,
                on_ending=partial(self.warn, self.record),
            )
        except GuardDied:
            return self._what_became()
        return self._ended(outcome)

    def _ended(self, outcome: Outcome) -> RunEnded:
        last_number = self.store.last_number()
        return ended(
            self.record.life,
            time.time(),
            outcome.exit_code,
            outcome.why,
            outcome.end_reason,
            last_number=last_number,
        )

    def _what_became(self) -> RunEnded | RunNotStarted:
        """What became of a command whose guard is gone."""
        life = self.record.life
        data = read_outcome(self.record.outcome_of(life.attempts))
        if data is None or life.guard is None or data.get("address") != life.guard.address:
            data = {}  # it is that of an attempt that was never started, and had the same number
        if isinstance(status := data.pop("status", None), int):
            with suppress(ValueError):
                data["exit_code"] = exit_code(status)
        outcome = read(GuardOutcome, data)
        is_same_boot = life.guard is not None and life.guard.boot_id == boot_id()
        last_number = self.store.last_number()
        return found_again(life, time.time(), outcome, is_same_boot=is_same_boot, last_number=last_number)
