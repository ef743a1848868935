"""A command on several boxes of a fleet: the part of this box, and how the others join."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Final, Self
from urllib.parse import urlsplit

from gpu_worker_pool.cli.output import complain, plain
from gpu_worker_pool.cli.pools.reading import ask_pools_or_fail, find_lease, lease_path
from gpu_worker_pool.cli.pools.servers import FLEET, Servers
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.backends.lease_backend import local_time
from gpu_worker_pool.client.backends.server_leases import environment
from gpu_worker_pool.client.pool_client import Assignment
from gpu_worker_pool.core.model.bounds import DEFAULT_TTL_S
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.host.addresses import is_own_address
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.guarded import Guarded, check_can_run
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.jobs.job_spec import JobSpec, parse_key
from gpu_worker_pool.jobs.job_store import own_store
from gpu_worker_pool.jobs.signals import Signals, has_controlling_terminal
from gpu_worker_pool.jobs.supervise import SupervisedCommand, supervise
from gpu_worker_pool.models import GPUAssignment, LeaseEnding
from gpu_worker_pool.notices import BEATS_PER_TTL, EndNotice, Loss
from gpu_worker_pool.wire.leases import GangLeaseView, NodePart
from gpu_worker_pool.wire.pool import FleetList, PoolView
from gpu_worker_pool.wire.reader import read

from .ssh import raise_signals_of_input

NODES_VARIABLE: Final = "GPU_POOL_NODES"
RANK_VARIABLE: Final = "GPU_POOL_NODE_RANK"
# What torchrun and others ask for; a value of the user's own is left as it is.
MASTER_ADDRESS_VARIABLE: Final = "MASTER_ADDR"
MASTER_PORT_VARIABLE: Final = "MASTER_PORT"
MASTER_PORT: Final = "29500"
# How often `join` asks whether the lease stands.
POLL_S: Final = 2.0
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
        hosts = await hosts_of(servers, nodes)
        for url in servers.config.endpoints.values():
            if own is None and is_own_address(url.host):
                # Of this box, whatever the scope of the command is.
                pool = read(PoolView, (await servers.ask_url(url.url, "/pool?queue=0&leases=0")).data, clean=plain)
                own = None if pool is None else pool.node
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
        of_gang = self.env(own, environ) if len(self.nodes) > 1 else {}
        part.env = {**assignment.node_envs.get(own, assignment.env), **of_gang}
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


async def hosts_of(servers: Servers, nodes: Sequence[str]) -> dict[str, str]:
    """The address of each of these boxes; one that the fleet does not name is taken for an address itself."""
    hosts = dict(zip(nodes, nodes, strict=True))
    for endpoint in servers.ids:
        listed = read(FleetList, (await servers.ask(endpoint, FLEET)).data, clean=plain)
        for box in listed.boxes if listed else ():
            if box.node in hosts and box.url and (host := urlsplit(box.url).hostname):
                hosts[box.node] = host
    return hosts


def exec_on_box(node: str, command: Sequence[str], endpoints: Sequence[str] | None) -> int:
    """Become an ssh that runs this there, in the directory of the same name, at the terminal of this process."""
    check_can_run("ssh", os.environ)
    host = Servers(endpoints).run(lambda servers: hosts_of(servers, [node]))[node]
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    there = f"cd {shlex.quote(os.getcwd())} 2>/dev/null; exec {shlex.join(command)}"  # noqa: PTH109 - as it was reached
    os.execvp("ssh", ["ssh", *(["-t"] if has_terminal else []), "--", host, there])  # noqa: S606, S607 - the user's own


def check_gang(spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Raise Failure where --nodes, --ssh and --env do not go together, or --env names something that cannot be passed on:
    better now than after a night in the queue.
    """
    if spec.is_anywhere and (spec.nodes > 1 or spec.uses_ssh or spec.gpu_names):
        raise Failure("--anywhere is for one box, whichever it is; leave --nodes, --ssh and --gpu out", USAGE)
    if spec.nodes == 1 and (spec.uses_ssh or (spec.env_names and not spec.is_anywhere)):
        raise Failure("--ssh and --env are for --nodes; leave them out, or give --nodes 2", USAGE)
    if spec.nodes > 1 and spec.gpu_names:
        raise Failure("--gpu names GPUs of one box; leave it out with --nodes", USAGE)
    if spec.env_names and not (spec.uses_ssh or spec.is_anywhere):
        raise Failure("--env needs --ssh; without it, set the variable on the other boxes yourself", USAGE)
    for name in spec.env_names:
        why = None
        if "=" in name:
            why = f"it takes the name of a variable only; set {name.partition('=')[0]} here"
        elif name not in environ:
            why = "there is no such variable in this environment; set it, or leave it out"
        elif not _VARIABLE.fullmatch(name):
            why = "a shell cannot set a variable of this name; leave it out"
        if why is not None:
            raise Failure(f"--env {shlex.quote(name)}: {why}", USAGE)


