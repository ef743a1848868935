"""The servers whose GPUs a command on this machine can use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gpu_worker_pool.cli.failure import USAGE, Failure
from gpu_worker_pool.cli.output import complain
from gpu_worker_pool.cli.pools.servers import Servers, nobody_answered
from gpu_worker_pool.client.events import Hook
from gpu_worker_pool.client.pool_client import GPUWorkerPoolClient
from gpu_worker_pool.core.model.visible_devices import InstalledGpu, select_visible
from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.host.clock import machine_fingerprint
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import read

from .lease_facts import LEASE_ID_VARIABLE, VISIBLE_DEVICES_VARIABLE


@dataclass(frozen=True)
class Sources:
    """The servers to ask for GPUs. `among` are the UUIDs of the GPUs that may be asked for; None: all of them."""

    urls: tuple[str, ...]
    is_multi: bool
    among: tuple[str, ...] | None
    gpu_count: int
    ttl_s: float

    def client(self, on_event: Hook | None = None) -> GPUWorkerPoolClient:
        endpoints: dict[str, Any] = (
            {"service_endpoints": self.urls} if self.is_multi else {"service_endpoint": self.urls[0]}
        )
        try:
            return GPUWorkerPoolClient(**endpoints, on_event=on_event)
        except ValueError as error:
            raise Failure(str(error), USAGE) from None


async def find_sources(
    servers: Servers, environ: Mapping[str, str], *, is_remote: bool, warn: Callable[[str], None] = complain
) -> Sources:
    """Ask the servers what GPUs they have.

    The command runs on this machine, so servers of other machines are left out: their GPU 2 is not ours. A command that
    `is_remote` finds its own way to the GPU, and all servers are used.
    """
    answers = await servers.ask_all("/pool?queue=0&leases=0")
    if all(answer.status is None for answer in answers):
        raise nobody_answered(answers)
    urls: list[str] = []
    gpus: list[InstalledGpu] = []
    for answer in answers:
        pool = read(PoolView, answer.data)
        if is_remote or _is_here(answer.url, pool):
            urls.append(answer.url)
            gpus += _installed_gpus(pool)
        else:
            warn(f"{answer.endpoint} is left out: its GPUs are in another machine, and the command runs on this one")
    if not urls:
        raise Failure(
            "no GPU server is on this machine, where the command would run. Run gpu-pool on the server's machine; or, "
            "if the command itself goes there (by ssh, say), add --remote."
        )
    among = None if is_remote else _visible_uuids(environ, gpus, warn)
    gpu_count = len(gpus if among is None else among)
    return Sources(tuple(urls), servers.config.is_multi, among, gpu_count, servers.config.ttl_s)


def _is_here(url: str, pool: PoolView | None) -> bool:
    if pool is not None and pool.machine is not None:
        return pool.machine == machine_fingerprint()
    # A server that is down, or that does not name its machine, is judged by its address.
    return is_this_machine(urlsplit(url).hostname or "")


def _installed_gpus(pool: PoolView | None) -> list[InstalledGpu]:
    return [InstalledGpu(gpu.gpu_id, gpu.uuid) for gpu in pool.gpus if gpu.gpu_id is not None] if pool else []


def _visible_uuids(
    environ: Mapping[str, str], gpus: Sequence[InstalledGpu], warn: Callable[[str], None]
) -> tuple[str, ...] | None:
    """The UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves visible; None where it is not set."""
    value = environ.get(VISIBLE_DEVICES_VARIABLE)
    if value is None:
        return None
    chosen = select_visible(value, gpus)
    for warning in chosen.warnings:
        warn(warning)
    if environ.get(LEASE_ID_VARIABLE):
        warn(
            f"{VISIBLE_DEVICES_VARIABLE} was set by an outer gpu-pool run, which holds those GPUs; "
            "unset it to request others"
        )
    if not chosen.is_filtering or not chosen.indices:
        raise Failure(
            f"{VISIBLE_DEVICES_VARIABLE}={value!r} names no GPU of the pool; "
            "unset it, or name GPUs that `gpu-pool status` shows"
        )
    return tuple(sorted(gpu.uuid for gpu in gpus if gpu.index in chosen.indices))
