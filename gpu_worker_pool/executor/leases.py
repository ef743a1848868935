"""The leases of an executor's workers: requested and released by one client, from the servers whose GPUs are in this machine.

The workers run here, and GPU 2 of another machine is not ours.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from gpu_worker_pool.client.http.transport import CallFailed, Transport
from gpu_worker_pool.client.inherited_lease import VISIBLE_DEVICES_VARIABLE, config_inside
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.errors import RequestRefusedError, ServiceUnavailableError, StaleAssignmentError
from gpu_worker_pool.host.addresses import is_own_address
from gpu_worker_pool.host.clock import machine_fingerprint
from gpu_worker_pool.host.processes import ProcessTable
from gpu_worker_pool.host.visible_devices import InstalledGpu, select_visible
from gpu_worker_pool.urls import EndpointUrl
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import plain, read

_UNLIMITED_S: Final = 1e9
# How soon to look again for a server, where tasks may wait for one.
_SERVER_PAUSE_S: Final = 0.2
_PATH: Final = "/pool?queue=0&leases=1000"
_ELSEWHERE: Final = "its GPUs are in another machine, and the tasks would run on this one"


class WorkerLeases:
    """Requests leases. `wishes` are those of `request_gpu`, `options` those of the client.

    A request fails after `timeout_s`, until which it also waits for a server that does not answer; None: it waits for a GPU
    as long as it takes, and for no server. `see_gpus` is told how many GPUs can be used here.
    """

    def __init__(
        self,
        wishes: Mapping[str, Any],
        options: Mapping[str, Any],
        see_gpus: Callable[[int], None],
        timeout_s: float | None,
    ) -> None:
        self._wishes = dict(wishes)
        self._options = dict(options)
        self._see_gpus = see_gpus
        self._is_limited = timeout_s is not None
        self._timeout_s = _UNLIMITED_S if timeout_s is None else timeout_s
        self._client: GPUWorkerPoolClient | None = None
        self._starting = asyncio.Lock()

    async def request(self, holder_pid: int) -> Assignment:
        """Wait for a lease that belongs to this process."""
        since = asyncio.get_running_loop().time()
        client, waited_s = await self._started_client(since)
        return await client.request_gpu(max(self._timeout_s - waited_s, 0.0), pid=holder_pid, **self._wishes)

    async def release(self, assignment: Assignment) -> None:
        """Release a lease. One that was lost needs none."""
        assert self._client is not None  # noqa: S101 - it has requested it
        with suppress(StaleAssignmentError, ValueError):
            await self._client.release_gpu(assignment)

    async def close(self) -> None:
        """Stop the client. What is still held is released."""
        if self._client is not None:
            await self._client.stop()

    async def _started_client(self, since: float) -> tuple[GPUWorkerPoolClient, float]:
        """The client, and how long it had to be waited for because no server answered."""
        waited_s = 0.0
        async with self._starting:
            while self._client is None:
                try:
                    self._client = await self._start_client()
                except ServiceUnavailableError:
                    waited_s = asyncio.get_running_loop().time() - since + _SERVER_PAUSE_S
                    # Without a limit, the caller is told at once, as by the client itself.
                    if not self._is_limited or waited_s >= self._timeout_s:
                        raise
                    await asyncio.sleep(_SERVER_PAUSE_S)
            return self._client, waited_s

    async def _start_client(self) -> GPUWorkerPoolClient:
        options = dict(self._options)
        single, several = options.pop("service_endpoint", None), options.pop("service_endpoints", None)
        known = {name: value for name, value in options.items() if not name.startswith("on_")}
        config, lease = config_inside(partial(ClientConfig.build, **known), single, several)
        if lease is not None and not self._wishes.get("new"):
            self._see_gpus(len(lease.gpus))
        else:
            here = await find_servers_here(config, os.environ, is_inside=lease is not None)
            self._wishes.setdefault("among", here.among)
            self._see_gpus(here.gpu_count)
            if config.is_named:
                several = list(here.urls) if config.is_multi else None
                single = None if config.is_multi else here.urls[0]
        client = GPUWorkerPoolClient(single, several, **{"scope": "box", **options})
        await client.start()
        return client


@dataclass(frozen=True, slots=True)
class ServersHere:
    """The URLs of the servers in this machine, the number of their GPUs that may be used, and the UUIDs of those;
    None: all of them.
    """

    urls: tuple[str, ...]
    gpu_count: int
    among: tuple[str, ...] | None


async def find_servers_here(config: ClientConfig, environ: Mapping[str, str], *, is_inside: bool) -> ServersHere:
    """Ask all servers what GPUs they have. ServiceUnavailableError where none answers, RequestRefusedError where no GPU
    can be used here. `is_inside`: a lease around this process says which GPUs those are.
    """
    async with Transport(ca_file=config.ca_file, is_named=config.is_named) as transport:
        asked = [_ask(transport, config, endpoint, url) for endpoint, url in config.endpoints.items()]
        answers = dict(zip(config.endpoints, await asyncio.gather(*asked), strict=True))
    if all(isinstance(answer, str) for answer in answers.values()):
        raise ServiceUnavailableError({endpoint: str(why) for endpoint, why in answers.items()})
    urls: list[str] = []
    pools: list[PoolView] = []
    for endpoint, answer in answers.items():
        url = config.endpoints[endpoint]
        if _is_here(url, answer):
            # One that does not answer now may do so later.
            urls.append(url.url)
            pools += [answer] if isinstance(answer, PoolView) else []
    if not urls:
        raise RequestRefusedError(dict.fromkeys(config.endpoints, _ELSEWHERE))
    gpus = [InstalledGpu(gpu.gpu_id, gpu.uuid) for pool in pools for gpu in pool.gpus if gpu.gpu_id is not None]
    among = None if is_inside else _visible(environ, gpus)
    if among is not None:
        _check_not_held_here(pools, among)
    return ServersHere(tuple(urls), len(gpus if among is None else among), among)


async def _ask(transport: Transport, config: ClientConfig, endpoint: str, url: EndpointUrl) -> PoolView | str | None:
    """What it shows; None where it has no leases; why it does not answer, in words."""
    timeout_s = min(config.endpoint_timeout, config.request_timeout)
    try:
        reply = await transport.call("GET", f"{url.url}{_PATH}", token=config.tokens.get(endpoint), timeout_s=timeout_s)
    except CallFailed as failed:
        return str(failed)
    return read(PoolView, reply.data, clean=plain) if reply.status == 200 else None


def _is_here(url: EndpointUrl, answer: PoolView | str | None) -> bool:
    # In a fleet the leader answers, which may be on another machine.
    if isinstance(answer, PoolView) and answer.machine is not None and answer.fleet is None:
        return answer.machine == machine_fingerprint()
    return is_own_address(url.host)


def _visible(environ: Mapping[str, str], gpus: Sequence[InstalledGpu]) -> tuple[str, ...] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES of this process leaves visible: a task must not see more than its program."""
    value = environ.get(VISIBLE_DEVICES_VARIABLE)
    if value is None:
        return None
    chosen = select_visible(value, gpus)
    if not chosen.is_filtering or not chosen.indices:
        raise _refusal(f"{VISIBLE_DEVICES_VARIABLE}={value!r} names no GPU of the pool; unset it, or name others")
    return tuple(sorted(gpu.uuid for gpu in gpus if gpu.index in chosen.indices))


def _check_not_held_here(pools: Sequence[PoolView], among: Sequence[str]) -> None:
    """Refuse to wait for GPUs that this process holds itself, or a process that has started it."""
    own = {os.getpid(), *(ancestor.pid for ancestor in ProcessTable().ancestors(os.getpid()))}
    held = {
        gpu.uuid
        for pool in pools
        for lease in pool.leases
        if lease.state == "active" and lease.is_local and lease.memory_mb is None and lease.pid in own
        for gpu in lease.gpus
    }
    if held >= set(among):
        raise _refusal(
            f"this process holds the GPUs in {VISIBLE_DEVICES_VARIABLE} itself, and would wait for itself; release them "
            f"before, or unset {VISIBLE_DEVICES_VARIABLE} to use others"
        )


def _refusal(reason: str) -> RequestRefusedError:
    return RequestRefusedError({"this machine": reason})
