"""How a submission waits for GPUs: a client for all jobs with the same settings, a process for each request, and the start
of a supervisor on what is granted.

While a job waits, the holder of its request is a shell that reads one line: a fifth of a megabyte. When the job has its
GPUs, that shell becomes the guard, as the same process, and the guard starts the supervisor. So 200 waiting jobs are
cheap, and the lease of a job ends with its own guard and with no other process.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.client.acquire.acquisition import ONE_TRY_S
from gpu_worker_pool.client.events import ClientEvent
from gpu_worker_pool.client.inherited_lease import VISIBLE_DEVICES_VARIABLE
from gpu_worker_pool.client.local_client import UNLIMITED_S, LocalClient
from gpu_worker_pool.client.options import RequestWishes
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.errors import RequestRefusedError
from gpu_worker_pool.failure import TIMED_OUT, Failure
from gpu_worker_pool.host.guarded import guard_program
from gpu_worker_pool.host.processes import Machine
from gpu_worker_pool.models import Assignment
from gpu_worker_pool.urls import split_endpoints

from .job_record import JobRecord
from .job_spec import JobSpec
from .job_store import JobStore
from .leases import acquire

_SHELL: Final = "/bin/sh"
# Its standard input closes when the keeper dies: the shell ends then, and with it the request. The line is the ticket of the
# supervisor: which submission, and on what.
_WAIT: Final = 'read -r ticket && exec "$0" "$@" "$ticket"'
_SUPERVISOR: Final = (
    sys.executable,
    "-P",
    "-c",
    "import sys; sys.path.append(sys.argv.pop(1)); from gpu_worker_pool.jobs.supervisor import main; sys.exit(main())",
    str(Path(__file__).parents[2]),
)


class JobPool:
    """The servers of some jobs. Requests enter the queue one after the other: `gate` keeps their order."""

    def __init__(self, config: ClientConfig, *, is_remote: bool) -> None:
        self.gate = asyncio.Lock()
        self.client = LocalClient(config, config.environ, is_remote=is_remote, on_event=self._hear)
        self._on_queued: dict[str, Callable[[], None]] = {}

    def expect(self, worker_id: str, on_queued: Callable[[], None]) -> None:
        """Call this when the request of this worker has its place in a queue."""
        self._on_queued[worker_id] = on_queued

    def _hear(self, event: ClientEvent) -> None:
        if event.kind != "requested" and (on_queued := self._on_queued.pop(event.worker_id, None)) is not None:
            on_queued()


class JobPools:
    """All pools of a keeper, by the settings that a client has."""

    def __init__(self) -> None:
        self._pools: dict[object, JobPool] = {}

    def of(self, spec: JobSpec, environ: Mapping[str, str]) -> JobPool:
        """Failure where the settings cannot be used."""
        config = config_of(spec, environ)
        # By what a client does with them: two jobs whose environments differ in anything else share one.
        used = ("GPU_POOL_SOCKET", "XDG_RUNTIME_DIR", VISIBLE_DEVICES_VARIABLE)
        key = repr((config, sorted(config.tokens.items()), spec.is_remote, [environ.get(name) for name in used]))
        return self._pools.setdefault(key, JobPool(config, is_remote=spec.is_remote))

    async def close_unused(self, used: set[JobPool]) -> None:
        """Stop the clients that no request uses: each polls its servers."""
        for key, pool in list(self._pools.items()):
            if pool not in used:
                del self._pools[key]
                await pool.client.stop()


def wishes_of(spec: JobSpec) -> RequestWishes:
    """What it asks for, as the client has it."""
    wishes: RequestWishes = {
        "gpus": spec.gpus,
        "memory_mb": spec.memory_mb,
        "model": spec.model,
        "priority": spec.priority,
        "labels": {"command": spec.label},
        "time_limit": spec.time_limit_s,
        "preemptible": spec.is_preemptible,
        "nodes": spec.nodes,
        "min_memory_mb": spec.min_memory_mb,
        "exclude": spec.exclude,
    }
    return wishes if spec.gpu_names is None else {**wishes, "among": spec.gpu_names}


def config_of(spec: JobSpec, environ: Mapping[str, str]) -> ClientConfig:
    """The settings of a client for this submission; Failure where they cannot be used."""
    urls = split_endpoints(list(spec.endpoints or ()))
    given: dict[str, Any] = (
        {"service_endpoints": urls} if len(urls) > 1 else {"service_endpoint": next(iter(urls), None)}
    )
    try:
        return ClientConfig.build(**given, environ=environ)
    except ValueError as error:
        raise Failure(str(error)) from None


@dataclass(eq=False)
class GpuWait:
    """One request, from its process to a supervisor that has taken its first task. `record` is the submission that gets
    what is granted: the keeper may change that while it waits.
    """

    store: JobStore
    record: JobRecord
    pool: JobPool | None
    on_granted: Callable[[GpuWait], None]
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    is_granted: bool = False
    made_at: float = field(default_factory=time.time)
    wishes: RequestWishes = field(init=False)
    _assignment: Assignment | None = None
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.wishes = wishes_of(self.record.spec)

    def is_like(self, other: GpuWait) -> bool:
        """Whether both ask for the same of the same servers, so that a grant may be used for either. One with a limit to its wait
        is like no other.
        """
        own, theirs = self.record.spec, other.record.spec
        is_same = self.pool is other.pool is not None and self.wishes == other.wishes
        return is_same and own.timeout_s is None is theirs.timeout_s and not own.runs_itself

    def write_name(self, **changes: Any) -> None:
        """Write down that the submission waits by this request."""
        self.record.write(lambda now: [replace(now.whole, requested_by=self.run_id, **changes)], is_synced=False)

    async def run(self, since: float) -> None:
        """Wait for the GPUs, which are wanted since then; start the supervisor, and wait until it is gone. Failure where they
        cannot be had, OSError where no process can be started; returns early where the process that waits was killed.
        """
        try:
            if self.pool is None:
                self._spawn()
            else:
                self._assignment = await self._acquire(self.pool, since)
                if self._assignment is None:
                    return
                self.on_granted(self)
            self.is_granted = True
            self._start()
            if self._assignment is not None and getattr(self._assignment.lost, "is_local", False):
                self.let_go()  # else it is renewed here until the supervisor says that it has it
            await until_gone(ProcessId(self.pid))
            self.let_go()
        finally:
            await self._end()

    def let_go(self) -> None:
        """Leave the lease to the supervisor."""
        assignment, self._assignment = self._assignment, None
        if assignment is not None and self.pool is not None:
            self.pool.client.let_go(assignment)

    async def _acquire(self, pool: JobPool, since: float) -> Assignment | None:
        """None where the process that was to hold the lease was killed."""
        spec, queued = self.record.spec, asyncio.Event()

        def left_s() -> float:
            return UNLIMITED_S if spec.timeout_s is None else max(spec.timeout_s - (time.time() - since), 0.0)

        try:
            async with asyncio.timeout(max(left_s(), ONE_TRY_S)):
                await pool.gate.acquire()
        except TimeoutError:
            raise Failure("no GPU within --timeout: others were before it", TIMED_OUT) from None
        acquiring: asyncio.Task[Assignment] | None = None
        try:
            try:
                labels = {"command": spec.label, "job": str(self.record.number)}
                wishes: RequestWishes = {**self.wishes, "labels": labels, "pid": self._spawn().pid}
                pool.expect(self.run_id, queued.set)
                acquiring = asyncio.create_task(
                    acquire(pool.client, wishes, left_s(), self.run_id, waits_for_server=True)
                )
                acquiring.add_done_callback(lambda _: queued.set())
                await queued.wait()
            finally:
                # The next request may enter the queue, behind this one.
                pool.gate.release()
            return await acquiring
        except RequestRefusedError:
            if self._process is not None and self._process.poll() is not None:
                return None  # a server refuses a holder that is dead
            raise
        except ValueError as error:
            raise Failure(str(error)) from None
        finally:
            if acquiring is not None and not acquiring.done():
                acquiring.cancel()
                await asyncio.wait([acquiring])

    # --- the process ---------------------------------------------------------------------------------------------------

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Start the process that becomes the guard; OSError where that cannot be done."""
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [_SHELL, "-c", _WAIT, *guard_program(), "--supervise", *_SUPERVISOR],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Its own folder may be deleted, and its session is not that of any terminal.
            cwd="/",
            start_new_session=True,
        )
        return self._process

    @property
    def pid(self) -> int:
        """The process that waits, and becomes the guard."""
        assert self._process is not None  # noqa: S101 - by `run`
        return self._process.pid

    def _start(self) -> None:
        """Have the waiting process become the guard, whose supervisor takes tasks."""
        assert self._process is not None  # noqa: S101 - by `run`
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        ticket = {"root": str(self.store.root), "number": self.record.number, "run": self.run_id}
        if self._assignment is not None:
            ticket |= {"lease_id": self._assignment.lease_id, "url": self._assignment.server_url}
        with suppress(OSError):  # it was killed
            os.write(self._process.stdin.fileno(), f"{json.dumps(ticket)}\n".encode())

    async def _end(self) -> None:
        """End the process while it waits; one that has become a guard goes on."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            if not self.is_granted:
                self._process.kill()
                await until_gone(ProcessId(self._process.pid))
            self._process.poll()


async def until_gone(*processes: ProcessId) -> None:
    """Wait for the end of these processes, without a look at them now and then."""
    loop, machine = asyncio.get_running_loop(), Machine.here()
    for process in processes:
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            continue  # it is gone
        has_ended = asyncio.Event()
        loop.add_reader(descriptor, has_ended.set)
        try:
            if machine.is_alive(process):
                await has_ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
