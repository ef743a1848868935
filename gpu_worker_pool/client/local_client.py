"""The servers whose GPUs are in this machine, for all that runs programs here, and a client for them: for `gpu-pool run`, submitted
jobs, batches and executors. GPU 2 of another machine is not ours.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final, NamedTuple, Self

from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.request import Holder
from gpu_worker_pool.errors import PoolError, RequestRefusedError, ServiceUnavailableError, StaleAssignmentError
from gpu_worker_pool.host.addresses import is_own_address
from gpu_worker_pool.host.clock import machine_fingerprint
from gpu_worker_pool.host.processes import ProcessTable
from gpu_worker_pool.host.visible_devices import InstalledGpu, select_visible
from gpu_worker_pool.models import Assignment
from gpu_worker_pool.urls import EndpointUrl
from gpu_worker_pool.wire.pool import PoolView

from .backends.server_leases import HOPELESS
from .endpoints.endpoint import Endpoint
from .events import Hook
from .guarded_lease import is_set_by_lease
from .inherited_lease import (
    LEASE_ID_VARIABLE,
    LEASE_URL_VARIABLE,
    VISIBLE_DEVICES_VARIABLE,
    InheritedLease,
    inherited_lease,
)
from .options import RequestWishes
from .started_client import OnAssignment, StartedClient

UNLIMITED_S: Final = 1e9
# How long the others are waited for when one server has answered. Where it need not be known how many GPUs there are, they
# join when they answer, and servers of this machine have no network in between.
_GRACE_S: Final = 1.0
_SHORT_GRACE_S: Final = 0.05
# How soon to look again whether a server answers.
_LOOK_S: Final = 2.0
_ELSEWHERE: Final = "its GPUs are in another machine, and the command runs on this one"
_OK: Final = 200


class NoAnswer(NamedTuple):
    """Why a server cannot be used now, with the status of its answer, if there was one."""

    endpoint: str
    url: EndpointUrl
    status: int | None
    error: str


class NoServerAnswersError(ServiceUnavailableError):
    """No server can be used now; the `answers` say why."""

    def __init__(self, answers: Sequence[NoAnswer]) -> None:
        super().__init__({answer.endpoint: answer.error for answer in answers})
        self.answers = tuple(answers)

    @property
    def is_final(self) -> bool:
        """Whether all were reached, so that waiting will not help."""
        return all(answer.status is not None for answer in self.answers)


class NoGpuHereError(RequestRefusedError):
    """Programs on this machine can have no GPU of these servers; the message says why, and what to do."""

    def __init__(self, why: str) -> None:
        super().__init__({"this machine": why})
        PoolError.__init__(self, why)


class NoServerHereError(NoGpuHereError):
    """All servers are on other machines."""


@dataclass(frozen=True)
class LocalServers:
    """The servers that are used, as far as they have shown their GPUs. `among`: the UUIDs of the GPUs that may be requested;
    None: all. `left_out` says why, by endpoint. `unheard` are used once they answer.
    """

    pools: tuple[PoolView, ...]
    among: tuple[str, ...] | None
    left_out: Mapping[str, str]
    warnings: tuple[str, ...]
    unheard: frozenset[str]

    @property
    def gpu_count(self) -> int:
        """How many GPUs may be requested."""
        return sum(len(pool.gpus) for pool in self.pools) if self.among is None else len(self.among)


def why_elsewhere(endpoint: Endpoint) -> str | None:
    """Why the GPUs of a server cannot be used by programs of this machine; None if they can."""
    view = endpoint.seen.view
    # In a fleet the leader answers, which may be on another machine. A server that does not name its machine is judged by
    # its address.
    if view is not None and view.machine is not None and view.fleet is None:
        return None if view.machine == machine_fingerprint() else _ELSEWHERE
    return None if is_own_address(endpoint.url.host) else _ELSEWHERE


def find_servers(endpoints: Iterable[Endpoint], environ: Mapping[str, str], *, is_remote: bool) -> LocalServers:
    """What endpoints that were polled have shown; a command that `is_remote` finds its own way to the GPU, and all are used.

    NoServerAnswersError; NoGpuHereError where none of the GPUs can be used here.
    """
    used, left_out, silent = [], dict[str, str](), list[NoAnswer]()
    for endpoint in endpoints:
        status, why = endpoint.error_status, str(endpoint.last_error).rstrip(". ")
        if endpoint.is_healthy:
            used.append(endpoint)
            continue
        refuses = status in {_OK, *HOPELESS}
        if why != _ELSEWHERE and (refuses or status is None):
            silent.append(NoAnswer(endpoint.id, endpoint.url, status, why))
        if refuses:
            left_out[endpoint.id] = why
        elif is_remote or is_own_address(endpoint.url.host):
            used.append(endpoint)
        else:
            left_out[endpoint.id] = f"its address is not this machine's, where the command runs, and {why}"
    if len(silent) == len(used) + len(left_out):
        raise NoServerAnswersError(silent)
    if not used:
        raise NoServerHereError(f"no GPU server is on this machine, where the command would run: {_ELSEWHERE}")
    shown = [(endpoint, endpoint.seen.view) for endpoint in used if endpoint.is_healthy]
    pools = [(endpoint.url, view) for endpoint, view in shown if view is not None]
    among, warnings = (None, []) if is_remote else _visible(environ, [pool for _, pool in pools])
    if among is not None:
        _check_not_held_by_own(pools, among)
    return LocalServers(
        tuple(pool for _, pool in pools),
        among,
        left_out,
        tuple(warnings),
        frozenset(endpoint.id for endpoint in used if endpoint.seen.view is None or not endpoint.is_healthy),
    )


def environ_outside(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment for a request of other GPUs than those of the lease around this process."""
    if not (environ.get(LEASE_ID_VARIABLE) and is_set_by_lease(environ)):
        return environ
    return {name: value for name, value in environ.items() if name != VISIBLE_DEVICES_VARIABLE}


