"""`gpu-pool run` and `gpu-pool join`: their options."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

from gpu_worker_pool.cli import options
from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.failure import USAGE, Failure


def run(
    command: options.Command,
    asked: options.CommandOptions,
    new: options.New = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print only warnings and failures.")] = False,
    json: Annotated[
        bool, Option("--json", help="Print events on standard error as JSON lines (see docs/how-to/scripts.md).")
    ] = False,
) -> int:
    """Wait for GPUs, run a command on them, release them.

    The command gets CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. If CUDA_VISIBLE_DEVICES is set already, only GPUs among
    those are requested. Inside another gpu-pool run or batch, the command uses the GPUs of that lease, as soon as no other
    command inside it does; --new requests other GPUs. Processes that the command leaves running when it ends are ended too.

    With --anywhere it waits once, in the queue of the whole fleet, and runs on the box whose GPUs are granted.
    With --nodes the command is started here for the part of this box, with GPU_POOL_NODES, GPU_POOL_NODE_RANK, MASTER_ADDR
    and MASTER_PORT; on the others `gpu-pool join` starts it, or --ssh does.

    Exit codes are those of timeout(1): the command's own; 128+N if signal N ended it; 124 if --timeout passed before
    there was a GPU; 125 if gpu-pool failed or the lease was lost; 126 if the command cannot be run; 127 if there is
    no such command. And 123 if the command was stopped at its time limit; 122 if another request needed its GPU, or the
    GPU was idle.
    """
    from gpu_worker_pool.jobs.job_spec import JOB_ID_VARIABLE  # noqa: PLC0415 - as all: not for the help
    from gpu_worker_pool.jobs.notices import rules_of_options, told  # noqa: PLC0415

    from .asking import make_spec  # noqa: PLC0415
    from .gang import check_gang  # noqa: PLC0415
    from .reporter import RunReporter  # noqa: PLC0415
    from .runner import Runner  # noqa: PLC0415

    spec = make_spec(asked, command, cwd=".")
    check_gang(spec, os.environ)
    rules = rules_of_options(spec, os.environ)

    async def run_and_tell() -> int:
        async with told(rules, spec.label, os.environ.get(JOB_ID_VARIABLE)) as notices:
            reporter = RunReporter(is_json=json, is_quiet=quiet, notices=notices)
            takes_all = asked.gpus is None and asked.gpu is None
            return await Runner(spec, reporter, is_new=new, takes_all=takes_all).run()

    return asyncio.run(run_and_tell())


def exec(  # noqa: A001 - the command
    id_: Annotated[str, Argument(metavar="ID", help="A running job (12, 12_3), or the beginning of a lease's id.")],
    command: options.Command,
    grace: options.Grace = 10.0,
    endpoint: options.Endpoints = None,
    signals: Annotated[bool, Option("--signals", hidden=True)] = False,
) -> int:
    """Run a second command inside a running job or lease of yours: a debugger, or `nvidia-smi` of its GPU.

    It gets the environment of the lease. It ends when the lease does; its own end does not end the lease. In a lease of
    `gpu-pool run --nodes` it gets this box's part. Exit codes are those of `gpu-pool run`.
    """
    if not command[0]:
        raise Failure("the command is empty; write it after --, as in: gpu-pool exec 12 -- nvidia-smi", USAGE)
    from .gang import join_lease  # noqa: PLC0415 - loads the client

    return asyncio.run(join_lease(id_, command, grace, endpoint, reads_signals=signals))


def on(
    box: Annotated[
        str, Argument(metavar="BOX", help="A box of the fleet, as `gpu-pool fleet` names it, or its address.")
    ],
    command: Annotated[
        list[str], Argument(metavar="-- CMD [ARG]...", help="A command of gpu-pool with its arguments: `logs -f 12`.")
    ],
    endpoint: options.Endpoints = None,
) -> int:
    """Run a command of gpu-pool on another box of the fleet, by your own ssh, in the same directory.

    Submitted jobs and their output are kept on the box where they were submitted: `gpu-pool on gpu-2 logs -f 12`, and the
    same for `jobs`, `history`, `cancel` and `retry`. Exit codes are those of the command; 255 if ssh failed.
    """
    from .gang import exec_on_box  # noqa: PLC0415 - loads the client

    return exec_on_box(box, ["gpu-pool", *command], endpoint)
