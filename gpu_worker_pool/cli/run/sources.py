"""The servers whose GPUs a command on this machine can use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from gpu_worker_pool.cli.output import complain
from gpu_worker_pool.cli.pools.reading import ask_pool
from gpu_worker_pool.cli.pools.servers import GRACE_S, ServerAnswer, Servers, nobody_answered
from gpu_worker_pool.client.backends.server_leases import HOPELESS
from gpu_worker_pool.client.events import Hook
from gpu_worker_pool.client.guarded_lease import is_set_by_lease
from gpu_worker_pool.client.inherited_lease import (
    LEASE_GPUS_VARIABLE,
    LEASE_ID_VARIABLE,
    LEASE_URL_VARIABLE,
    VISIBLE_DEVICES_VARIABLE,
    InheritedLease,
    inherited_lease,
)
from gpu_worker_pool.client.pool_client import GPUWorkerPoolClient
from gpu_worker_pool.config import Scope
from gpu_worker_pool.core.model.bounds import DEFAULT_TTL_S
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.host.addresses import is_own_address
from gpu_worker_pool.host.clock import machine_fingerprint
from gpu_worker_pool.host.processes import ProcessTable
from gpu_worker_pool.host.visible_devices import InstalledGpu, select_visible
from gpu_worker_pool.wire.leases import LeaseList
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import read

# How long one command waits for the others when a server has answered, where only servers of this machine matter: those have no
# network in between.
HERE_GRACE_S = 0.05
ELSEWHERE = "its GPUs are in another machine, and the command runs on this one"


@dataclass(frozen=True)
class Sources:
    """The servers to ask for GPUs. `among` are the UUIDs of the GPUs that may be asked for; None: all of them."""

    urls: tuple[str, ...]
    is_multi: bool
    among: tuple[str, ...] | None
    gpu_count: int
    ttl_s: float
    # Whether the user named the servers; else there is one, the default.
    is_named: bool = True
    # Of a server that belongs to a fleet: the GPUs of all its boxes, of this box, or by the number of servers.
    scope: Scope | None = "box"
    # Those that had not answered yet, and were judged by their address only: a tunnel may lead to another machine.
    unheard: frozenset[str] = frozenset()
    # Whether the GPUs are those of the lease around this process, which are taken without asking a server.
    is_inside: bool = False

    @classmethod
    def inside(cls, lease: InheritedLease) -> Sources:
        """The GPUs of the lease around this process."""
        return cls((lease.url.url,), False, None, len(lease.gpus), DEFAULT_TTL_S, is_inside=True)  # noqa: FBT003 - one server

    def servers(self) -> Servers:
        return Servers(self.urls if self.is_named else None)

    def client(self, on_event: Hook | None = None) -> GPUWorkerPoolClient:
        endpoints: dict[str, Any] = {}
        if self.is_named:
            endpoints = {"service_endpoints": self.urls} if self.is_multi else {"service_endpoint": self.urls[0]}
        try:
            client = GPUWorkerPoolClient(**endpoints, scope=self.scope, on_event=on_event)
        except ValueError as error:
            raise Failure(str(error), USAGE) from None
        client.waits_for_late = False  # all of them were asked a moment ago
        return client


def find_lease_around(endpoints: Sequence[str] | None, environ: Mapping[str, str]) -> InheritedLease | None:
    """The lease around this process; None if there is none, or if these endpoints know nothing of it."""
    try:
        lease = inherited_lease(environ)
    except ValueError as error:
        raise Failure(str(error), USAGE) from None
    if lease is None or not endpoints or lease.is_among(Servers(endpoints).config.endpoints.values()):
        return lease
    return None


def check_inside(lease: InheritedLease, wishes: Wishes, environ: Mapping[str, str]) -> None:
    """Raise Failure if the GPUs of the lease around this process cannot serve such a request."""
    if wishes.nodes > 1:
        raise Failure(
            f"--nodes {wishes.nodes} inside the lease {lease.id}: a command inside a lease uses GPUs of that lease, on one "
            "box; give --new to request others, or leave --nodes out",
            USAGE,
        )
    if not lease.gpus:
        has = environ.get(LEASE_GPUS_VARIABLE) or "none"
        raise Failure(
            f"{VISIBLE_DEVICES_VARIABLE}={environ.get(VISIBLE_DEVICES_VARIABLE)!r} names no GPU of the lease around this "
            f"command, which has GPU {has}; unset it, or use --new"
        )
    if (why := lease.why_not(wishes)) is not None:
        raise Failure(why)


async def choose_sources(
    endpoints: Sequence[str] | None,
    environ: Mapping[str, str],
    *,
    is_remote: bool,
    is_new: bool,
    counts_gpus: bool = True,
    warn: Callable[[str], None] = complain,
    note: Callable[[str], None] = complain,
) -> Sources:
    """The servers of these endpoints, for a process that is in no lease or asks for other GPUs (`is_new`). For
    `counts_gpus`, see `find_sources`.
    """
    if is_new:
        lease = find_lease_around(endpoints, environ)
        if lease is not None and not endpoints and not lease.is_among(Servers(None).config.endpoints.values()):
            endpoints = [lease.url.url]
        if environ.get(LEASE_ID_VARIABLE) and is_set_by_lease(environ):
            # The lease around this process set it, and this request is for other GPUs.
            environ = {name: value for name, value in environ.items() if name != VISIBLE_DEVICES_VARIABLE}
    async with Servers(endpoints) as servers:
        return await find_sources(servers, environ, is_remote=is_remote, counts_gpus=counts_gpus, warn=warn, note=note)


async def find_sources(
    servers: Servers,
    environ: Mapping[str, str],
    *,
    is_remote: bool,
    counts_gpus: bool = True,
    warn: Callable[[str], None] = complain,
    note: Callable[[str], None] = complain,
) -> Sources:
    """Ask the servers what GPUs they have.

    The command runs on this machine, so servers of other machines are left out: their GPU 2 is not ours. A command that
    `is_remote` finds its own way to the GPU, and all servers are used. `note` is told what is left out. A caller that
    `counts_gpus` waits longer for servers that answer late.
    """

    def can_miss(endpoint: str) -> bool:
        """Whether the GPUs of this server may be asked for, and need not be known."""
        is_used = is_remote or is_own_address(urlsplit(servers.config.endpoints[endpoint].url).hostname or "")
        return is_used and not counts_gpus and (is_remote or VISIBLE_DEVICES_VARIABLE not in environ)

    grace_s = GRACE_S if is_remote or counts_gpus else HERE_GRACE_S
    answers = await servers.ask_all("/pool?queue=0&leases=0", grace_s, can_miss)
    found = {answer.endpoint: await _why_wrong(servers, answer) for answer in answers}
    wrong = {endpoint: why for endpoint, why in found.items() if why is not None}
    if all(answer.status is None or answer.endpoint in wrong for answer in answers):
        raise nobody_answered([replace(answer, error=wrong.get(answer.endpoint, answer.error)) for answer in answers])
    urls: list[str] = []
    gpus: list[InstalledGpu] = []
    for answer in answers:
        pool = read(PoolView, answer.data)
        if answer.endpoint in wrong:
            note(f"{answer.endpoint} is left out: {wrong[answer.endpoint]}")
        elif is_remote or _is_here(answer.url, pool):
            urls.append(answer.url)
            gpus += _installed_gpus(pool)
        else:
            note(f"{answer.endpoint} is left out: {_why_left_out(answer, pool)}")
    if not urls:
        raise _none_is_here()
    among = None if is_remote else _visible_uuids(environ, gpus, warn)
    if among is not None:
        await _check_not_of_ancestor(servers, among)
    gpu_count = len(gpus if among is None else among)
    config = servers.config
    scope: Scope | None = None if is_remote else "box"
    unheard = () if is_remote else (answer.url for answer in answers if read(PoolView, answer.data) is None)
    return Sources(
        tuple(urls), config.is_multi, among, gpu_count, config.ttl_s, config.is_named, scope, frozenset(unheard)
    )


async def leave_out_if_elsewhere(servers: Servers, sources: Sources, endpoint: str | None) -> Sources | None:
    """The sources without this one, which has granted GPUs, if they are in another machine; None if they are in this one."""
    found = servers.config.endpoints.get(endpoint or "")  # in a fleet it is the name of a box
    if endpoint is None or found is None or (url := found.url) not in sources.unheard:
        return None
    pool = read(PoolView, (await servers.ask(endpoint, "/pool?queue=0&leases=0")).data)
    if pool is not None and _is_here(url, pool):
        return None
    urls = tuple(each for each in sources.urls if each != url)
    if not urls:
        raise _none_is_here()
    return replace(sources, urls=urls)


def _none_is_here() -> Failure:
    return Failure(
        "no GPU server is on this machine, where the command would run. Run gpu-pool on the server's machine; or, "
        "if the command itself goes there (by ssh, say), add --remote."
    )


async def _why_wrong(servers: Servers, answer: ServerAnswer) -> str | None:
    """Why waiting will not help there: it is not a GPU server, or does not let this caller in. None where it may help."""
    final = {HTTPStatus.OK, *HOPELESS}
    if answer.status not in final or (answer.is_ok and read(PoolView, answer.data) is not None):
        return None
    report = await ask_pool(servers, answer.endpoint, "?queue=0&leases=0")
    return report.error if report.status in final else None


def _why_left_out(answer: ServerAnswer, pool: PoolView | None) -> str:
    if pool is not None:
        return ELSEWHERE
    return f"its address is not this machine's, where the command runs, and {str(answer.error).rstrip('. ')}"


def _is_here(url: str, pool: PoolView | None) -> bool:
    # In a fleet the leader answers, which may be on another machine.
    if pool is not None and pool.machine is not None and pool.fleet is None:
        return pool.machine == machine_fingerprint()
    # A server that is down, or that does not name its machine, is judged by its address.
    return is_own_address(urlsplit(url).hostname or "")


def _installed_gpus(pool: PoolView | None) -> list[InstalledGpu]:
    return [InstalledGpu(gpu.gpu_id, gpu.uuid) for gpu in pool.gpus if gpu.gpu_id is not None] if pool else []


async def _check_not_of_ancestor(servers: Servers, among: Sequence[str]) -> None:
    """Raise Failure if a program that holds all these GPUs has started this one, which would wait for itself."""
    ancestors = {process.pid for process in ProcessTable().ancestors(os.getpid())}
    for answer in await servers.ask_all("/leases"):
        found = read(LeaseList, answer.data) if answer.status == 200 else None
        for lease in found.leases if found else ():
            is_whole = lease.state == "active" and lease.memory_mb is None
            if (
                is_whole
                and lease.is_local
                and lease.pid in ancestors
                and {gpu.uuid for gpu in lease.gpus} >= set(among)
            ):
                raise Failure(
                    f"pid {lease.pid}, which has started this command, holds the GPUs in {VISIBLE_DEVICES_VARIABLE} itself "
                    f"(lease {lease.id}): this would wait for its own parent. Start the command without gpu-pool run; or "
                    f"inside that lease, with {LEASE_ID_VARIABLE}={lease.id} and {LEASE_URL_VARIABLE}={answer.url} in its "
                    f"environment; or unset {VISIBLE_DEVICES_VARIABLE} to request others."
                )


def _visible_uuids(
    environ: Mapping[str, str],
    gpus: Sequence[InstalledGpu],
    warn: Callable[[str], None],
) -> tuple[str, ...] | None:
    """The UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves visible; None where it is not set."""
    value = environ.get(VISIBLE_DEVICES_VARIABLE)
    if value is None:
        return None
    chosen = select_visible(value, gpus)
    if not chosen.is_filtering or not chosen.indices:
        raise Failure(
            f"{VISIBLE_DEVICES_VARIABLE}={value!r} names no GPU of the pool; unset it, or name GPUs that `gpu-pool status` shows"
        )
    for warning in chosen.warnings:
        warn(warning)
    if environ.get(LEASE_ID_VARIABLE) and inherited_lease(environ) is None:
        warn(
            f"{VISIBLE_DEVICES_VARIABLE} was set by an outer gpu-pool run, which holds those GPUs; "
            "use --new to request others"
        )
    return tuple(sorted(gpu.uuid for gpu in gpus if gpu.index in chosen.indices))
