"""A command on several boxes of a fleet: the part of this box, how ssh starts it on the others, and how they join."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Final, Self
from urllib.parse import urlsplit

from gpu_worker_pool.cli.output import complain, plain
from gpu_worker_pool.cli.pools.lease_search import lease_path
from gpu_worker_pool.cli.pools.servers import FLEET, Servers
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.backends.grant_check import UnbelievableGrant, environment
from gpu_worker_pool.client.pool_client import Assignment
from gpu_worker_pool.core.model.bounds import DEFAULT_TTL_S
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.host.addresses import is_own_address
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.guarded import Ended, Guarded, check_can_run, given_input
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.jobs.signals import Signals, has_controlling_terminal
from gpu_worker_pool.jobs.supervise import SupervisedCommand, supervise
from gpu_worker_pool.models import GPUAssignment
from gpu_worker_pool.notices import BEATS_PER_TTL, Loss
from gpu_worker_pool.wire.fleet import FleetList
from gpu_worker_pool.wire.leases import GangLeaseView, NodePart
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import read

NODES_VARIABLE: Final = "GPU_POOL_NODES"
RANK_VARIABLE: Final = "GPU_POOL_NODE_RANK"
# What torchrun and others ask for; a value of the user's own is left as it is.
MASTER_ADDRESS_VARIABLE: Final = "MASTER_ADDR"
MASTER_PORT_VARIABLE: Final = "MASTER_PORT"
MASTER_PORT: Final = "29500"
# How long the commands that ssh started have to end by themselves when the lease has ended.
END_S: Final = 15.0
SSH_FAILED: Final = 255
# How often `join` asks whether the lease stands.
POLL_S: Final = 2.0
_READ_VARIABLES: Final = 'eval "$(cat)" && exec "$@"'
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Gang:
    """The nodes of a lease, in the order of their ranks, and the addresses of their boxes. `own` is the node of this box;
    None where no server of the fleet runs here.
    """

    nodes: tuple[str, ...]
    own: str | None
    hosts: Mapping[str, str]

    @classmethod
    async def of(cls, servers: Servers, nodes: Sequence[str]) -> Self:
        """Ask which box this is, and where the others are."""
        own = None
        hosts = dict(zip(nodes, nodes, strict=True))
        for endpoint, url in servers.config.endpoints.items():
            if own is None and is_own_address(url.host):
                # Of this box, whatever the scope of the command is.
                pool = read(PoolView, (await servers.ask_url(url.url, "/pool?queue=0&leases=0")).data, clean=plain)
                own = None if pool is None else pool.node
            listed = read(FleetList, (await servers.ask(endpoint, FLEET)).data, clean=plain)
            for box in listed.boxes if listed else ():
                if box.node in hosts and box.url and (host := urlsplit(box.url).hostname):
                    hosts[box.node] = host
        return cls(tuple(nodes), own, hosts)

    @property
    def has_part_here(self) -> bool:
        return self.own in self.nodes

    @property
    def others(self) -> list[str]:
        return [node for node in self.nodes if node != self.own]

    @staticmethod
    def gpu_names(assignment: Assignment) -> tuple[str, ...]:
        """`gpu-1:0`: the node and the index, whatever the endpoints are called."""
        indices = (str(gpu_id).rpartition(":")[2] for gpu_id in assignment.gpu_ids)
        return tuple(f"{node}:{index}" for node, index in zip(assignment.nodes, indices, strict=True))

    def part(self, assignment: Assignment, environ: Mapping[str, str]) -> Assignment:
        """This box's part of the lease, with the environment of a command here."""
        part, own = copy(assignment), self.own or ""
        mine = [place for place, node in enumerate(assignment.nodes) if node == own]
        part.gpu_ids = tuple(int(str(assignment.gpu_ids[place]).rpartition(":")[2]) for place in mine)
        part.uuids, part.nodes = tuple(assignment.uuids[place] for place in mine), (own,) * len(mine)
        part.env = {**assignment.node_envs[own], **self.env(own, environ)}
        return part

    def env(self, node: str, environ: Mapping[str, str]) -> dict[str, str]:
        """What a process on this node is told of the others."""
        return {
            NODES_VARIABLE: ",".join(self.nodes),
            RANK_VARIABLE: str(self.nodes.index(node)),
            **self.master(environ),
        }

    def master(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The address of the first box, which must be the same everywhere."""
        return {
            MASTER_ADDRESS_VARIABLE: environ.get(MASTER_ADDRESS_VARIABLE) or self.hosts[self.nodes[0]],
            MASTER_PORT_VARIABLE: environ.get(MASTER_PORT_VARIABLE) or MASTER_PORT,
        }


def check_gang(nodes: int, names: Sequence[str], environ: Mapping[str, str], *, uses_ssh: bool) -> None:
    """Raise Failure where --nodes, --ssh and --env do not go together, or --env names something that cannot be passed on:
    better now than after a night in the queue.
    """
    if nodes == 1 and (uses_ssh or names):
        raise Failure("--ssh and --env are for --nodes; leave them out, or give --nodes 2", USAGE)
    if names and not uses_ssh:
        raise Failure("--env needs --ssh; without it, set the variable on the other boxes yourself", USAGE)
    for name in names:
        if "=" in name:
            raise Failure(
                f"--env {name}: it takes the name of a variable only; set {name.partition('=')[0]} here", USAGE
            )
        if name not in environ:
            raise Failure(
                f"--env {shlex.quote(name)}: there is no such variable in this environment; set it, or leave it out",
                USAGE,
            )
        if not _VARIABLE.fullmatch(name):
            raise Failure(f"--env {shlex.quote(name)}: a shell cannot set a variable of this name; leave it out", USAGE)


def join_line(lease_id: str, command: Sequence[str]) -> str:
    """What to type on the other boxes."""
    return shlex.join(["gpu-pool", "join", lease_id, "--", *command])


class OtherBoxes:
    """The commands on the other boxes, started by the user's own ssh, each under a guard. They end by themselves when the
    lease does; leave the block after its release.
    """

    def __init__(self) -> None:
        self._guards = AsyncExitStack()
        self._running: dict[asyncio.Task[Ended], str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=END_S)
        for task in self._running:
            task.cancel()
        await self._guards.aclose()

    async def start(self, gang: Gang, lease_id: str, command: Sequence[str], names: Sequence[str]) -> None:
        """Start it on each, in the same directory, with the variables of these names."""
        check_can_run("ssh", os.environ)
        given = {name: os.environ[name] for name in names} | gang.master(os.environ)
        # Every user of a machine can read command lines, so the values go over standard input.
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in given.items())
        there = f"cd {shlex.quote(os.getcwd())} && exec sh -c {shlex.quote(_READ_VARIABLES)} sh {join_line(lease_id, command)}"  # noqa: PTH109
        for node in gang.others:
            guarded = await self._guards.enter_async_context(Guarded.start())
            with given_input(exports.encode(errors="surrogateescape")) as sent:
                # After --, a host is not an option, whatever its name is.
                ssh = ["ssh", "-o", "BatchMode=yes", "--", gang.hosts[node], there]
                await guarded.run(ssh, os.environ, (sent, 1, 2), grace_s=END_S)
            self._running[asyncio.create_task(guarded.wait())] = node

    async def wait(self) -> tuple[int, str] | None:
        """Wait until one has failed: its exit code, and what to say. None when all have ended well."""
        left = set(self._running)
        while left:
            ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                if code := task.result().exit_code:
                    reason = ", or ssh could not connect" if code == SSH_FAILED else ""
                    what = f"the command on {self._running[task]} ended with exit code {code}{reason}"
                    return code, f"{what}; the other boxes' commands are ended"
        return None


# --- join ----------------------------------------------------------------------------------------------------------


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
        command = SupervisedCommand(argv=argv, env=os.environ, group=group, grace_s=grace_s)
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
