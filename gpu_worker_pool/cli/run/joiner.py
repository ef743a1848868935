"""What `gpu-pool join` does: find this box's part of a lease, run the command on it, and follow the lease."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from gpu_worker_pool.cli.failure import FAILED, REFUSED, USAGE, Failure
from gpu_worker_pool.cli.output import complain, plain
from gpu_worker_pool.cli.pools.lease_search import lease_path
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.backends.grant_check import UnbelievableGrant, environment
from gpu_worker_pool.client.backends.held_lease import BEATS_PER_TTL
from gpu_worker_pool.client.guarded_lease import grace_after_loss
from gpu_worker_pool.client.inherited_lease import LEASE_ID_VARIABLE, LEASE_URL_VARIABLE
from gpu_worker_pool.core.model.bounds import DEFAULT_TTL_S
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey
from gpu_worker_pool.host.addresses import is_own_address
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.wire.leases import GangLeaseView, NodePart
from gpu_worker_pool.wire.reader import read

from .gang import Gang
from .guarded_command import GuardDied, GuardedCommand, check_can_run
from .signals import Received, Signals, has_controlling_terminal

POLL_S: Final = 2.0


@dataclass(frozen=True)
class Joiner:
    """Runs one command on a part of a lease. `grace_s` is the time between SIGTERM and SIGKILL when the lease ends."""

    lease_id: str
    command: Sequence[str]
    grace_s: float

    async def run(self, endpoints: Sequence[str] | None) -> int:
        check_can_run(self.command[0], os.environ)
        signals = Signals()
        async with Servers(endpoints, is_fleet=True) as servers:
            own = next((id_ for id_, url in servers.config.endpoints.items() if is_own_address(url.host)), None)
            if own is None:
                raise Failure(
                    "no GPU server of this machine is among the endpoints; run it on a box of the lease", USAGE
                )
            lease = await self._ask(servers, own)
            if lease.owner != user_name():
                raise Failure(
                    f"the lease {self.lease_id} is {lease.owner}'s, and you are {user_name()}; only its owner can join it",
                    REFUSED,
                )
            gang = await Gang.of(servers, [part.node for part in lease.nodes])
            part = next((part for part in lease.nodes if part.node == gang.own), None)
            if part is None:
                where = ", ".join(gang.nodes) or "one node only"
                raise Failure(
                    f"{gang.own or 'this machine'} has no part in the lease {self.lease_id}, which is on {where}",
                    REFUSED,
                )
            env = {**os.environ, **self._environment(part), **gang.env(part.node, os.environ)}
            env |= {LEASE_ID_VARIABLE: self.lease_id, LEASE_URL_VARIABLE: servers.config.endpoints[own].url}
            return await self._run(servers, own, lease, env, signals)

    async def _ask(self, servers: Servers, endpoint: str) -> GangLeaseView:
        """The lease, which must be active; Failure with REFUSED where it is not, another one where that is not known."""
        answer = await servers.ask(endpoint, lease_path(self.lease_id))
        if answer.status == HTTPStatus.NOT_FOUND:
            raise Failure(
                f"there is no lease {self.lease_id}; `gpu-pool leases --fleet` lists those there are", REFUSED
            )
        lease = read(GangLeaseView, answer.data, clean=plain) if answer.is_ok else None
        if lease is None:
            raise Failure(f"the lease {self.lease_id} cannot be seen: {plain(answer.why_not)}")
        if lease.state != "active":
            raise Failure(f"the lease {self.lease_id} is {lease.state}, not active", REFUSED)
        return lease

    def _environment(self, part: NodePart) -> dict[str, str]:
        gpus = [Gpu(GpuKey(part.node, ref.uuid), ref.gpu_id or 0, ref.name or "") for ref in part.gpus]
        try:
            return environment(part.env, gpus)
        except UnbelievableGrant as error:
            raise Failure(f"the lease {self.lease_id} cannot be used: {error}") from None

    async def _run(
        self,
        servers: Servers,
        endpoint: str,
        lease: GangLeaseView,
        env: dict[str, str],
        signals: Signals,
    ) -> int:
        ttl_s, shares_terminal = lease.ttl_s or DEFAULT_TTL_S, has_controlling_terminal()
        grace_s = grace_after_loss(self.grace_s, ttl_s)

        def pass_on(received: Received) -> None:
            # What was typed at the terminal has reached the command already.
            if not (shares_terminal and received.is_typed):
                guarded.send_signal(received.number)

        with closing(GuardedCommand()) as guarded:
            await guarded.start(
                self.command,
                env,
                (0, 1, 2),
                group=os.getpgrp() if shares_terminal else 0,
                grace_s=grace_s,
                safe_until=_safe_until(boot_time(), ttl_s),
            )
            following = asyncio.create_task(self._follow(servers, endpoint, guarded, ttl_s, grace_s))
            try:
                async with signals.passed_to(pass_on):
                    code = await guarded.wait()
                return FAILED if following.done() or guarded.was_late else code
            except GuardDied:
                raise Failure("the guard of the command was killed, and the command with it") from None
            finally:
                await cancel_and_wait(following)

    async def _follow(
        self, servers: Servers, endpoint: str, guarded: GuardedCommand, ttl_s: float, grace_s: float
    ) -> None:
        """Keep the guard informed of how long the lease is known to stand; return where it has ended."""
        while True:
            await asyncio.sleep(min(POLL_S, ttl_s / BEATS_PER_TTL / 2))
            asked_at = boot_time()
            try:
                await self._ask(servers, endpoint)
            except Failure as failure:
                if failure.code == REFUSED:
                    complain(f"{failure}; the command is stopped")
                    guarded.end(grace_s)
                    return
            else:
                guarded.tell_safe_until(_safe_until(asked_at, ttl_s))


def _safe_until(seen_at: float, ttl_s: float) -> float:
    """As long as a holder that has just sent a heartbeat."""
    return seen_at + ttl_s * (1 - 1 / BEATS_PER_TTL)
