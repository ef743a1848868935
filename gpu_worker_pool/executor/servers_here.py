"""The servers whose GPUs are in this machine, where the workers run. GPU 2 of another machine is not ours."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_worker_pool.client.http.transport import CallFailed, Transport
from gpu_worker_pool.client.inherited_lease import VISIBLE_DEVICES_VARIABLE
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.errors import RequestRefusedError, ServiceUnavailableError
from gpu_worker_pool.host.addresses import is_own_address
from gpu_worker_pool.host.clock import machine_fingerprint
from gpu_worker_pool.host.processes import ProcessTable
from gpu_worker_pool.host.visible_devices import InstalledGpu, select_visible
from gpu_worker_pool.urls import EndpointUrl
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import plain, read

_PATH: Final = "/pool?queue=0&leases=1000"
_ELSEWHERE: Final = "its GPUs are in another machine, and the tasks would run on this one"


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
