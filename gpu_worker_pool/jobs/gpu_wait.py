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
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.client.acquire.acquisition import ONE_TRY_S
from gpu_worker_pool.client.asking import make_request
from gpu_worker_pool.client.events import ClientEvent, Tally
from gpu_worker_pool.client.started_client import StartedClient
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.errors import PoolError, RequestRefusedError, WorkerTimeoutError
from gpu_worker_pool.failure import TIMED_OUT, Failure
from gpu_worker_pool.host.guarded import guard_program
from gpu_worker_pool.models import Assignment

from .job_spec import JobSpec
from .job_store import JobRecord, JobStore

_SHELL: Final = "/bin/sh"
# Its standard input closes when the keeper dies: the shell ends then, and with it the request.
_WAIT: Final = 'read -r _ && exec "$0" "$@"'
_SUPERVISOR: Final = (
    "import sys; sys.path.append(sys.argv.pop(1)); from gpu_worker_pool.jobs.adopt import main; sys.exit(main())"
)
_UNLIMITED_S: Final = 1e9
_UNUSED_S: Final = 60.0


def supervisor_program(ticket: Path) -> list[str]:
    """The supervisor of a submission; `ticket` says which, and on what."""
    folder = str(Path(__file__).parents[2])
    return [sys.executable, "-P", "-c", _SUPERVISOR, folder, str(ticket)]


@dataclass(eq=False)
class JobPool:
    """The servers of some jobs. Requests enter the queue one after the other: `gate` keeps their order."""

    config: ClientConfig
    gate: asyncio.Lock = field(default_factory=asyncio.Lock)
    client: StartedClient | None = None
    unused_since: float = 0.0
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    _on_queued: dict[str, Callable[[], None]] = field(default_factory=dict)

    async def open(self) -> StartedClient:
        async with self._opening:
            if self.client is None:
                client = StartedClient(self.config, Tally(), tell=self._hear, on_lost=None, on_ending=None)
                await client.start(waits_for_late=False)
                self.client = client
            return self.client

    def expect(self, worker_id: str, on_queued: Callable[[], None]) -> None:
        """Call this when the request of this worker has its place in a queue."""
        self._on_queued[worker_id] = on_queued

    def _hear(self, event: ClientEvent) -> None:
        if event.kind != "requested" and (on_queued := self._on_queued.pop(event.worker_id, None)) is not None:
            on_queued()

    async def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            await client.stop()


class JobPools:
    """All pools of a keeper, by the settings that a client has."""

    def __init__(self) -> None:
        self._pools: dict[object, JobPool] = {}

    def of(self, spec: JobSpec, environ: Mapping[str, str]) -> JobPool:
        """Failure where the settings cannot be used."""
        config = config_of(spec, environ)
        # By what a client does with them: two jobs whose environments differ in anything else share one.
        socket = tuple(environ.get(name) for name in ("GPU_POOL_SOCKET", "XDG_RUNTIME_DIR"))
        key = repr((config, sorted(config.tokens.items()), socket))
        pool = self._pools.setdefault(key, JobPool(config))
        pool.unused_since = time.monotonic()
        return pool

    async def close_unused(self, used: set[JobPool]) -> None:
        """Stop the clients that no job has used for a while: each polls its servers."""
        now = time.monotonic()
        for key, pool in list(self._pools.items()):
            if pool in used:
                pool.unused_since = now
            elif now - pool.unused_since >= _UNUSED_S:
                del self._pools[key]
                await pool.close()

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()


