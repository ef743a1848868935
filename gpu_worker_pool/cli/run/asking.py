"""From the options of `run`, `batch` and `submit` to what is run: its spec, and the servers of this machine or the lease around
this process that can run it. What is wrong with them is a Failure.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

from gpu_worker_pool.cli.options import CommandOptions, GpuOptions
from gpu_worker_pool.cli.output import complain
from gpu_worker_pool.cli.pools.servers import NobodyAnswered, ServerAnswer, Servers, nobody_answered
from gpu_worker_pool.client.asking import make_request
from gpu_worker_pool.client.command_label import command_label, label_text
from gpu_worker_pool.client.inherited_lease import (
    LEASE_GPUS_VARIABLE,
    VISIBLE_DEVICES_VARIABLE,
    InheritedLease,
    inherited_lease,
)
from gpu_worker_pool.client.local_client import (
    LocalServers,
    NoGpuHereError,
    NoServerAnswersError,
    NoServerHereError,
    environ_outside,
    find_local_servers,
)
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.request import Request, Wishes, matches_model
from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.host.guarded import check_can_run, check_proc
from gpu_worker_pool.jobs.gpu_wait import wishes_of
from gpu_worker_pool.jobs.job_spec import JobSpec, without_lease
from gpu_worker_pool.jobs.job_store import check_keep

ANYWHERE_VARIABLE = "GPU_POOL_ANYWHERE"


def make_spec(asked: GpuOptions, command: Sequence[str], name: str | None = None, **more: Any) -> JobSpec:
    """What was asked for, as `run` runs it and `submit` writes it down. `more` are other fields of a spec."""
    if not command[0]:
        raise Failure("the command is empty; write it after --, as in: gpu-pool run -- python train.py", USAGE)
    if any("\0" in word for word in command):
        raise Failure("a word of the command has a NUL character, which no command can have", USAGE)
    if isinstance(asked, CommandOptions):
        name = asked.name
        more |= {
            "is_anywhere": asked.anywhere or (asked.nodes == 1 and not asked.gpu and anywhere_by_default()),
            "nodes": asked.nodes,
            "uses_ssh": asked.ssh,
            "env_names": tuple(asked.env or ()),
            "on_granted": asked.on_granted,
            "notify": tuple(asked.notify or ()),
        }
    spec = JobSpec(
        submitted_at=time.time(),
        command=tuple(command),
        label=label_text(name) if name else command_label(command),
        name=name,
        cwd=more.pop("cwd", None) or _current_directory(),
        umask=_current_umask(),
        gpus=asked.number,
        gpu_names=asked.gpu,
        min_memory_mb=asked.min_memory,
        exclude=asked.exclude,
        memory_mb=asked.memory,
        model=asked.model,
        priority=asked.priority,
        timeout_s=asked.timeout,
        time_limit_s=asked.time,
        is_preemptible=asked.preemptible,
        grace_s=asked.grace,
        is_remote=asked.remote,
        endpoints=None if asked.endpoint is None else tuple(asked.endpoint),
        **more,
    )
    request_of(spec, ClientConfig.build(service_endpoint="http://localhost", environ={}))
    return spec


def anywhere_by_default() -> bool:
    """What GPU_POOL_ANYWHERE says. Failure where that is neither true nor false."""
    said = os.environ.get(ANYWHERE_VARIABLE, "").strip().lower()
    if said not in {"", "true", "false", "1", "0"}:
        raise Failure(f"{ANYWHERE_VARIABLE} is {said!r}; it must be true or false", USAGE)
    return said in {"true", "1"}


def request_of(spec: JobSpec, config: ClientConfig) -> Request:
    """The same, as the core has it. Failure where something is not allowed."""
    try:
        return make_request(config, "run", wishes_of(spec))
    except ValueError as error:
        raise Failure(str(error), USAGE) from None


def check_command(spec: JobSpec) -> None:
    """Raise Failure where the command could not be run: better now than after a night in the queue."""
    check_can_run(spec.command[0], os.environ)
    check_proc()


# --- the lease around this process ------------------------------------------------------------------------------------


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


def endpoints_outside(endpoints: Sequence[str] | None, environ: Mapping[str, str]) -> Sequence[str] | None:
    """The endpoints for GPUs outside the lease around this process: without endpoints, the server of that lease."""
    lease = find_lease_around(endpoints, environ)
    if lease is None or endpoints or lease.is_among(Servers(None).config.endpoints.values()):
        return endpoints
    return [lease.url.url]


def environment_to_keep(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for what outlives a lease or a job around this process: it has nothing of those."""
    return without_lease(environ_outside(environ))


# --- the servers of this machine --------------------------------------------------------------------------------------


@contextmanager
def told_as_failures() -> Iterator[None]:
    """Raise a Failure where no server can be used here."""
    try:
        yield
    except NoServerAnswersError as error:
        raise nobody_answered(
            [ServerAnswer(each.endpoint, each.url.url, each.status, error=each.error) for each in error.answers]
        ) from None
    except NoServerHereError as error:
        raise Failure(
            f"{error}. Run gpu-pool on the server's machine; or, if the command itself goes there (by ssh, say), add --remote."
        ) from None
    except NoGpuHereError as error:
        raise Failure(str(error)) from None


def check_servers(spec: JobSpec, environ: Mapping[str, str]) -> LocalServers | None:
    """The servers of this machine that can run it; None where the named servers do not answer now: it waits for them. Failure
    where none ever could, so that no job waits for a night in vain.
    """
    config = Servers(spec.endpoints, environ=environ).config
    wishes = request_of(spec, config).wishes
    try:
        check_keep(os.environ)
    except ValueError as error:
        raise Failure(str(error), USAGE) from None
    try:
        with told_as_failures():
            servers = asyncio.run(find_local_servers(config, environ, is_remote=spec.is_remote or spec.is_anywhere))
    except NobodyAnswered as error:
        if not config.is_named or error.is_reached:
            raise
        complain(f"it waits until a server answers: {error}")
        return None
    for endpoint, why in servers.left_out.items():
        complain(f"{endpoint} is left out: {why}")
    for warning in servers.warnings:
        complain(warning)
    if spec.nodes == 1:
        _check_can_ever(servers, replace(wishes, among=servers.among))
    return servers


def _check_can_ever(servers: LocalServers, wishes: Wishes) -> None:
    """Failure where no server has the GPUs that are asked for. What a server does not show counts as fitting: it decides."""
    if servers.unheard or any(pool.fleet is not None for pool in servers.pools):
        return
    most = max(
        sum(
            (gpu.name is None or matches_model(wishes.model, gpu.name))
            and (wishes.memory_mb or 0.0) <= (gpu.memory_total_mb or inf)
            and wishes.is_large_enough(gpu.memory_total_mb or inf)
            and (wishes.among is None or gpu.uuid in wishes.among)
            for gpu in pool.gpus
        )
        for pool in servers.pools
    )
    if most < wishes.gpus:
        raise Failure(
            f"no server could ever run this: it asks for {wishes}, and "
            f"{f'only {most} such' if most else 'no such'} GPU{'' if most == 1 else 's'} can be had here; ask for less "
            "(`gpu-pool status` shows the GPUs), or name other servers with --endpoint"
        )


def _current_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - as it was reached
    except OSError as error:
        raise Failure(f"the current directory cannot be used: {error.strerror}; cd to another one") from None


def _current_umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
