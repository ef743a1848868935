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
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.client.events import ending_text
from gpu_worker_pool.core.model.lease import END_TEXTS, EndReason
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.host.guarded import GuardDied, Guarded
from gpu_worker_pool.host.processes import ProcessTable, own_proc, pid_namespace
from gpu_worker_pool.models import Assignment, GPUAssignment, LeaseEnding
from gpu_worker_pool.notify.rules import Rule, rules_of_command
from gpu_worker_pool.notify.sender import MAX_AGE_S

from .gpu_wait import config_of, wishes_of
from .job_log import opened_log
from .job_record import Decide, JobRecord
from .job_spec import JobKey
from .job_store import JobStore
from .keeper_process import GPU_POOL, NoKeeper, log, poke, wake_keeper
from .leases import Adopted, adopted
from .notices import CommandNotices, told
from .out_of_memory import cause_in_log
from .submission import (
    OUT_OF_MEMORY,
    JobState,
    JobTask,
    Record,
    Run,
    Submission,
    Whole,
    closed,
    ended,
    interrupted,
    started,
)
from .supervise import Outcome, SupervisedCommand, supervise

_LOST_RECORDS: Final = (
    "its journal is damaged: it has a log of an attempt that the journal does not know; see whether it still runs, and use "
    "`gpu-pool retry`"
)
# How often a server is asked whether another request comes before the next task: tasks may take a few milliseconds.
_ASK_EVERY_S: Final = 0.1
_WRITE_AGAIN_S: Final = 1.0
# How soon another supervisor of the same submission releases its GPUs too.
_YIELD_AGAIN_S: Final = 1.0
# How long the keeper may take to request again, and how often it is looked for.
_YIELD_S: Final = 1.0
_REQUESTED_S: Final = 0.01


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
        self._task: JobTask | None = None
        self._is_stopping = False
        self._is_cancelled = False
        self._is_yielding = False

    async def run(self) -> None:
        """Take tasks until there is no more to take on this lease."""
        assignment = self._lease.assignment
        if self._notices is not None:
            self._notices.set_lease(assignment)
        run = self._facts(assignment)
        self._task = await self._write(lambda now: [run, *self._without_request(now)], may_take=True)
        while self._task is not None:
            ending = await self._run_task(self._task, assignment)
            self._task = await self._write(ending, may_take=not await self._must_stop(assignment))
        is_yielded = self._is_yielding and self._record.submission.waiting > 0
        over, at = replace(run, is_open=False), time.time()
        await self._write(
            lambda now: [over, *([replace(now.whole, yielded_at=at)] if is_yielded else [])], may_take=False
        )
        if is_yielded:
            await self._let_others_be_first()

    def _without_request(self, now: Submission) -> list[Whole]:
        """The request that was granted is over. The keeper may have made the next one meanwhile."""
        return [replace(now.whole, requested_at=None)] if now.whole.requested_by == self._run_id else []

    def _facts(self, assignment: Assignment) -> Run:
        proc = own_proc()
        started = ProcessTable(proc).started if proc else lambda _: None
        return Run(
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

    async def _write(self, first: Decide, *, may_take: bool) -> JobTask | None:
        """Write events, and take the next task in the same breath; the task. It is on the disk before its command starts. This
        waits until the disk can be written.
        """
        taken: list[JobTask] = []
        is_first_written = False

        def decide(submission: Submission) -> Iterator[Record]:
            nonlocal is_first_written
            if not is_first_written:
                yield from first(submission)
            is_first_written = True
            if may_take and not self._is_stopping and (task := submission.next_task()) is not None:
                taken.append(started(task, time.time(), self._run_id))
                yield taken[0]

        why = None
        while True:
            taken.clear()
            try:
                self._record.write(decide)
            except OSError as error:
                if self._record.trouble is not None or not self._store.root.is_dir():
                    raise Failure(f"what became of it cannot be written down: {error.strerror or error}") from None
                if why is None:
                    why = str(error.strerror)
                    log(f"job {self._record.number} cannot be written down: {why}; trying again")
                await asyncio.sleep(_WRITE_AGAIN_S)
            else:
                if why is not None:
                    log(f"job {self._record.number} was written down late: {why}")
                return taken[0] if taken else None

    async def _must_stop(self, assignment: Assignment) -> bool:
        """Whether these GPUs are not for another task: the lease ends, each task has a limit of its own, the user has changed what
        it asks for, or another request comes before one of this submission.
        """
        if self._is_stopping or assignment.is_lost or assignment.ending is not None or self._spec.time_limit_s:
            return True
        if self._record.spec != self._spec:
            return True
        now = time.monotonic()
        if now < self._ask_at:
            return False
        self._ask_at = now + _ASK_EVERY_S
        # One supervisor at a time: what it releases may be enough.
        has_yielded = time.time() - self._record.submission.whole.yielded_at < _YIELD_AGAIN_S
        self._is_yielding = not has_yielded and await self._lease.is_wanted()
        return self._is_yielding

    async def _let_others_be_first(self) -> None:
        """Wait until the next request of this submission is behind that of the others: the keeper has to request again. If it does
        not, no more is lost than one turn.
        """
        submission, give_up_at = self._record.submission, time.monotonic() + _YIELD_S
        known = submission.whole.requested_by
        with contextlib.suppress(NoKeeper, Failure):
            await asyncio.to_thread(poke, self._store)
            while submission.requested_at is not None and submission.whole.requested_by == known:
                if time.monotonic() >= give_up_at:
                    return
                await asyncio.sleep(_REQUESTED_S)
                self._record.refresh()

    # --- one task ------------------------------------------------------------------------------------------------------

    async def _run_task(self, task: JobTask, assignment: Assignment) -> Decide:
        """Run it; what to write down then."""
        try:
            outcome = await self._run_command(task, assignment)
        except GuardDied:
            self._is_stopping = True
            return self._interrupted(task, "its guard was killed while it ran")
        except FileExistsError:
            return self._interrupted(task, _LOST_RECORDS)
        except Failure as failure:
            return self._ended(task, failure.code, str(failure))
        why, reason, code = outcome.why, outcome.end_reason, outcome.exit_code
        if reason is None and why is None and code:
            why = outcome.out_of_memory or cause_in_log(self._record.log_of(task.index, task.attempts))
            reason = OUT_OF_MEMORY if why else None
        note = outcome.note if reason != OUT_OF_MEMORY else f"exit code {code}, {why}"
        self._lease.end_note = note if self._spec.array is None else None
        if self._is_stopping and not self._is_cancelled and outcome.why is None:
            return self._interrupted(task, "its supervisor was told to end while it ran")
        if outcome.end_reason is not None and why is None:
            why = END_TEXTS[EndReason(outcome.end_reason)]
        return self._ended(task, None if outcome.why is not None else code, why, reason)

    def _interrupted(self, task: JobTask, why: str) -> Decide:
        return lambda now: [interrupted(now.task(task.index), time.time(), why)]

    def _ended(
        self, task: JobTask, exit_code: int | None, why: str | None = None, end_reason: str | None = None
    ) -> Decide:
        at, last_number = time.time(), self._store.last_number()

        def decide(submission: Submission) -> list[Record]:
            now = submission.task(task.index)
            if self._is_cancelled:
                now = replace(now, is_cancel_asked=True)
            return [ended(submission, now, at, exit_code, why=why, end_reason=end_reason, last_number=last_number)]

        # A job on other boxes is a `gpu-pool run`, which tells of its lease itself.
        if self._notices is not None and not self._spec.runs_itself:
            if exit_code is None:
                self._notices.lost(end_reason, why)
            self._notices.ended(exit_code, end_reason or (JobState.FAILED if exit_code is None else None), why)
        return decide

    async def _run_command(self, task: JobTask, assignment: Assignment) -> Outcome:
        spec, key = self._spec, JobKey(self._record.number, task.index)
        if not os.path.isdir(spec.cwd):  # noqa: PTH112, ASYNC240 - Path.is_dir raises where this user may not look
            raise Failure(f"its directory {spec.cwd} is not there any more; make it, and use `gpu-pool retry`")
        command = spec.command_of(key.index)
        if spec.runs_itself:
            command = spec.command_of_run(key.index, GPU_POOL)
        async with opened_log(self._record, task, assignment.gpu_ids) as output:

            def warn(ending: LeaseEnding | None) -> None:
                if self._notices is not None:
                    self._notices.ending(ending)
                if spec.batch is not None:
                    os.write(output, f"# {ending_text(ending)}\n".encode())

            if self._notices is not None and not spec.runs_itself:
                self._notices.job = str(key)
                self._notices.granted()

            return await supervise(
                self._guarded,
                assignment,
                SupervisedCommand(
                    argv=command,
                    env={**self._environ, **spec.variables(key, task.attempts - 1)},
                    streams=(self._nothing, output, output),
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
        if self._task is not None and self._record.submission.task(self._task.index).is_cancel_asked:
            self._guarded.end(self._spec.grace_s)

    def cancel(self) -> None:
        """End the task as cancelled, where that cannot be written down, and take no more."""
        self._is_stopping = self._is_cancelled = True
        self._guarded.end(self._spec.grace_s)

    def stop(self) -> None:
        """End the task, which is interrupted by that, and take no more."""
        self._is_stopping = True
        self._guarded.end(self._spec.grace_s)


# --- the program -------------------------------------------------------------------------------------------------------


async def _run(store: JobStore, record: JobRecord, ticket: dict[str, Any], rules: Sequence[Rule]) -> None:
    spec = record.spec
    async with (
        told(rules, spec.label, finish_s=MAX_AGE_S) as notices,
        Guarded.inherited() as guarded,
        AsyncExitStack() as held,
    ):
        if ticket.get("lease_id") is None:
            # `gpu-pool run` requests the GPUs of a job on several boxes.
            lease = Adopted(GPUAssignment(0, "supervisor", datetime.now()))  # noqa: DTZ005 - it is not used
        else:
            lease_id, url = str(ticket["lease_id"]), str(ticket["url"])
            is_named = config_of(spec, os.environ).is_named
            adopting = adopted(lease_id, url, wishes_of(spec), os.environ, is_named=is_named)
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
            usage = lease.usage
            with contextlib.suppress(OSError, KeyError):  # it can do without
                record.write(lambda now: [replace(now.runs[run_id], usage=usage)], is_synced=False)


def main() -> int:
    """Take tasks, as the ticket says that is the argument."""
    ticket = json.loads(sys.argv[1])
    store = JobStore(Path(ticket["root"]))
    record = store.load_one(int(ticket["number"]))
    if record is None or record.trouble is not None:
        return 1
    try:
        environ, spec = store.environment_of(record.number), record.spec
        rules = rules_of_command(spec.on_granted, spec.notify, environ, spec.cwd)
    except (Failure, ValueError) as error:
        why = str(error)
        with contextlib.suppress(OSError):  # the keeper requests again, and it is written then
            record.write(lambda now: closed(now, time.time(), JobState.FAILED, why))
        return 1
    os.environ.clear()  # nothing else runs in this process yet
    os.environ.update(environ)
    try:
        asyncio.run(_run(store, record, ticket, rules))
    except Failure as failure:  # the lease is over: the keeper requests another
        log(f"job {record.number}: {failure}")
        return 1
    with contextlib.suppress(Failure):
        if store.live_numbers():  # without a keeper they would stand still until the next command
            wake_keeper(store)
    return 0
