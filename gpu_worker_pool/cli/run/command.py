"""`gpu-pool run`: its options."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from gpu_worker_pool.cli.failure import USAGE, Failure
from gpu_worker_pool.cli.options import (
    Endpoints,
    Gpus,
    Grace,
    Memory,
    Model,
    OnLost,
    Priority,
    Remote,
    Timeout,
    WhenLost,
)


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD…", help="The command, with all that belongs to it.")],
    gpus: Gpus = 1,
    memory: Memory = None,
    model: Model = None,
    priority: Priority = 0,
    timeout: Timeout = None,
    on_lost: WhenLost = OnLost.STOP,
    grace: Grace = 10.0,
    name: Annotated[
        str | None, typer.Option(help="What others see of it in `status`; otherwise its program and script.")
    ] = None,
    remote: Remote = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but what goes wrong.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Say on standard error what happens, as JSON lines (see docs/CLI.md).")
    ] = False,
    endpoint: Endpoints = None,
) -> int:
    """Wait for GPUs, run a command on them, give them back.

    CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are set for it; where CUDA_VISIBLE_DEVICES is set already, only GPUs among
    those are asked for. What the command leaves running when it ends is ended too.

    Exit codes are those of timeout(1): the command's own, 128+N where signal N ended it, 124 where --timeout passed
    while waiting, 125 where gpu-pool failed or the lease was lost, 126 and 127 where the command cannot be run or found.
    """
    from .gpu_request import GpuRequest  # noqa: PLC0415 - loads the client
    from .labels import command_label, label_text  # noqa: PLC0415
    from .reporter import RunReporter  # noqa: PLC0415
    from .runner import Runner, RunPlan  # noqa: PLC0415

    if not command[0]:
        raise Failure("there is no command to run; write it after --, as in: gpu-pool run -- python train.py", USAGE)
    request = GpuRequest(
        gpus=gpus,
        memory_mb=memory,
        model=model,
        priority=priority,
        timeout_s=timeout,
        labels={"command": label_text(name) if name else command_label(command)},
    )
    plan = RunPlan(tuple(command), request, on_lost, grace, is_remote=remote)
    return asyncio.run(Runner(plan, endpoint, RunReporter(is_json=json, is_quiet=quiet)).run())
