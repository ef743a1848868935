"""A client for programs of this machine: for `gpu-pool run`, submitted jobs, batches and executors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Final, Self

from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.request import Holder
from gpu_worker_pool.errors import PoolError, StaleAssignmentError
from gpu_worker_pool.models import Assignment

from .endpoints.endpoint import Endpoint
from .events import ClientEvent, Hook, Tally, call_hook, log_event
from .inherited_lease import VISIBLE_DEVICES_VARIABLE, InheritedLease
from .local_servers import LocalServers, NoServerAnswersError, find_servers, why_elsewhere
from .options import RequestWishes
from .started_client import OnAssignment, StartedClient

UNLIMITED_S: Final = 1e9
# How long the others are waited for when one server has answered. Where it need not be known how many GPUs there are, they
# join when they answer, and servers of this machine have no network in between.
_GRACE_S: Final = 1.0
_SHORT_GRACE_S: Final = 0.05
# How soon to look again whether a server answers.
_LOOK_S: Final = 2.0


class LocalClient:
    """Requests GPUs of this machine: of the lease around this process where it is given one, else of the servers. It is used in
    one event loop. `on_note` is told what is left out, and what is odd about the environment with `on_warning`.
    """

    def __init__(
        self,
        config: ClientConfig,
        environ: Mapping[str, str],
        *,
        lease: InheritedLease | None = None,
        is_remote: bool = False,
        counts_gpus: bool = False,
        on_event: Hook | None = None,
        on_lost: OnAssignment | None = None,
        on_ending: OnAssignment | None = None,
        on_note: Callable[[str], None] = lambda _: None,
        on_warning: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config = config if is_remote else replace(config, scope=config.scope or "box")
        self._environ = environ
        self._lease, self._is_remote = lease, is_remote
        self._waits_for_late = counts_gpus or is_remote or VISIBLE_DEVICES_VARIABLE in environ
        self._on_event, self._on_lost, self._on_ending = on_event, on_lost, on_ending
        self._on_note, self._on_warning = on_note, on_warning
        self._noted: set[str] = set()
        self._servers: LocalServers | None = None
        self._client: StartedClient | None = None
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def servers(self) -> LocalServers:
        """What the servers have shown at the start."""
        assert self._servers is not None  # noqa: S101 - it is started, and not inside a lease
        return self._servers

    async def start(self, within_s: float = 0.0) -> int:
        """Find the servers; how many GPUs may be requested. `within_s`: how long to wait for a server. Harmless if repeated.
        NoServerAnswersError; NoGpuHereError where none of the GPUs can be used here.
        """
        async with self._starting:
            if self._client is None:
                client = StartedClient(
                    self.config,
                    Tally(),
                    tell=self._tell,
                    on_lost=self._on_lost,
                    on_ending=self._on_ending,
                    lease=self._lease,
                    why_not=self._why_not,
                )
                try:
                    if self._lease is None:  # which needs no server
                        self._servers = await self._find(client, within_s)
                except BaseException:
                    await client.stop()
                    raise
                self._client = client
        return len(self._lease.gpus) if self._lease is not None else self.servers.gpu_count

    async def _find(self, client: StartedClient, within_s: float) -> LocalServers:
        places, give_up_at, change = client.places, monotonic() + within_s, asyncio.Event()
        grace_s = _GRACE_S if self._waits_for_late else _SHORT_GRACE_S
        await client.start(self.config.endpoint_timeout, grace_s)
        with places.watched(change.set):
            while True:
                change.clear()
                try:
                    found = find_servers(places.endpoints.values(), self._environ, is_remote=self._is_remote)
                except NoServerAnswersError as error:
                    if error.is_final or (left_s := give_up_at - monotonic()) <= 0:
                        raise
                    with suppress(TimeoutError):
                        async with asyncio.timeout(min(left_s, _LOOK_S)):
                            await change.wait()
                    continue
                for endpoint, why in found.left_out.items():
                    self._note(endpoint, why)
                for warning in found.warnings:
                    self._on_warning(warning)
                return found

    def _why_not(self, endpoint: Endpoint) -> str | None:
        why = None if self._is_remote else why_elsewhere(endpoint)
        if why is not None and self._servers is not None:
            self._note(endpoint.id, why)  # it has not answered before
        return why

    def _note(self, endpoint: str, why: str) -> None:
        if endpoint not in self._noted:
            self._noted.add(endpoint)
            self._on_note(f"{endpoint} is left out: {why}")

    async def request(
        self, timeout_s: float, wishes: RequestWishes, worker_id: str | None = None, holder: Holder | None = None
    ) -> Assignment:
        """Wait for GPUs; see `GPUWorkerPoolClient.request_gpu`. The `holder` is this process, that of `pid`, or another one, which
        may have no process.
        """
        assert self._client is not None  # noqa: S101 - it is started
        asked = wishes
        if self._servers is not None and self._servers.among is not None and wishes.get("nodes", 1) == 1:
            asked = {"among": self._servers.among, **wishes}
        return await self._client.request(timeout_s, asked, worker_id, holder)

    async def release(self, assignment: Assignment, note: str | None = None) -> None:
        """Release GPUs, with how their use ended. What was lost needs no release."""
        if self._client is not None:
            with suppress(StaleAssignmentError, ValueError):
                await self._client.release(assignment, note)

    def let_go(self, assignment: Assignment) -> None:
        """Leave a lease to another process, which keeps it alive and releases it."""
        if self._client is not None:
            with suppress(ValueError, PoolError):  # it is lost by now
                self._client.let_go(assignment)

    async def stop(self) -> None:
        """Release all, and stop."""
        client, self._client = self._client, None
        if client is not None:
            await client.stop()

    def _tell(self, event: ClientEvent) -> None:
        log_event(event)
        call_hook("on_event", self._on_event, event)


async def find_local_servers(config: ClientConfig, environ: Mapping[str, str], *, is_remote: bool) -> LocalServers:
    """What the servers of this machine show. Raises what `LocalClient.start` does."""
    async with LocalClient(config, environ, is_remote=is_remote, counts_gpus=True) as client:
        return client.servers
