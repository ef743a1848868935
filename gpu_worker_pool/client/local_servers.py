"""The servers whose GPUs are in this machine, for all that runs programs here: GPU 2 of another machine is not ours."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpu_worker_pool.errors import PoolError, RequestRefusedError, ServiceUnavailableError
from gpu_worker_pool.host.addresses import is_own_address
from gpu_worker_pool.host.clock import machine_fingerprint
from gpu_worker_pool.host.processes import ProcessTable
from gpu_worker_pool.host.visible_devices import InstalledGpu, select_visible
from gpu_worker_pool.urls import EndpointUrl
from gpu_worker_pool.wire.pool import PoolView

from .backends.server_leases import HOPELESS
from .endpoints.endpoint import Endpoint
from .guarded_lease import is_set_by_lease
from .inherited_lease import (
    LEASE_ID_VARIABLE,
    LEASE_URL_VARIABLE,
    VISIBLE_DEVICES_VARIABLE,
    inherited_lease,
)

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
