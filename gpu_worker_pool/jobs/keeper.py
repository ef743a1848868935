"""The keeper: one small process for each user, which waits for GPUs for all submitted jobs, and starts their supervisors.

It has no terminal and no parent to end with. It may be killed at any moment: supervisors go on without it, and the journals of
the jobs say what the next keeper has to know. So it has no way to stop of its own, except that it ends when there is nothing
to do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.errors import PoolError, RequestRefusedError
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.processes import Machine
from gpu_worker_pool.notify.rules import rules_of_command
from gpu_worker_pool.notify.sender import Sender

from .gpu_wait import GpuWait, JobPools, until_gone, wishes_of
from .job_record import JobRecord
from .job_store import JobStore, kept_s
from .keeper_process import FACTS_FILE, listen, log
from .notices import FINISH_S, CommandNotices
from .submission import JobState, Run, abandoned, cancelled, closed, make_plan

# How long a keeper without jobs stays: another job is often submitted soon.
IDLE_S: Final = 10.0
_LOOK_S: Final = 1.0
_CLEAN_S: Final = 3600.0
# A supervisor that ends before it has begun may do so again.
_MOST_FALSE_STARTS: Final = 3
_AGAIN_S: Final = 1.0
_SET_ASIDE_S: Final = 10.0
# How long a server may take to let a request go, before other jobs are looked after.
_WITHDRAW_S: Final = 1.0


class Keeper:
    """Keeps the jobs of one folder, until none is left that waits or runs; one that `stays`, for ever."""

    def __init__(self, store: JobStore, environ: Mapping[str, str], *, stays: bool = False) -> None:
        self._store = store
        self._kept_s = kept_s(environ)
        self._stays = stays
        self._machine = Machine.here()
        self._records: dict[int, JobRecord] = {}
        self._waits: dict[GpuWait, asyncio.Task[None]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._pools = JobPools()
        self._sender = Sender(boot_time)
        self._false_starts: Counter[int] = Counter()
        # Submissions that cannot be written, and until when each is left alone.
        self._set_aside: dict[int, float] = {}
        self.changed = asyncio.Event()
        self._pokes: list[asyncio.Event] = []
        self._withdrawn: list[asyncio.Task[None]] = []
        self._busy_at = time.monotonic()
        self._cleaned_at: float | None = None

    async def run(self) -> None:
        """Run until there is nothing to do."""
        while not self._is_done():
            pokes, self._pokes = self._pokes, []
            self._step()
            if self._withdrawn:
                withdrawn, self._withdrawn = self._withdrawn, []
                await asyncio.wait(withdrawn, timeout=_WITHDRAW_S)
            for poke in pokes:
                poke.set()
            await self._pools.close_unused({wait.pool for wait in self._waits if wait.pool is not None})
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self.changed.wait()
            self.changed.clear()
        await self._sender.finish(FINISH_S)
        await self._pools.close_unused(set())

    async def poke(self) -> None:
        """Look at the files of the jobs now; returns when that is done, and requests that are not needed are withdrawn."""
        self._pokes.append(poke := asyncio.Event())
        self.changed.set()
        await poke.wait()

    def _is_done(self) -> bool:
        """Whether the keeper may end: nothing waits or runs, and has not for a while; or its folder is gone."""
        if not self._store.root.is_dir():
            return True
        open_runs = {id_ for record in self._records.values() for id_ in record.submission.open_runs}
        self._watches = {id_: watch for id_, watch in self._watches.items() if id_ in open_runs or not watch.done()}
        if self._waits or self._watches or len(self._sender) or self._store.live_numbers():
            self._busy_at = time.monotonic()
        return not self._stays and time.monotonic() - self._busy_at >= IDLE_S

    def _step(self) -> None:
        """Take in what happened; then do what the plan says. One submission that cannot be read or written stops no other."""
        self._take_in()
        for record in list(self._records.values()):
            self._deal(record, self._look_after)
        self._withdraw(self._outdated())
        submissions = {number: record.submission for number, record in self._records.items()}
        waiting = Counter(wait.record.number for wait in self._waits if not wait.is_granted)
        plan = make_plan(submissions, waiting, self._starting(), time.time())
        for number, why in plan.skip.items():
            self._deal(self._records[number], partial(self._close, becomes=JobState.SKIPPED, why=why))
        self._withdraw(plan.withdraw)
        for number in plan.request:
            self._deal(self._records[number], self._request)
        if self._cleaned_at is None or time.monotonic() - self._cleaned_at >= _CLEAN_S:
            self._cleaned_at = time.monotonic()
            self._forget_old()

    def _withdraw(self, numbers: Collection[int]) -> None:
        for wait, task in self._waits.items():
            if wait.record.number in numbers and not wait.is_granted and not task.cancelling():
                task.cancel()
                self._withdrawn.append(task)

    def _take_in(self) -> None:
        """Read what is new, and what it comes after; drop what is over, unless another one comes after it."""
        unread = set(self._store.live_numbers()) - self._records.keys()
        while unread:
            found = self._store.load(sorted(unread))
            self._records |= found
            after = {key.number for record in found.values() for key in record.spec.after_keys}
            unread = after - self._records.keys() - unread
        needed: set[int] = set()
        for record in list(self._records.values()):
            record.refresh()
            if record.is_cut and (again := self._store.load_one(record.number)) is not None:
                # What it says now counts: whether it ran is seen by its log.
                record = self._records[record.number] = again  # noqa: PLW2901
            if not record.submission.is_over:
                needed |= {record.number, *(key.number for key in record.spec.after_keys)}
        for number in [number for number in self._records if number not in needed]:
            record = self._records[number]
            if not record.submission.open_runs:
                self._store.note_over(self._records.pop(number))
        self._records = dict(sorted(self._records.items()))

    def _deal(self, record: JobRecord, deal: Callable[[JobRecord], None]) -> None:
        """Do this for a submission; one that cannot be written is left alone for a while."""
        if time.monotonic() < self._set_aside.get(record.number, 0.0):
            return
        try:
            deal(record)
        except OSError as error:
            log(f"job {record.number} cannot be written down: {error.strerror or error}; trying again")
            self._set_aside[record.number] = time.monotonic() + _SET_ASIDE_S
        else:
            if self._set_aside.pop(record.number, None) is not None:
                log(f"job {record.number} can be written down again")

    def _look_after(self, record: JobRecord) -> None:
        """Watch the supervisors of a submission; end a batch whose command is gone."""
        submission = record.submission
        for run in list(submission.open_runs.values()):
            for wait in self._waits:
                if wait.run_id == run.id:
                    wait.let_go()
            if run.id not in self._watches:
                self._watches[run.id] = asyncio.create_task(self._watch(run))
            elif self._watches[run.id].done() and record.trouble is None:
                self._abandon(record, run)
        batch = record.spec.batch
        if batch is None or submission.is_over or record.trouble is not None:
            return
        is_followed = batch.boot_id == self._machine.boot_id and self._machine.is_alive(
            ProcessId(batch.pid, batch.pid_started)
        )
        if not is_followed and record.write(lambda now: cancelled(now, time.time(), now.spec.indices)):
            tell_runs(record)

    def _outdated(self) -> set[int]:
        """Submissions whose requests are not as they should be any more: others are made, at the end of the queue."""
        first = [record.submission for record in self._records.values() if record.submission.whole.first_at]
        return {
            wait.record.number
            for wait in self._waits
            if wait.wishes != wishes_of(wait.record.spec)
            or wait.record.submission.whole.yielded_at > wait.made_at
            or any(one.whole.first_at > wait.made_at and one.order < wait.record.submission.order for one in first)
        }

    # --- supervisors ---------------------------------------------------------------------------------------------------

    async def _watch(self, run: Run) -> None:
        """Wait for the end of a supervisor and its guard."""
        if self._is_here(run):
            await until_gone(run.guard, run.supervisor)
        self.changed.set()

    def _is_here(self, run: Run) -> bool:
        return run.boot_id == self._machine.boot_id and run.pid_namespace == self._machine.pid_namespace

    def _abandon(self, record: JobRecord, run: Run) -> None:
        """Write down what a supervisor that is gone has not."""
        is_same_boot = run.boot_id == self._machine.boot_id
        ended = record.write(
            lambda now: abandoned(now, run, time.time(), is_same_boot=is_same_boot) if run.id in now.open_runs else []
        )
        if ended and self._is_here(run):
            log(f"job {record.number}: a supervisor (pid {run.pid}) was killed; {len(ended) - 1} tasks of it ran")

    def _starting(self) -> Counter[int]:
        """How many supervisors have GPUs, and have not begun."""
        granted = (wait for wait in self._waits if wait.is_granted)
        return Counter(wait.record.number for wait in granted if wait.run_id not in wait.record.submission.runs)

    # --- requests ------------------------------------------------------------------------------------------------------

    def _request(self, record: JobRecord) -> None:
        """Request GPUs for the next task of a submission."""
        try:
            environ = self._store.environment_of(record.number)
            pool = None if record.spec.runs_itself else self._pools.of(record.spec, environ)
        except Failure as failure:
            self._close(record, JobState.FAILED, str(failure))
            return
        wait = GpuWait(self._store, record, pool, self._put_in_order)
        since = record.submission.requested_at or time.time()
        wait.write_name(requested_at=since)
        self._waits[wait] = asyncio.create_task(self._wait(wait, since))

    def _put_in_order(self, granted: GpuWait) -> None:
        """Let the submission have this grant that comes first of those that ask for the same; the other one waits in its
        stead. So a job that had to be requested again loses nothing but its GPU.
        """
        alike = [wait for wait in self._waits if not wait.is_granted and wait.is_like(granted)]
        first = min(alike, key=lambda wait: wait.record.submission.order, default=granted)
        first.record, granted.record = granted.record, first.record
        if first.record is not granted.record:
            first.write_name()
            granted.write_name()
        self.changed.set()  # the next task of the submission may be requested

    async def _wait(self, wait: GpuWait, since: float) -> None:
        """Follow a request to the end of its supervisor."""
        try:
            await wait.run(since)
        except RequestRefusedError as error:
            await self._fail(wait, JobState.CANCELLED if error.was_ended else JobState.FAILED, error)
        except (Failure, PoolError) as error:
            await self._fail(wait, JobState.FAILED, error)
        except OSError as error:
            # A machine that can start no process now can later.
            log(f"no process can be started for job {wait.record.number}: {error.strerror}; trying again")
            await asyncio.sleep(_AGAIN_S)
        except Exception as error:  # noqa: BLE001 - one job must not end the others
            log(f"job {wait.record.number}: {type(error).__name__}: {error}")
            await self._fail(wait, JobState.FAILED, Failure(f"the keeper failed: {type(error).__name__}: {error}"))
        else:
            await self._check_start(wait)
        finally:
            del self._waits[wait]
            self.changed.set()

    async def _check_start(self, wait: GpuWait) -> None:
        number = wait.record.number
        wait.record.refresh()
        if not wait.is_granted or wait.run_id in wait.record.submission.runs or not wait.record.submission.waiting:
            self._false_starts.pop(number, None)
            return
        self._false_starts[number] += 1
        if self._false_starts[number] >= _MOST_FALSE_STARTS:
            why = f"its supervisor ended {_MOST_FALSE_STARTS} times before it began; see {self._store.root / 'keeper.log'}"
            await self._fail(wait, JobState.FAILED, Failure(why))
        else:
            await asyncio.sleep(_AGAIN_S)

    async def _fail(self, wait: GpuWait, becomes: JobState, error: Exception) -> None:
        """Nothing of it that waits will run, unless another supervisor of it runs."""
        if wait.record.submission.open_runs:
            await asyncio.sleep(_AGAIN_S)
            return
        code = error.code if isinstance(error, Failure) else None
        with suppress(OSError):
            self._close(wait.record, becomes, str(error), code)

    def _close(self, record: JobRecord, becomes: JobState, why: str, code: int | None = None) -> None:
        """Let what waits be over without a run, and tell that to those who are to be told."""
        spec = record.spec
        if not record.write(lambda now: closed(now, time.time(), becomes, why, code)) or not spec.notify:
            return
        try:
            rules = rules_of_command(None, spec.notify, self._store.environment_of(record.number), spec.cwd)
        except (Failure, ValueError) as error:
            log(f"job {record.number}: nobody is told of it: {error}")
            return
        notices = CommandNotices(lambda notice: self._sender.tell(notice, rules), spec.label, str(record.number))
        notices.ended(code, becomes, why)

    # --- the past ------------------------------------------------------------------------------------------------------

    def _forget_old(self) -> None:
        """Forget the submissions that have been over for longer than that, with no live one after them."""
        needed = {*self._records, *self._store.live_numbers()}
        for record in self._store.load(number for number in self._store.numbers() if number not in needed).values():
            ends = [task.ended_at for task in record.submission.tasks()]
            is_known = record.submission.is_over and all(at is not None for at in ends)
            if is_known and time.time() - max(at or 0.0 for at in ends) > self._kept_s:
                self._store.forget(record.number)


def tell_runs(record: JobRecord, number: int = signal.SIGUSR1, runs: Iterable[str] | None = None) -> list[int]:
    """Send the supervisors of a submission a signal, by default the one that has them look at the journal; the pids."""
    machine, told = Machine.here(), []
    for run in record.submission.open_runs.values():
        is_meant = runs is None or run.id in runs
        is_here = run.boot_id == machine.boot_id and run.pid_namespace == machine.pid_namespace
        if is_meant and is_here and machine.is_alive(run.supervisor):
            with suppress(ProcessLookupError):
                os.kill(run.pid, number)
                told.append(run.pid)
    return told


async def run_keeper(store: JobStore, *, stays: bool) -> None:
    """Be the keeper of this folder; see `become_keeper`."""
    keeper = Keeper(store, os.environ, stays=stays)
    server = await listen(store, keeper.poke)
    await keeper.run()
    server.close()
    (store.root / FACTS_FILE).unlink(missing_ok=True)
