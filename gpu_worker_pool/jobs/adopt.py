"""The supervisor of submitted jobs: a program that its guard starts, on a lease that the keeper was granted.

It takes the next task of its submission, runs it, writes down what became of it, and takes the next one, under the same lease:
a spawn each, no new interpreter, no new lease. It does so until no task is left, or its GPUs are lost, or another request
comes before its own. It needs no keeper: its journal is all that it writes, beside the logs.

Signals: SIGUSR1 has it look whether its task is to be cancelled. SIGUSR2 cancels it where that cannot be written down.
SIGTERM ends it, and the task is `interrupted`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.client.events import ending_text
from gpu_worker_pool.core.model.lease import END_TEXTS, EndReason
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.host.clock import boot_id, boot_time
from gpu_worker_pool.host.guarded import GuardDied, Guarded
from gpu_worker_pool.host.identity import own_proc, pid_namespace
from gpu_worker_pool.host.processes import ProcessTable
from gpu_worker_pool.models import Assignment, GPUAssignment, LeaseEnding
from gpu_worker_pool.notify.rules import Rule, rules_of_command
from gpu_worker_pool.notify.sender import Sender

from .gpu_wait import config_of
from .job_spec import JobSpec
from .job_store import JobRecord, JobStore
from .keeper_link import GPU_POOL, NoKeeper, lock_keeper, poke, start_keeper
from .leases import Adopted, GpuRequest, adopted
from .life import (
    CancelAsked,
    JobEvent,
    JobLife,
    JobState,
    RunClosed,
    RunFacts,
    RunOpened,
    Submission,
    TasksClosed,
    TaskStarted,
    ended,
    interrupted,
)
from .limited_log import limited_log
from .notices import CommandNotices
from .supervise import Outcome, SupervisedCommand, supervise

_LOST_EVENTS: Final = (
    "its journal is damaged: it has a log of an attempt that the journal does not know; see whether it still runs, and use "
    "`gpu-pool retry`"
)
# How often a server is asked whether another request comes before the next task: tasks may take a few milliseconds.
_ASK_EVERY_S: Final = 0.1
_LOOK_S: Final = 0.2
_WRITE_AGAIN_S: Final = 1.0
# How soon another supervisor of the same submission releases its GPUs too.
_YIELD_AGAIN_S: Final = 1.0
# How long the keeper may take to request again, and how often it is looked for.
_YIELD_S: Final = 1.0
_REQUESTED_S: Final = 0.01
Decide = Callable[[Submission], Iterable[JobEvent]]


def request_of(spec: JobSpec) -> GpuRequest:
    """What a submission asks for."""
    return GpuRequest(
        spec.gpus,
        spec.memory_mb,
        spec.model,
        spec.priority,
        spec.timeout_s,
        time_limit_s=spec.time_limit_s,
        is_preemptible=spec.is_preemptible,
        among=spec.among,
    )


class Supervisor:
    """Takes the tasks of one submission, one after the other."""

    def __init__(
        self,
        store: JobStore,
        record: JobRecord,
        *,
        run_id: str,
        guarded: Guarded,
        lease: Adopted,
        notices: CommandNotices | None = None,
    ) -> None:
        self._store, self._record, self._run_id, self._guarded = store, record, run_id, guarded
        self._spec = record.spec
        self._environ = dict(os.environ)
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._lease, self._notices = lease, notices
        self._ask_at = 0.0
        self._task: JobLife | None = None
        self._is_stopping = False
        self._is_cancelled = False
        self._is_yielding = False

    async def run(self) -> None:
        """Take tasks until there is no more to take on this lease."""
        assignment = self._lease.assignment
        if self._notices is not None:
            gpus = assignment.uuids, assignment.nodes, assignment.gpu_ids
            self._notices.set_lease(assignment.lease_id, assignment.server_url, *gpus)
        opened = RunOpened(at=time.time(), run=self._facts(assignment))
        self._task = await self._write(lambda _: [opened], may_take=True)
        while self._task is not None:
            ending = await self._run_task(self._task, assignment)
            self._task = await self._write(ending, may_take=not await self._must_stop(assignment))
        is_yielded = self._is_yielding and self._record.submission.waiting > 0
        closed = RunClosed(at=time.time(), run=self._run_id, is_yielded=is_yielded)
        self._record.write(lambda _: [closed])
        if is_yielded:
            await self._let_others_be_first()

    def _facts(self, assignment: Assignment) -> RunFacts:
        proc = own_proc()
        started = ProcessTable(proc).started if proc else lambda _: None
        return RunFacts(
            id=self._run_id,
            pid=os.getpid(),
            started=started(os.getpid()),
            guard_pid=self._guarded.pid,
            guard_started=started(self._guarded.pid),
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            lease_id=assignment.lease_id,
            url=assignment.server_url,
            gpus=tuple(assignment.gpu_ids),
            uuids=tuple(assignment.uuids),
            nodes=tuple(assignment.nodes),
        )

    async def _write(self, first: Decide, *, may_take: bool) -> JobLife | None:
        """Write events, and take the next task in the same breath; the task. It is on the disk before its command starts. This
        waits until the disk can be written.
        """
        taken: list[JobLife] = []
        is_first_written = False

        def decide(submission: Submission) -> Iterator[JobEvent]:
            nonlocal is_first_written
            if not is_first_written:
                yield from first(submission)
            is_first_written = True
            if may_take and not self._is_stopping and (life := submission.next_task()) is not None:
                yield TaskStarted(at=time.time(), index=life.key.index, run=self._run_id)
                taken.append(submission.life(life.key.index))

        while True:
            taken.clear()
            try:
                self._record.write(decide)
            except OSError as error:
                if self._record.trouble is not None:
                    raise
                print(f"job {self._record.number} cannot be written down: {error.strerror}", file=sys.stderr)  # noqa: T201 - the keeper's log
                await asyncio.sleep(_WRITE_AGAIN_S)
            else:
                return taken[0] if taken else None

    async def _must_stop(self, assignment: Assignment) -> bool:
        """Whether these GPUs are not for another task: the lease ends, each task has a limit of its own, or another request
        comes before one of this submission.
        """
        if self._is_stopping or assignment.is_lost or assignment.ending is not None or self._spec.time_limit_s:
            return True
        now = time.monotonic()
        if now < self._ask_at:
            return False
        self._ask_at = now + _ASK_EVERY_S
        # One supervisor at a time: what it releases may be enough.
        has_yielded = time.time() - self._record.submission.yielded_at < _YIELD_AGAIN_S
        self._is_yielding = not has_yielded and await self._lease.is_wanted()
        return self._is_yielding

    async def _let_others_be_first(self) -> None:
        """Wait until the next request of this submission is behind that of the others: the keeper has to request again. If it does
        not, no more is lost than one turn.
        """
        submission, give_up_at = self._record.submission, time.monotonic() + _YIELD_S
        known = submission.requested_by
        with contextlib.suppress(NoKeeper, Failure):
            await asyncio.to_thread(poke, self._store)
            while submission.requested_at is not None and submission.requested_by == known:
                if time.monotonic() >= give_up_at:
                    return
                await asyncio.sleep(_REQUESTED_S)
                self._record.refresh()

    # --- one task ------------------------------------------------------------------------------------------------------

    async def _run_task(self, life: JobLife, assignment: Assignment) -> Decide:
        """Run it; what to write down then."""
        try:
            outcome = await self._run_command(life, assignment)
        except GuardDied:
            self._is_stopping = True
            return lambda _: [interrupted(life, time.time(), "its guard was killed while it ran")]
        except FileExistsError:
            return lambda _: [interrupted(life, time.time(), _LOST_EVENTS)]
        except Failure as failure:
            return self._ended(life, failure.code, str(failure))
        if self._is_stopping and not self._is_cancelled and outcome.why is None:
            return lambda _: [interrupted(life, time.time(), "its supervisor was told to end while it ran")]
        if outcome.is_lost:
            return self._ended(life, None, outcome.why)
        if outcome.end_reason is None:
            return self._ended(life, outcome.exit_code)
        code = None if outcome.why is not None else outcome.exit_code
        why = outcome.why or END_TEXTS[EndReason(outcome.end_reason)]
        return self._ended(life, code, why, outcome.end_reason)

    def _ended(
        self, life: JobLife, exit_code: int | None, why: str | None = None, end_reason: str | None = None
    ) -> Decide:
        at, last_number = time.time(), self._store.last_number()

        def decide(submission: Submission) -> Iterator[JobEvent]:
            if self._is_cancelled:
                yield CancelAsked(at=at, indices=(life.key.index,))
            now = submission.life(life.key.index)
            yield ended(submission, now, at, exit_code, why=why, end_reason=end_reason, last_number=last_number)

        # A job on several boxes is a `gpu-pool run`, which tells of its lease itself.
        if self._notices is not None and self._spec.nodes == 1:
            if exit_code is None:
                self._notices.lost(end_reason, why)
            self._notices.ended(exit_code, end_reason or (JobState.FAILED if exit_code is None else None), why)
        return decide

    async def _run_command(self, life: JobLife, assignment: Assignment) -> Outcome:
        spec, key = self._spec, life.key
        if not os.path.isdir(spec.cwd):  # noqa: PTH112, ASYNC240 - Path.is_dir raises where this user may not look
            raise Failure(f"its directory {spec.cwd} is not there any more; make it, and use `gpu-pool retry`")
        command = spec.command_of(key.index)
        if spec.nodes > 1:
            command = spec.gang_command(key.index, GPU_POOL)
        async with self._open_log(life, assignment) as log:

            def warn(ending: LeaseEnding | None) -> None:
                if self._notices is not None:
                    self._notices.ending(ending)
                if spec.batch is not None:
                    os.write(log, f"# {ending_text(ending)}\n".encode())

            if self._notices is not None and spec.nodes == 1:
                self._notices.job = str(key)
                self._notices.granted()

            return await supervise(
                self._guarded,
                assignment,
                SupervisedCommand(
                    argv=command,
                    env={**self._environ, **spec.variables(key, life.attempts - 1)},
                    streams=(self._nothing, log, log),
                    cwd=spec.cwd,
                    umask=spec.umask,
                    grace_s=spec.grace_s,
                ),
                on_warning=warn,
            )

    # --- signals -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """End the task if it is to be cancelled."""
        self._record.refresh()
        if self._task is not None and self._record.submission.life(self._task.key.index).is_cancel_asked:
            self._guarded.end(self._spec.grace_s)

    def cancel(self) -> None:
        """End the task as cancelled, where that cannot be written down, and take no more."""
        self._is_stopping = self._is_cancelled = True
        self._guarded.end(self._spec.grace_s)

    def stop(self) -> None:
        """End the task, which is interrupted by that, and take no more."""
        self._is_stopping = True
        self._guarded.end(self._spec.grace_s)

    # --- logs ----------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _open_log(self, life: JobLife, assignment: Assignment) -> AsyncIterator[int]:
        """The log of this attempt, for its command to write to; Failure where it cannot be written."""
        spec, path = self._spec, self._record.log_of(life.key.index, life.attempts)
        # A log of this attempt is there only if the journal has lost events: the job may run already.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if spec.batch is None else 0)
        try:
            descriptor = os.open(path, flags, 0o600 if spec.batch is None else 0o666)
        except FileExistsError:
            raise
        except OSError as error:
            raise Failure(f"its log {path} cannot be written: {error.strerror}") from None
        with contextlib.closing(os.fdopen(descriptor, "ab", buffering=0)) as log:
            if spec.batch is not None:
                when, gpus = time.strftime("%Y-%m-%d %H:%M:%S"), ", ".join(map(str, assignment.gpu_ids))
                line = spec.command_of(life.key.index)[-1]
                try:
                    log.write(f"# {when} attempt {life.attempts} on GPU {gpus}: {line}\n".encode())
                except OSError as error:
                    raise Failure(f"its log {path} cannot be written: {error.strerror}") from None
            if spec.log_limit_bytes is None:
                yield log.fileno()
            else:
                async with limited_log(path, spec.log_limit_bytes) as pipe:
                    yield pipe


# --- the program -------------------------------------------------------------------------------------------------------


async def _run(store: JobStore, record: JobRecord, ticket: dict[str, Any]) -> None:
    spec = record.spec
    rules = rules_of_command(spec.on_granted, spec.notify, os.environ, spec.cwd)
    async with _told(rules, spec.label) as notices, Guarded.inherited() as guarded, AsyncExitStack() as held:
        if ticket.get("lease_id") is None:
            # `gpu-pool run` requests the GPUs of a job on several boxes.
            lease = Adopted(GPUAssignment(0, "supervisor", datetime.now()))  # noqa: DTZ005 - it is not used
        else:
            lease_id, url = str(ticket["lease_id"]), str(ticket["url"])
            is_named = config_of(spec, os.environ).is_named
            adopting = adopted(lease_id, url, request_of(spec), os.environ, is_named=is_named)
            lease = await held.enter_async_context(adopting)
        run_id = str(ticket["run"])
        supervisor = Supervisor(store, record, run_id=run_id, guarded=guarded, lease=lease, notices=notices)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, supervisor.look)
        loop.add_signal_handler(signal.SIGUSR2, supervisor.cancel)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, supervisor.stop)
        await supervisor.run()
        await held.aclose()
        if lease.usage is not None:
            used = RunClosed(at=time.time(), run=run_id, usage=lease.usage)
            record.write(lambda _: [used], is_synced=False)


@contextlib.asynccontextmanager
async def _told(rules: Sequence[Rule], label: str) -> AsyncIterator[CommandNotices | None]:
    """The notices of the tasks; None without rules. At the end, when the lease is released, this waits until they are sent or
    given up.
    """
    if not rules:
        yield None
        return
    sender = Sender(boot_time)
    yield CommandNotices(lambda notice: sender.tell(notice, rules), label)
    while len(sender):  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(_LOOK_S)
    await sender.finish(0.0)


def main() -> int:
    """Take tasks, as the ticket says whose name is the argument."""
    path = Path(sys.argv[1])
    ticket = json.loads(path.read_bytes())
    path.unlink()
    store = JobStore(Path(ticket["root"]))
    record = store.load_one(int(ticket["number"]))
    if record is None or record.trouble is not None:
        return 1
    try:
        environ = store.environment_of(record.number)
    except Failure as failure:
        closed = TasksClosed(at=time.time(), becomes=JobState.FAILED, why=str(failure))
        record.write(lambda _: [closed])
        return 1
    os.environ.clear()  # nothing else runs in this process yet
    os.environ.update(environ)
    try:
        asyncio.run(_run(store, record, ticket))
    except Failure as failure:  # the lease is over: the keeper requests another
        print(f"job {record.number}: {failure}", file=sys.stderr)  # noqa: T201 - the keeper's log
        return 1
    _replace_keeper(store)
    return 0


def _replace_keeper(store: JobStore) -> None:
    """Start a keeper if none is there and jobs wait: they would stand still until the next command."""
    lock = lock_keeper(store.root)
    if lock is not None:
        os.close(lock)
        with contextlib.suppress(Failure):
            if any(not record.submission.is_over for record in store.load(store.live_numbers()).values()):
                start_keeper(store)