# --- CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------------------------------


def _visible(environ: Mapping[str, str], pools: Sequence[PoolView]) -> tuple[tuple[str, ...] | None, list[str]]:
    """The UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves visible, None where it is not set; and what is odd about it."""
    value = environ.get(VISIBLE_DEVICES_VARIABLE)
    if value is None:
        return None, []
    gpus = [InstalledGpu(gpu.gpu_id, gpu.uuid) for pool in pools for gpu in pool.gpus if gpu.gpu_id is not None]
    chosen = select_visible(value, gpus)
    if not chosen.is_filtering or not chosen.indices:
        raise NoGpuHereError(
            f"{VISIBLE_DEVICES_VARIABLE}={value!r} names no GPU of the pool; unset it, or name GPUs that `gpu-pool status` shows"
        )
    warnings = list(chosen.warnings)
    if environ.get(LEASE_ID_VARIABLE) and inherited_lease(environ) is None:
        warnings.append(
            f"{VISIBLE_DEVICES_VARIABLE} was set by an outer gpu-pool run, which holds those GPUs; use --new to request others"
        )
    return tuple(sorted(gpu.uuid for gpu in gpus if gpu.index in chosen.indices)), warnings


def _check_not_held_by_own(pools: Iterable[tuple[EndpointUrl, PoolView]], among: Sequence[str]) -> None:
    """Refuse to wait for GPUs that this process holds itself, or a process that has started it."""
    own = {os.getpid(), *(ancestor.pid for ancestor in ProcessTable().ancestors(os.getpid()))}
    for url, pool in pools:
        for lease in pool.leases:
            is_own = lease.state == "active" and lease.is_local and lease.memory_mb is None and lease.pid in own
            if not is_own or not {gpu.uuid for gpu in lease.gpus} >= set(among):
                continue
            if lease.pid == os.getpid():
                raise NoGpuHereError(
                    f"this process holds the GPUs in {VISIBLE_DEVICES_VARIABLE} itself, and would wait for itself; release them "
                    f"before, or unset {VISIBLE_DEVICES_VARIABLE} to use others"
                )
            raise NoGpuHereError(
                f"pid {lease.pid}, which has started this program, holds the GPUs in {VISIBLE_DEVICES_VARIABLE} itself (lease "
                f"{lease.id}): this would wait for its own parent. Start the command without gpu-pool run; or inside that lease, "
                f"with {LEASE_ID_VARIABLE}={lease.id} and {LEASE_URL_VARIABLE}={url.url} in its environment; or unset "
                f"{VISIBLE_DEVICES_VARIABLE} to request others."
            )


# --- the client ------------------------------------------------------------------------------------------------------


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
                    on_event=self._on_event,
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


async def find_local_servers(config: ClientConfig, environ: Mapping[str, str], *, is_remote: bool) -> LocalServers:
    """What the servers of this machine show. Raises what `LocalClient.start` does."""
    async with LocalClient(config, environ, is_remote=is_remote, counts_gpus=True) as client:
        return client.servers
