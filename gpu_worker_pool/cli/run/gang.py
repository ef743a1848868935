"""A command on several boxes of a fleet: the part of this box, and how the others join."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Self
from urllib.parse import urlsplit

from gpu_worker_pool.cli.failure import SIGNAL_BASE, USAGE, Failure
from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.cli.pools.servers import FLEET, Servers
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.pool_client import Assignment
from gpu_worker_pool.host.addresses import is_own_address
from gpu_worker_pool.wire.fleet import FleetList
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import read

from .sources import Sources

NODES_VARIABLE: Final = "GPU_POOL_NODES"
RANK_VARIABLE: Final = "GPU_POOL_NODE_RANK"
# What torchrun and others ask for; a value of the user's own is left as it is.
MASTER_ADDRESS_VARIABLE: Final = "MASTER_ADDR"
MASTER_PORT_VARIABLE: Final = "MASTER_PORT"
MASTER_PORT: Final = "29500"
# How long the commands that ssh started have to end by themselves when the lease has ended.
END_S: Final = 15.0
SSH_FAILED: Final = 255
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
    async def find(cls, servers: Servers, assignment: Assignment) -> Self:
        """Ask which box this is, and where the others are."""
        return await cls.of(servers, tuple(assignment.node_envs))

    @classmethod
    async def of(cls, servers: Servers, nodes: Sequence[str]) -> Self:
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

    def env(self, node: str, environ: Mapping[str, str]) -> dict[str, str]:
        """What a process on this node is told of the others."""
        return {
            NODES_VARIABLE: ",".join(self.nodes),
            RANK_VARIABLE: str(self.nodes.index(node)),
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


def gang_sources(sources: Sources) -> Sources:
    """The same servers, asked for GPUs of the whole fleet."""
    return replace(sources, scope="fleet", among=None)


def join_line(lease_id: str, command: Sequence[str]) -> str:
    """What to type on the other boxes."""
    return shlex.join(["gpu-pool", "join", lease_id, "--", *command])


@dataclass(frozen=True, slots=True)
class FailedBox:
    """A command on another box that failed. ssh has 255 for its own failures."""

    node: str
    code: int

    def __str__(self) -> str:
        reason = ", or ssh could not connect" if self.code == SSH_FAILED else ""
        return (
            f"the command on {self.node} ended with exit code {self.code}{reason}; the other boxes' commands are ended"
        )


class OtherBoxes:
    """The commands on the other boxes, started by the user's own ssh. They end by themselves when the lease does."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._started: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, gang: Gang, lease_id: str, command: Sequence[str]) -> None:
        """Start it on each, in the same directory, with the variables that were asked for. Failure without ssh."""
        given = {name: os.environ[name] for name in self._names}
        # MASTER_ADDR and its like must be the same everywhere.
        given |= {name: value for name, value in gang.env(gang.nodes[0], os.environ).items() if "MASTER" in name}
        # Every user of a machine can read command lines, so the values go over standard input.
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in given.items())
        there = f"cd {shlex.quote(os.getcwd())} && exec sh -c {shlex.quote(_READ_VARIABLES)} sh {join_line(lease_id, command)}"  # noqa: PTH109
        for node in gang.others:
            try:
                self._started[node] = started = await asyncio.create_subprocess_exec(
                    "ssh", "-o", "BatchMode=yes", gang.hosts[node], there, stdin=asyncio.subprocess.PIPE
                )
            except OSError as error:
                raise Failure(
                    f"ssh cannot be run: {error.strerror}; leave --ssh out, and start the others yourself"
                ) from None
            if started.stdin is not None:
                started.stdin.write(exports.encode(errors="surrogateescape"))
                started.stdin.close()

    async def failure(self) -> FailedBox | None:
        """Wait until one has failed, which is returned, or until all have ended well."""
        waiting = {asyncio.create_task(process.wait()): node for node, process in self._started.items()}
        left = set(waiting)
        try:
            while left:
                ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    if code := task.result():
                        return FailedBox(waiting[task], code if code > 0 else SIGNAL_BASE - code)
            return None
        finally:
            await cancel_and_wait(*waiting)

    async def end(self) -> None:
        """Called when the lease is over: they end by themselves; those that do not are hung up on."""
        waiting = [asyncio.create_task(process.wait()) for process in self._started.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=END_S)
        for process in self._started.values():
            with suppress(ProcessLookupError):
                process.terminate()
