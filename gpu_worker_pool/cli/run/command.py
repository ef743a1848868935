"""`gpu-pool run` and `gpu-pool join`: their options."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

from gpu_worker_pool.cli import options
from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.failure import USAGE, Failure

GpusOrAll = Annotated[
    int | None,
    Option(
        "--gpus",
        "-g",
        metavar="NUMBER",
        min=1,
        max=1024,
        help="How many GPUs, all in one machine, all or nothing. By default 1; inside a lease all that it has.",
    ),
]


def run(
    command: options.Command,
    gpus: GpusOrAll = None,
    memory: options.MemoryPerGpu = None,
    model: options.Model = None,
    priority: options.Priority = 0,
    timeout: options.Timeout = None,
    time: options.TimeLimit = None,
    preemptible: options.Preemptible = False,
    grace: options.Grace = 10.0,
    name: options.Name = None,
    remote: options.Remote = False,
    new: options.New = False,
    nodes: options.Nodes = 1,
    ssh: options.Ssh = False,
    env: options.EnvNames = None,
    on_granted: options.OnGranted = None,
    notify: options.Notify = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print only warnings and failures.")] = False,
    json: Annotated[
        bool, Option("--json", help="Print events on standard error as JSON lines (see docs/CLI.md).")
    ] = False,
    endpoint: options.Endpoints = None,
) -> int:
    """Wait for GPUs, run a command on them, release them.

    The command gets CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. If CUDA_VISIBLE_DEVICES is set already, only GPUs among
    those are requested. Inside another gpu-pool run or batch, the command uses the GPUs of that lease, as soon as no other
    command inside it does; --new requests other GPUs. Processes that the command leaves running when it ends are ended too.

    With --nodes the command is started here for the part of this box, with GPU_POOL_NODES, GPU_POOL_NODE_RANK, MASTER_ADDR
    and MASTER_PORT; on the others `gpu-pool join` starts it, or --ssh does.

    Exit codes are those of timeout(1): the command's own; 128+N if signal N ended it; 124 if --timeout passed before
    there was a GPU; 125 if gpu-pool failed or the lease was lost; 126 if the command cannot be run; 127 if there is
    no such command. And 123 if the command was stopped at its time limit; 122 if another request needed its GPU, or the
    GPU was idle.
    """
    from gpu_worker_pool.client.command_label import command_label, label_text  # noqa: PLC0415 - as all: not for the help
    from gpu_worker_pool.jobs.leases import GpuRequest  # noqa: PLC0415
    from gpu_worker_pool.jobs.notices import JOB_ID_VARIABLE, rules_of_options, told  # noqa: PLC0415

    from .gang import check_gang  # noqa: PLC0415
    from .reporter import RunReporter  # noqa: PLC0415
    from .runner import Runner  # noqa: PLC0415

    if not command[0]:
        raise Failure("the command is empty; write it after --, as in: gpu-pool run -- python train.py", USAGE)
    label = label_text(name) if name else command_label(command)
    check_gang(nodes, env or (), os.environ, uses_ssh=ssh)
    request = GpuRequest(gpus or 1, memory, model, priority, timeout, {"command": label}, new, time, preemptible, nodes)
    rules = rules_of_options(on_granted, notify, os.environ)

    async def run_and_tell() -> int:
        async with told(rules, label, os.environ.get(JOB_ID_VARIABLE)) as notices:
            reporter = RunReporter(is_json=json, is_quiet=quiet, notices=notices)
            runner = Runner(command, request, grace, remote, endpoint, reporter, gpus is None, ssh, tuple(env or ()))
            return await runner.run()

    return asyncio.run(run_and_tell())


def join(
    id_: Annotated[str, Argument(metavar="LEASE_ID", help="The lease, as `gpu-pool run --nodes` prints it.")],
    command: options.Command,
    grace: options.Grace = 10.0,
    endpoint: options.Endpoints = None,
) -> int:
    """Run a command on this box's part of a lease that `gpu-pool run --nodes` holds.

    You must be its owner. The command ends when the lease does; its own end does not end the lease.
    Exit codes are those of `gpu-pool run`.
    """
    if not command[0]:
        raise Failure("the command is empty; write it after --, as in: gpu-pool join ID -- python train.py", USAGE)
    from .gang import join_lease  # noqa: PLC0415 - loads the client

    return asyncio.run(join_lease(id_, command, grace, endpoint))
