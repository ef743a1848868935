"""`gpu-pool join`: this box's part of a lease that `gpu-pool run --nodes` holds on another one."""

from __future__ import annotations

import asyncio
from typing import Annotated

from gpu_worker_pool.cli import options
from gpu_worker_pool.cli.declare import Argument
from gpu_worker_pool.cli.failure import USAGE, Failure


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
    from .joiner import Joiner  # noqa: PLC0415 - loads the client

    if not command[0]:
        raise Failure("the command is empty; write it after --, as in: gpu-pool join ID -- python train.py", USAGE)
    return asyncio.run(Joiner(id_, command, grace).run(endpoint))
