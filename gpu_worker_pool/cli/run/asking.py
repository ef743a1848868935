"""What `run` and `batch` ask for, of whom, and what they tell the command they run about it."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from gpu_worker_pool.cli.failure import TIMED_OUT, USAGE, Failure
from gpu_worker_pool.cli.output import complain
from gpu_worker_pool.cli.pools.servers import Answer, Servers, nobody_answered
from gpu_worker_pool.client.acquire.heartbeat import BEATS_PER_TTL
from gpu_worker_pool.client.events import Hook
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.core.model.visible_devices import InstalledGpu, select_visible
from gpu_worker_pool.errors import NoEndpointAnsweredError, PoolError, WorkerTimeoutError
from gpu_worker_pool.host.clock import machine_mark

from .job import GuardedCommand

VISIBLE = "CUDA_VISIBLE_DEVICES"
LEASE_VARIABLE = "GPU_POOL_LEASE_ID"
FOREVER_S = 1e9
# How much of the time between our giving up a lost lease and the server's giving it away a command may take to end; the
# rest is for the kernel, which takes its time to free the memory of a GPU.
_PART_OF_THE_MARGIN = 0.5
_LONGEST_LABEL = 200
# How often within a TTL the guard is told that the lease was renewed.
_TOLD_PER_TTL = 20
# What the server takes in a label, see its lease_form.py.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]+")


@dataclass(frozen=True)
class Wanted:
    """What is asked for, and how long to wait for it: None is as long as it takes."""

    gpus: int = 1
    memory_mb: float | None = None
    model: str | None = None
    priority: int = 0
    timeout_s: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sources:
    """Where GPUs can be had for a command that runs on this machine, and which of them it may see."""

    urls: tuple[str, ...]
    is_multi: bool
    among: tuple[str, ...] | None
    gpu_count: int
    ttl_s: float

    def client(self, on_event: Hook | None = None) -> GPUWorkerPoolClient:
        """A client of them."""
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
    """Ask the endpoints what they have. The command is run on this machine, so unless it `is_remote`, and finds its own
    way to the GPU, those with GPUs in another machine are left out: their GPU 2 is not ours.
    """
    answers = await servers.ask_all("/pool?queue=0")
    if not any(answer.is_ok or answer.status is not None for answer in answers):
        raise nobody_answered(answers)
    used = [answer for answer in answers if is_remote or _is_here(answer)]
    for answer in answers:
        if answer not in used:
            warn(f"{answer.endpoint} is left out: its GPUs are in another machine, where this command would not run")
    if not used:
        raise Failure(
            "none of the GPU servers is on this machine, and the command runs here. Run gpu-pool there; or, if the "
            "command itself goes there (by ssh, say), tell so with --remote."
        )
    gpus = [
        InstalledGpu(gpu["gpu_id"], gpu["uuid"])
        for answer in used
        if isinstance(answer.data, dict)
        for gpu in answer.data.get("gpus", ())
        if isinstance(gpu.get("gpu_id"), int)
    ]
    urls = tuple(answer.url for answer in used)
    among = None if is_remote else _visible(environ, gpus, warn)
    return Sources(urls, servers.config.is_multi, among, len(gpus if among is None else among), servers.config.ttl_s)


def _is_here(answer: Answer) -> bool:
    machine = answer.data.get("machine") if isinstance(answer.data, dict) else None
    if machine is not None:
        return bool(machine == machine_mark())
    # One that is down, or does not tell: its address must do.
    host = urlsplit(answer.url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _visible(
    environ: Mapping[str, str], gpus: Sequence[InstalledGpu], warn: Callable[[str], None]
) -> tuple[str, ...] | None:
    """The GPUs that the caller lets us see, by UUID; None where he says nothing about it."""
    value = environ.get(VISIBLE)
    if value is None:
        return None
    chosen = select_visible(value, gpus)
    for warning in chosen.warnings:
        warn(warning)
    if environ.get(LEASE_VARIABLE):
        warn(f"{VISIBLE} was set by the gpu-pool around this one, which has those GPUs; unset it to ask for others")
    if not chosen.is_filtering or not chosen.indices:
        raise Failure(
            f"{VISIBLE}={value!r} leaves no GPU of the pool to ask for; unset it, or name some that are there"
        )
    return tuple(sorted(gpu.uuid for gpu in gpus if gpu.index in chosen.indices))


async def ask(client: GPUWorkerPoolClient, sources: Sources, wanted: Wanted, pid: int) -> Assignment:
    """Wait for what is wanted, on behalf of this process; Failure where it is not to be had."""
    try:
        return await client.request_gpu(
            FOREVER_S if wanted.timeout_s is None else wanted.timeout_s,
            gpus=wanted.gpus,
            memory_mb=wanted.memory_mb,
            model=wanted.model,
            priority=wanted.priority,
            labels=wanted.labels,
            among=sources.among,
            pid=pid,
        )
    except NoEndpointAnsweredError:
        raise
    except WorkerTimeoutError as error:
        raise Failure(f"no GPU within --timeout: {error.reason or error}", TIMED_OUT) from None
    except ValueError as error:
        if isinstance(error, PoolError):
            raise
        raise Failure(str(error), USAGE) from None


def command_env(environ: Mapping[str, str], assignment: Assignment) -> dict[str, str]:
    """The environment of the command: it sees its GPUs and no others, and can find out about its lease."""
    lease = {
        LEASE_VARIABLE: assignment.lease_id or "",
        "GPU_POOL_LEASE_GPUS": ",".join(map(str, assignment.gpu_ids)),
        "GPU_POOL_LEASE_ENDPOINT": assignment.endpoint_id or "",
        "GPU_POOL_LEASE_FENCE": "" if assignment.fence is None else str(assignment.fence),
    }
    return {**environ, **assignment.env, **lease}


def short_name(command: Sequence[str]) -> str:
    """`python train.py`, for everybody to read: without its options, which may have secrets in them."""
    words = [PurePath(word).name for word in command[:2] if not word.startswith("-")]
    return label(" ".join(words if len(words) == len(command[:2]) else words[:1]))


def label(text: str) -> str:
    """What may stand in a label."""
    # A name on the command line need not be UTF-8.
    readable = text.encode("utf-8", "replace").decode("utf-8")
    return _UNPRINTABLE.sub(" ", readable)[:_LONGEST_LABEL].strip()


def grace_within(grace_s: float, ttl_s: float) -> float:
    """How long a command may take to end once its lease is lost: it must be gone before the server grants the GPU anew,
    which is one heartbeat after we gave it up.
    """
    return min(grace_s, _PART_OF_THE_MARGIN * ttl_s / BEATS_PER_TTL)


def has_terminal() -> bool:
    """Whether there is a terminal that controls us: then the command shares our process group, so that what is typed
    reaches it and the shell's job control (Ctrl-Z, fg, bg) takes us for one job.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


async def settle(*tasks: asyncio.Task[Any]) -> None:
    """Cancel these, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def safe_until(assignment: Assignment) -> float | None:
    """When it is lost if it is not renewed, on the clock that leases run on; None where it cannot be."""
    at: float | None = getattr(assignment.lost, "ends_at", None)
    return at


async def tell_guard(job: GuardedCommand, assignment: Assignment, ttl_s: float) -> None:
    """Keep the guard informed of how long the lease is safe: if we are stopped or hang, it must act without us."""
    told = safe_until(assignment)
    while True:
        at = safe_until(assignment)
        if at is not None and at != told:
            told = at
            job.tell_safe_until(at)
        await asyncio.sleep(min(ttl_s / _TOLD_PER_TTL, 1.0))


async def until_lost(assignment: Assignment) -> str:
    """Why it was lost, once it is."""
    if assignment.lost is None:  # it was made by hand, and cannot be
        await asyncio.Event().wait()
        raise AssertionError("unreachable")
    return await assignment.lost.wait()
