"""The servers that jobs request their GPUs from: one client for all jobs with the same settings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from gpu_worker_pool.cli.pools.servers import NobodyAnswered, Servers
from gpu_worker_pool.cli.run.sources import Sources, find_sources
from gpu_worker_pool.client.events import ClientEvent
from gpu_worker_pool.client.pool_client import GPUWorkerPoolClient
from gpu_worker_pool.config import PLURAL_VARIABLES, SINGULAR_VARIABLE
from gpu_worker_pool.host.backoff import Backoff

from .job_spec import JobSpec

# What a client reads of its environment, and what chooses the GPUs that may be asked for.
_SETTINGS: Final = ("GPU_", "CUDA_VISIBLE_DEVICES", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "HOME")
_UNUSED_S: Final = 60.0
_ASK_AGAIN: Final = Backoff(first_s=0.25, max_s=5.0)


@contextmanager
def environment_of(environ: Mapping[str, str]) -> Iterator[None]:
    """Let what is made inside this block find these settings, and not those of this process. Nothing may be awaited in it."""
    before = dict(os.environ)
    own = {name: value for name, value in before.items() if not name.startswith(_SETTINGS)}
    os.environ.clear()
    os.environ.update({**own, **settings_in(environ)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_SETTINGS)}


@dataclass(eq=False)
class JobPool:
    """The servers of some jobs. Requests enter the queue one after the other: `gate` keeps their order."""

    endpoints: list[str] | None
    is_remote: bool
    environ: Mapping[str, str]
    say: Callable[[str], None]
    gate: asyncio.Lock
    sources: Sources | None = None
    client: GPUWorkerPoolClient | None = None
    # Why there is no client yet.
    trouble: str | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    _on_queued: dict[str, Callable[[ClientEvent], None]] = field(default_factory=dict)
    _next: Callable[[ClientEvent], None] | None = None

    async def open(self) -> tuple[GPUWorkerPoolClient, Sources]:
        """Find the servers and start the client; waits for as long as none answers. Failure where waiting will not help."""
        async with self._opening:
            attempt = 0
            while self.client is None or self.sources is None:
                try:
                    await self._open()
                except NobodyAnswered as error:
                    if error.is_reached:
                        raise
                    if self.trouble is None:
                        self.say(str(error))
                    self.trouble = str(error)
                    await asyncio.sleep(_ASK_AGAIN.delay_s(min(attempt, 16), jitter=0.5))
                    attempt += 1
            self.trouble = None
            return self.client, self.sources

    async def _open(self) -> None:
        with environment_of(self.environ):
            servers = Servers(self.endpoints)
        async with servers:
            sources = await find_sources(servers, self.environ, is_remote=self.is_remote, warn=self.say, note=self.say)
        with environment_of(self.environ):
            client = sources.client(self._note)
        await client.start()
        self.client, self.sources = client, sources

    def servers(self) -> Servers:
        """For calls beside the client's."""
        with environment_of(self.environ):
            return Servers(self.endpoints) if self.sources is None else self.sources.servers()

    def expect(self, on_queued: Callable[[ClientEvent], None]) -> None:
        """Call this with the event by which the next request waits in a queue."""
        self._next = on_queued

    def _note(self, event: ClientEvent) -> None:
        if event.kind == "requested" and self._next is not None:
            self._on_queued[event.worker_id], self._next = self._next, None
        elif event.kind == "waiting" and event.worker_id in self._on_queued:
            self._on_queued[event.worker_id](event)
        elif event.kind in {"assigned", "timed_out", "failed"}:
            self._on_queued.pop(event.worker_id, None)

    async def close(self) -> None:
        if self.client is not None:
            client, self.client = self.client, None
            await client.stop()


class JobPools:
    """All pools of a keeper, by the settings of the jobs that use them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._pools: dict[object, JobPool] = {}
        # By the servers: jobs with other settings keep their order there, too.
        self._gates: dict[object, asyncio.Lock] = {}
        self._unused_since: dict[JobPool, float] = {}

    def of(self, spec: JobSpec, environ: Mapping[str, str]) -> JobPool:
        key = (spec.endpoints, spec.is_remote, tuple(sorted(settings_in(environ).items())))
        if key not in self._pools:
            endpoints = None if spec.endpoints is None else list(spec.endpoints)
            named = spec.endpoints or tuple(environ.get(name, "") for name in (*PLURAL_VARIABLES, SINGULAR_VARIABLE))
            gate = self._gates.setdefault(named, asyncio.Lock())
            self._pools[key] = JobPool(endpoints, spec.is_remote, environ, self._say, gate)
        return self._pools[key]

    async def close_unused(self, used: Collection[JobPool], now: float) -> None:
        """Stop the clients that no job has used for a while: each polls its servers."""
        for pool in self._pools.values():
            if pool in used or pool.client is None:
                self._unused_since.pop(pool, None)
            elif now - self._unused_since.setdefault(pool, now) >= _UNUSED_S:
                await pool.close()

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()