def config_of(spec: JobSpec, environ: Mapping[str, str]) -> ClientConfig:
    """The settings of a client for this submission; Failure where they cannot be used."""
    given: dict[str, Any] = {}
    if spec.endpoints is not None:
        given = {"service_endpoints": spec.endpoints} if spec.is_multi else {"service_endpoint": spec.endpoints[0]}
    try:
        return ClientConfig.build(**given, scope=None if spec.is_remote else "box", environ=environ)
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
    # Set when the supervisor has the lease, by its own words.
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    _process: subprocess.Popen[bytes] | None = None

    def is_like(self, other: GpuWait) -> bool:
        """Whether both ask for the same of the same servers, so that a grant may be used for either."""
        return self.pool is other.pool is not None and self.record.spec.asks_like(other.record.spec)

    async def run(self, since: float) -> None:
        """Wait for the GPUs, which are wanted since then; start the supervisor, and wait until it is gone. Failure where they
        cannot be had, OSError where no process can be started; returns early where the process that waits was killed.
        """
        ticket = self.store.root / f".new-ticket-{self.run_id}"
        try:
            if self.pool is None:
                self._spawn(ticket)
                self.is_granted = True
                self._start(ticket, None)
                await until_gone(self.pid)
                return
            client = await self.pool.open()
            assignment = await self._acquire(client, ticket, since)
            if assignment is None:
                return
            self.on_granted(self)
            self.is_granted = True
            self._start(ticket, assignment)
            if not getattr(assignment.lost, "is_local", False):
                await self._until_opened()  # until then, it is renewed here
            with suppress(ValueError, PoolError):  # it may be lost by now
                client.let_go(assignment)
            await until_gone(self.pid)
        finally:
            ticket.unlink(missing_ok=True)
            await self._end()

    async def _until_opened(self) -> None:
        tasks = [asyncio.ensure_future(self.opened.wait()), asyncio.ensure_future(until_gone(self.pid))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _acquire(self, client: StartedClient, ticket: Path, since: float) -> Assignment | None:
        """None where the process that was to hold the lease was killed."""
        assert self.pool is not None  # noqa: S101 - by `run`
        spec, queued = self.record.spec, asyncio.Event()
        left_s = None if spec.timeout_s is None else max(spec.timeout_s - (time.time() - since), 0.0)
        try:
            async with asyncio.timeout(None if left_s is None else max(left_s, ONE_TRY_S)):
                await self.pool.gate.acquire()
        except TimeoutError:
            raise Failure("no GPU within --timeout: others were before it", TIMED_OUT) from None
        acquiring: asyncio.Task[Assignment] | None = None
        try:
            try:
                process = self._spawn(ticket)
                self.pool.expect(self.run_id, queued.set)
                acquiring = asyncio.create_task(self._request(client, process.pid, left_s))
                acquiring.add_done_callback(lambda _: queued.set())
                await queued.wait()
            finally:
                # The next request may enter the queue, behind this one.
                self.pool.gate.release()
            return await acquiring
        except RequestRefusedError:
            if self._process is not None and self._process.poll() is not None:
                return None  # a server refuses a holder that is dead
            raise
        except WorkerTimeoutError as error:
            why = error.reason or "no server has answered in that time"
            raise Failure(f"no GPU within --timeout: {why}", TIMED_OUT) from None
        except ValueError as error:
            raise Failure(str(error)) from None
        finally:
            if acquiring is not None and not acquiring.done():
                acquiring.cancel()
                await asyncio.wait([acquiring])

    def _request(self, client: StartedClient, pid: int, left_s: float | None) -> Coroutine[Any, Any, Assignment]:
        assert self.pool is not None  # noqa: S101 - by `run`
        spec = self.record.spec
        request = make_request(
            self.pool.config,
            self.run_id,
            {
                "gpus": spec.gpus,
                "memory_mb": spec.memory_mb,
                "model": spec.model,
                "among": spec.among,
                "priority": spec.priority,
                "labels": {"command": spec.label, "job": str(self.record.number)},
                "pid": pid,
                "time_limit": spec.time_limit_s,
                "preemptible": spec.is_preemptible,
            },
        )
        return client.request(os.urandom(16).hex(), request, _UNLIMITED_S if left_s is None else left_s)

    # --- the process ---------------------------------------------------------------------------------------------------

    def _spawn(self, ticket: Path) -> subprocess.Popen[bytes]:
        """Start the process that becomes the guard; OSError where that cannot be done."""
        program = [*guard_program(), "--supervise", *supervisor_program(ticket)]
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [_SHELL, "-c", _WAIT, *program],
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

    def _start(self, ticket: Path, assignment: Assignment | None) -> None:
        """Have the waiting process become the guard, whose supervisor takes tasks."""
        assert self._process is not None  # noqa: S101 - by `run`
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        facts = {"root": str(self.store.root), "number": self.record.number, "run": self.run_id}
        if assignment is not None:
            facts |= {"lease_id": assignment.lease_id, "url": assignment.server_url}
        ticket.touch(mode=0o600)
        ticket.write_text(json.dumps(facts), encoding="utf-8")
        with suppress(OSError):  # it was killed
            os.write(self._process.stdin.fileno(), b"go\n")

    async def _end(self) -> None:
        """End the process while it waits; one that has become a guard goes on."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            if not self.is_granted:
                self._process.kill()
                await until_gone(self._process.pid)
            self._process.poll()


async def until_gone(pid: int) -> None:
    """Wait for the end of a process, without a look at it now and then."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return  # it is gone
    loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
