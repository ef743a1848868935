"""The keeper: one small process for each user, which waits for GPUs for all submitted jobs, and runs them.

It has no terminal and no parent to end with. It may be killed at any moment: the files of the jobs and their guards say
what the next keeper has to know. So it has no way to stop of its own, except that it ends when there is nothing to do.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.cli.output import pass_on_warnings, plain
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.events import ending_text
from gpu_worker_pool.jobs.job_key import JobKey, parse_key
from gpu_worker_pool.jobs.life import (
    JobClosed,
    JobEvent,
    JobRequested,
    JobState,
    RunStarted,
    cancel,
    evolve,
    resumed,
    retry,
)
from gpu_worker_pool.jobs.plan import make_plan
from gpu_worker_pool.models import LeaseEnding
from gpu_worker_pool.wire.leases import LeaseList, LeaseView
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import read

from .history_limit import keep_s, numbers_to_forget
from .job_journal import sync_all
from .job_notices import JobNotices
from .job_pools import JobPool, JobPools
from .job_run import JobRun
from .job_store import JobRecord, JobStore
from .usage_meter import gpus_in

# How long a keeper without jobs stays: another job is often submitted soon.
IDLE_S: Final = 10.0
_LOOK_S: Final = 2.0
_CLEAN_S: Final = 3600.0
_WRITE_AGAIN_S: Final = 1.0
_NOTE_USAGE_S: Final = 30.0
_AT_ONCE: Final = 500
# Events that need not be on the disk at once: without them, a job is requested or measured again.
_NOT_SYNCED: Final = frozenset({"JobRequested", "UsageMeasured"})


class Keeper:
    """Keeps the jobs of one folder, until none is left that waits or runs; one that `stays`, for ever."""

    def __init__(self, store: JobStore, environ: Mapping[str, str], *, stays: bool = False) -> None:
        self._store = store
        self._stays = stays
        self._environ = environ
        self._records: dict[JobKey, JobRecord] = {}
        self._known: set[int] = set()
        self._runs: dict[JobKey, tuple[JobRun, asyncio.Task[None]]] = {}
        self._pools = JobPools(self.say)
        self._notices = JobNotices(store, self.say)
        self._changed = asyncio.Event()
        self._noted_usage_at: dict[JobKey, float] = {}
        self._busy_at = time.monotonic()
        self._cleaned_at: float | None = None

    @staticmethod
    def say(message: str) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError):  # a full disk must not end the keeper
            print(f"{when} {plain(message)}", file=sys.stderr, flush=True)  # noqa: T201 - the keeper's log

    async def run(self) -> None:
        """Run until there is nothing to do. `serve` takes the questions of commands."""
        pass_on_warnings(self.say)
        self._take_in_new()
        for record in list(self._records.values()):
            if record.life.state is JobState.RUNNING:
                self._begin(record, is_adopted=True)
        measuring = asyncio.create_task(self._measure())
        try:
            while not self._is_done():
                await self._step()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            await cancel_and_wait(measuring)
        await self._notices.close()
        await self._pools.close()

    def _is_done(self) -> bool:
        """Whether the keeper may end: nothing waits or runs, and has not for a while; or its folder is gone."""
        if not self._store.root.is_dir():
            return not self._runs
        if self._runs or len(self._notices) or any(not record.life.state.is_over for record in self._records.values()):
            self._busy_at = time.monotonic()
        return not self._stays and time.monotonic() - self._busy_at >= IDLE_S

    async def _step(self) -> None:
        """Take in what was submitted; skip and request what the plan says."""
        self._take_in_new()
        for record in self._records.values():
            if record.why_not_run is not None and record.life.state in {JobState.SUBMITTED, JobState.WAITING}:
                closed = JobClosed(at=time.time(), becomes=JobState.INTERRUPTED, why=record.why_not_run)
                await self.note(record, closed)
                record.why_not_run = record.trouble
        plan = make_plan({key: record.life for key, record in self._records.items()})
        for skipped in plan.skip:
            closed = JobClosed(at=time.time(), becomes=JobState.SKIPPED, why=skipped.why)
            await self.note(self._records[skipped.key], closed)
        for key in plan.request:
            record = self._records[key]
            if record.life.state is JobState.SUBMITTED and key not in self._runs:
                await self.note(record, JobRequested(at=time.time()))
                self._begin(record)
        await self._pools.close_unused({run.pool for run, _ in self._runs.values()}, time.monotonic())
        if self._cleaned_at is None or time.monotonic() - self._cleaned_at >= _CLEAN_S:
            self._cleaned_at = time.monotonic()
            self._forget_old()

    def _take_in_new(self) -> None:
        for number in self._store.numbers():
            if number not in self._known:
                self._known.add(number)
                for record in self._store.load_number(number):
                    record.life = resumed(record.life)
                    self._records[record.key] = record

    def _forget_old(self) -> None:
        lives = [record.life for record in self._records.values()]
        for number in numbers_to_forget(lives, time.time(), keep_s(self._environ)):
            self._store.forget(number)
            for key in [key for key in self._records if key.number == number]:
                del self._records[key]

    def _begin(self, record: JobRecord, *, is_adopted: bool = False) -> None:
        task = asyncio.create_task(self._run(record, is_adopted=is_adopted))
        task.add_done_callback(lambda _: self._changed.set())

    async def _run(self, record: JobRecord, *, is_adopted: bool) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is one
        if record.life.state.is_over:
            return  # it was cancelled before this began
        environ: dict[str, str] = {}
        try:
            environ = self._store.environment_of(record.key)
        except Failure as failure:
            if not is_adopted:
                await self.note(record, JobClosed(at=time.time(), becomes=JobState.FAILED, why=str(failure)))
                return
        pool = self._pools.of(record.spec, environ)
        run = JobRun(
            self._store,
            record,
            pool,
            environ,
            self.note,
            self._warn,
            self.say,
            self._put_in_order,
            is_granted=is_adopted,
        )
        self._runs[record.key] = run, task
        try:
            await (run.adopt() if is_adopted else run.attempt())
        except Exception as error:  # noqa: BLE001 - one job must not end the others
            self.say(f"job {run.record.key}: {type(error).__name__}: {error}")
            if run.record.life.state is JobState.WAITING:
                why = f"the keeper failed: {type(error).__name__}: {error}"
                await self.note(run.record, JobClosed(at=time.time(), becomes=JobState.FAILED, why=why))
        finally:
            del self._runs[run.record.key]

    def _put_in_order(self, granted: JobRun) -> None:
        """Let the job have this grant that comes first of those that ask for the same; the other one waits in its stead. So
        a job that had to be requested again loses nothing but its GPU.
        """
        alike = [
            run
            for run, _ in self._runs.values()
            if not run.is_granted and run.record.life.state is JobState.WAITING and run.is_like(granted)
        ]
        first = min(alike, key=lambda run: run.record.life.order, default=granted)
        if first is not granted:
            self._runs[first.record.key], self._runs[granted.record.key] = (
                self._runs[granted.record.key],
                self._runs[first.record.key],
            )
            first.record, granted.record = granted.record, first.record
            first.environ, granted.environ = granted.environ, first.environ

    async def note(self, record: JobRecord, event: JobEvent) -> None:
        """Write an event to the disk, however long that takes: nothing that follows from it happens before."""
        while True:
            try:
                self._write(record, event)
            except OSError as error:
                self.say(f"job {record.key} cannot be written down: {error.strerror}; trying again")
                await asyncio.sleep(_WRITE_AGAIN_S)
            else:
                return

    def _write(self, record: JobRecord, event: JobEvent, *, is_synced: bool = True) -> None:
        try:
            self._store.note(record, event, is_synced=is_synced and type(event).__name__ not in _NOT_SYNCED)
        except FileNotFoundError:
            # Its files were removed. What runs may end, but nothing is started that is not written down.
            if isinstance(event, RunStarted):
                raise Failure("its files were removed") from None
            record.life = evolve(record.life, event)
            return
        self._notices.tell(record, event)
        self._changed.set()

    def _warn(self, record: JobRecord, ending: LeaseEnding | None) -> None:
        self.say(f"job {record.key}: {ending_text(ending)}")
        self._notices.warn(record, ending)

    # --- questions of commands -----------------------------------------------------------------------------------------

    async def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        self._take_in_new()
        self._busy_at = time.monotonic()
        self._changed.set()
        match question.get("do"):
            case "look":
                return {"pid": os.getpid()}
            case "state":
                return {"waiting": await self._waiting()}
            case "cancel":
                return await self._cancel(self._meant(question.get("ids")))
            case "retry":
                return await self._retry(self._meant(question.get("ids")))
        return {
            "error": f"the keeper of the jobs does not know {question.get('do')!r}; it may be older: end it with kill {os.getpid()}, and repeat the command. Jobs go on"
        }

    def _meant(self, ids: object) -> list[JobRecord]:
        wanted = {parse_key(str(text)) for text in ids} if isinstance(ids, list) else set()
        return [record for key, record in self._records.items() if not wanted.isdisjoint({key, JobKey(key.number)})]

    async def _cancel(self, records: Sequence[JobRecord]) -> dict[str, Any]:
        """Cancel what waits, and end what runs. The last ones first, so that none of them starts meanwhile. Where nothing can be
        written, what runs is ended all the same.
        """
        done: dict[str, list[str]] = {"cancelled": [], "ending": [], "over": []}
        withdrawn: list[asyncio.Task[None]] = []
        trouble: str | None = None
        for number, record in enumerate(reversed(records), start=1):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)  # a command that comes meanwhile is answered
            event = cancel(record.life, time.time())
            is_running = record.life.state is JobState.RUNNING
            try:
                if event is not None:
                    self._write(record, event, is_synced=False)
            except OSError as error:
                if event is None or not is_running:
                    trouble = error.strerror
                    continue
                record.life, record.unwritten = evolve(record.life, event), event
            done["ending" if is_running else "over" if event is None else "cancelled"].append(str(record.key))
            if record.key in self._runs:
                run, task = self._runs[record.key]
                if record.life.state is JobState.RUNNING:
                    run.end()
                else:
                    task.cancel()
                    withdrawn.append(task)
        if withdrawn:
            await asyncio.wait(withdrawn, timeout=5.0)
        with suppress(FileNotFoundError):  # its folder was removed
            await asyncio.to_thread(sync_all, self._store.root)
        if trouble is not None:
            ended = f"; being ended: {', '.join(done['ending'])}" if done["ending"] else ""
            return {
                "error": f"no job that waits can be written down as cancelled: {trouble}; make room, and repeat it{ended}"
            }
        return {name: keys[::-1] for name, keys in done.items()}

    async def _retry(self, records: Iterable[JobRecord]) -> dict[str, Any]:
        done: dict[str, list[str]] = {"retried": [], "live": [], "unreadable": []}
        last_number = self._store.last_number()
        for record in records:
            event = retry(record.life, time.time(), last_number)
            kind = "unreadable" if record.trouble else "live" if event is None else "retried"
            done[kind].append(str(record.key))
            if event is not None and record.trouble is None:
                await self.note(record, event)
        return dict(done)

    async def _waiting(self) -> dict[str, Any]:
        """How each request waits, as its server says it."""
        found: dict[str, Any] = {}
        waiting = {key: run for key, (run, _) in self._runs.items() if run.record.life.state is JobState.WAITING}
        leases: dict[str, LeaseView] = {}
        troubles: dict[JobPool, str | None] = {}
        for pool in {run.pool for run in waiting.values()}:
            troubles[pool] = pool.trouble
            if pool.client is not None:
                found_leases, troubles[pool] = await _leases(pool)
                leases |= found_leases
        for key, run in waiting.items():
            event = run.queued
            lease = leases.get(event.lease_id) if event is not None else None
            # What the event says may be old: it counts only where all servers answer.
            reason = lease.reason if lease is not None else troubles[run.pool] or (event and event.detail)
            found[str(key)] = {
                "lease_id": None if event is None else event.lease_id,
                "position": None if lease is None else lease.position,
                "reason": reason,
                "expected_start_at": None if lease is None else lease.expected_start_at,
            }
        return found

    # --- usage ---------------------------------------------------------------------------------------------------------

    async def _measure(self) -> None:
        """Read the pools of running jobs again and again."""
        async with AsyncExitStack() as opened:
            watchers: dict[JobPool, Servers] = {}
            while True:
                await asyncio.sleep(_LOOK_S)
                running = [run for run, _ in self._runs.values() if run.record.life.state is JobState.RUNNING]
                for pool in {run.pool for run in running}:
                    if pool not in watchers:
                        try:
                            watchers[pool] = await opened.enter_async_context(pool.servers())
                        except Failure:
                            continue  # of a job that goes on and whose environment is gone, say
                    for answer in await watchers[pool].ask_all("/pool?queue=0&leases=0"):
                        if (seen := read(PoolView, answer.data)) is not None:
                            await self._take_in_usage([run for run in running if run.pool is pool], seen)

    async def _take_in_usage(self, runs: Iterable[JobRun], seen: PoolView) -> None:
        gpus, now = gpus_in(seen), time.monotonic()
        for run in runs:
            record = run.record
            lease, noted_at = record.life.lease, self._noted_usage_at.get(record.key, 0.0)
            if lease is None or record.life.state is not JobState.RUNNING:
                continue
            if run.meter.see(lease, gpus) and now - noted_at >= _NOTE_USAGE_S:
                self._noted_usage_at[record.key] = now
                await self.note(record, run.meter.measured(time.time()))


async def _leases(pool: JobPool) -> tuple[dict[str, LeaseView], str | None]:
    """The leases of all servers that answer, and which do not."""
    async with pool.servers() as servers:
        answers = await servers.ask_all("/leases")
    lists = [read(LeaseList, answer.data, clean=plain) for answer in answers if answer.is_ok]
    silent = "; ".join(f"{answer.endpoint} ({answer.url}): {answer.why_not}" for answer in answers if not answer.is_ok)
    who = "no server answers" if not lists else "not all servers answer"
    leases = {lease.id: lease for found in lists if found is not None for lease in found.leases}
    return leases, f"{who}: {silent}" if silent else None