def join_command(lease_id: str, command: Sequence[str]) -> list[str]:
    """What to run on the other boxes."""
    return ["gpu-pool", "join", lease_id, "--", *command]


# --- join ----------------------------------------------------------------------------------------------------------


async def join_lease(
    text: str, argv: Sequence[str], grace_s: float, endpoints: Sequence[str] | None, *, reads_signals: bool = False
) -> int:
    """Run a command on this box's part of a lease that another process holds; the exit code. `text` is a job, or the beginning of
    the lease's id. Where it `reads_signals`, standard input has the signals that the holder got, and ends when the holder or its
    connection is gone.
    """
    check_can_run(argv[0], os.environ)
    signals = Signals()
    lease_id, url = _lease_of_job(text)
    async with Servers([url] if url and not endpoints else endpoints, is_fleet=True) as servers:
        own = next((id_ for id_, each in servers.config.endpoints.items() if is_own_address(each.host)), None)
        if own is None:
            raise Failure("no GPU server of this machine is among the endpoints; run it on a box of the lease", USAGE)
        if lease_id is None:
            (found, *_) = await find_lease(servers, await ask_pools_or_fail(servers), text)
            lease_id = found.id
        asked_at, lease = boot_time(), await _active_lease(servers, own, lease_id)
        parts = lease.nodes or (NodePart(node=lease.gpus[0].node or "", gpus=lease.gpus, env=lease.env),)
        gang = await Gang.of(servers, [part.node for part in parts])
        part = next((part for part in parts if part.node in {gang.own, ""}), None)
        if part is None:
            where, here = ", ".join(gang.nodes), gang.own or "this machine"
            raise Failure(f"{here} has no part in the lease {lease_id}, which is on {where}", REFUSED)
        lost, warned = Loss(lease.ttl_s or DEFAULT_TTL_S), EndNotice()
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
            env={**environment(part), **(gang.env(part.node, os.environ) if lease.nodes else {})},
            lost=lost,
            warned=warned,
        )
        group = os.getpgrp() if has_controlling_terminal() else 0
        streams = (os.open(os.devnull, os.O_RDONLY) if reads_signals else 0, 1, 2)
        command = SupervisedCommand(argv=argv, env=os.environ, streams=streams, group=group, grace_s=grace_s)
        following = asyncio.create_task(_follow(servers, own, lease_id, lost, warned))
        if reads_signals:
            raise_signals_of_input()
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


def _lease_of_job(text: str) -> tuple[str | None, str | None]:
    """The lease of a running job of this user, and its server; None where the text is not a job's id."""
    try:
        key = parse_key(text)
    except ValueError:
        return None, None
    record = own_store().load_one(key.number)
    if record is None or not (key.index is None or record.submission.has(key.index)):
        return None, None
    running = [task for task in record.submission.running() if key.index in (None, task.index)]
    run = record.submission.runs.get(running[0].run or "") if running else None
    if run is None or run.lease_id is None:
        raise Failure(f"job {key} does not run; `gpu-pool jobs` lists what does", REFUSED)
    if len(running) > 1:
        raise Failure(f"{len(running)} tasks of job {key} run; name one, as {key.number}_{running[0].index}", USAGE)
    return run.lease_id, run.url


async def _follow(servers: Servers, endpoint: str, lease_id: str, lost: Loss, warned: EndNotice) -> None:
    """Ask again and again whether the lease stands, which counts as a heartbeat of its holder."""
    while not lost.is_set():
        await asyncio.sleep(min(POLL_S, lost.ttl_s / BEATS_PER_TTL / 2))
        asked_at = boot_time()
        try:
            lease = await _active_lease(servers, endpoint, lease_id)
        except Failure as failure:
            if failure.code == REFUSED:
                lost.set(str(failure))
        else:
            lost.extend(asked_at)
            said = lease.warning
            warned.set(
                None if said is None else LeaseEnding(str(said.reason), local_time(time.time() + said.ends_in_s))
            )


async def _active_lease(servers: Servers, endpoint: str, lease_id: str) -> GangLeaseView:
    """The lease, which must be active, and this user's; Failure with REFUSED where it is not, another where that is not
    known.
    """
    answer = await servers.ask(endpoint, lease_path(lease_id))
    if answer.status == HTTPStatus.NOT_FOUND:
        raise Failure(f"there is no lease {lease_id}; `gpu-pool jobs` lists yours", REFUSED)
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
