"""What `gpu-pool join` does: find this box's part of a lease, run the command on it, and follow the lease."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Final

from gpu_worker_pool.cli.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.cli.output import complain, plain
from gpu_worker_pool.cli.pools.lease_search import lease_path
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.backends.grant_check import UnbelievableGrant, environment
from gpu_worker_pool.client.backends.held_lease import BEATS_PER_TTL, Loss
from gpu_worker_pool.core.model.bounds import DEFAULT_TTL_S
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey
from gpu_worker_pool.host.addresses import is_own_address
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.guarded import Guarded, check_can_run
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.jobs.signals import Signals, has_controlling_terminal
from gpu_worker_pool.jobs.supervise import Command, supervise
from gpu_worker_pool.models import GPUAssignment
from gpu_worker_pool.wire.leases import GangLeaseView, NodePart
from gpu_worker_pool.wire.reader import read

from .gang import Gang

POLL_S: Final = 2.0


async def join_lease(lease_id: str, argv: Sequence[str], grace_s: float, endpoints: Sequence[str] | None) -> int:
    """Run a command on this box's part of a lease that is held elsewhere; the exit code."""
    check_can_run(argv[0], os.environ)
    signals = Signals()
    async with Servers(endpoints, is_fleet=True) as servers:
        own = next((id_ for id_, url in servers.config.endpoints.items() if is_own_address(url.host)), None)
        if own is None:
            raise Failure("no GPU server of this machine is among the endpoints; run it on a box of the lease", USAGE)
        asked_at, lease = boot_time(), await _active_lease(servers, own, lease_id)
        gang = await Gang.of(servers, [part.node for part in lease.nodes])
        part = next((part for part in lease.nodes if part.node == gang.own), None)
        if part is None:
            where, here = ", ".join(gang.nodes) or "one node only", gang.own or "this machine"
            raise Failure(f"{here} has no part in the lease {lease_id}, which is on {where}", REFUSED)
        lost = Loss(lease.ttl_s or DEFAULT_TTL_S)
        lost.extend(asked_at)
        indices = tuple(gpu.gpu_id or 0 for gpu in part.gpus)
        assignment = GPUAssignment(
            indices[0],
            "join",
            datetime.now(),  # noqa: DTZ005 - local time, as all times of the documents
            lease_id=lease_id,
            gpu_ids=indices,
            uuids=tuple(gpu.uuid for gpu in part.gpus),
            server_url=servers.config.endpoints[own].url,
            env={**_environment(lease_id, part), **gang.env(part.node, os.environ)},
            lost=lost,
        )
        group = os.getpgrp() if has_controlling_terminal() else 0
        command = Command(argv=argv, env=os.environ, group=group, grace_s=grace_s)
        following = asyncio.create_task(_follow(servers, own, lease_id, lost))
        try:
            async with Guarded.start() as guarded:
                outcome = await supervise(
                    guarded,
                    assignment,
                    command,
                    on_lost=lambda reason: complain(f"{reason}; the command is stopped"),
                    signals=signals,
                )
        finally:
            await cancel_and_wait(following)
        return outcome.code_of_run


async def _follow(servers: Servers, endpoint: str, lease_id: str, lost: Loss) -> None:
    """Ask again and again whether the lease stands, which counts as a heartbeat of its holder."""
    while not lost.is_set():
        await asyncio.sleep(min(POLL_S, lost.ttl_s / BEATS_PER_TTL / 2))
        asked_at = boot_time()
        try:
            await _active_lease(servers, endpoint, lease_id)
        except Failure as failure:
            if failure.code == REFUSED:
                lost.set(str(failure))
        else:
            lost.extend(asked_at)


async def _active_lease(servers: Servers, endpoint: str, lease_id: str) -> GangLeaseView:
    """The lease, which must be active, and this user's; Failure with REFUSED where it is not, another where that is not
    known.
    """
    answer = await servers.ask(endpoint, lease_path(lease_id))
    if answer.status == HTTPStatus.NOT_FOUND:
        raise Failure(f"there is no lease {lease_id}; `gpu-pool leases --fleet` lists those there are", REFUSED)
    lease = read(GangLeaseView, answer.data, clean=plain) if answer.is_ok else None
    if lease is None:
        raise Failure(f"the lease {lease_id} cannot be seen: {plain(answer.why_not)}")
    if lease.state != "active":
        raise Failure(f"the lease {lease_id} is {lease.state}, not active", REFUSED)
    if lease.owner != user_name():
        raise Failure(
            f"the lease {lease_id} is {lease.owner}'s, and you are {user_name()}; only its owner can join it", REFUSED
        )
    return lease


def _environment(lease_id: str, part: NodePart) -> dict[str, str]:
    gpus = [Gpu(GpuKey(part.node, ref.uuid), ref.gpu_id or 0, ref.name or "") for ref in part.gpus]
    try:
        return environment(part.env, gpus)
    except UnbelievableGrant as error:
        raise Failure(f"the lease {lease_id} cannot be used: {error}") from None
