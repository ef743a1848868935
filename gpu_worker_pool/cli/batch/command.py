"""`gpu-pool batch`: its options, and its summary."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.failure import SIGNAL_BASE, USAGE, Failure
from gpu_worker_pool.cli.options import (
    Endpoints,
    Gpus,
    Grace,
    Json,
    MemoryPerGpu,
    Model,
    New,
    Preemptible,
    Priority,
    Remote,
    Retries,
    TimeLimit,
    Timeout,
)
from gpu_worker_pool.cli.output import complain, err, pass_on_warnings, stop_printing

if TYPE_CHECKING:
    from .runner import BatchPlan
    from .state import StateFile

SOME_FAILED = 1


def batch(
    file: Annotated[str, Argument(metavar="FILE|-", help="One command a line, run by /bin/sh; # begins a comment.")],
    gpus: Gpus = 1,
    memory: MemoryPerGpu = None,
    model: Model = None,
    priority: Priority = 0,
    timeout: Timeout = None,
    time: TimeLimit = None,
    preemptible: Preemptible = False,
    keep_going: Annotated[bool, Option("--keep-going", "-k", help="Start further jobs after one has failed.")] = False,
    retries: Retries = 0,
    parallel: Annotated[
        int | None,
        Option(
            "--parallel",
            "-j",
            metavar="NUMBER",
            min=1,
            max=1000,
            help="How many jobs at once; by default one for each GPU, with --memory eight.",
        ),
    ] = None,
    logs: Annotated[
        Path | None, Option(metavar="FOLDER", help="The folder for each job's output; by default FILE.logs.")
    ] = None,
    state: Annotated[
        Path | None,
        Option(metavar="FILE", help="Which jobs are done, for the next run; by default FILE.state (none for -)."),
    ] = None,
    fresh: Annotated[bool, Option("--fresh", help="Run all jobs, also those that were done before.")] = False,
    grace: Grace = 10.0,
    remote: Remote = False,
    new: New = False,
    json: Json = False,
    endpoint: Endpoints = None,
) -> int:
    """Run many commands, each on its own GPUs as they become free.

    Each job writes to its own log. A state file keeps which jobs are done: the same command, after a failure, a Ctrl-C
    or a crash, runs the others. Without --keep-going no more jobs are started once one has failed; those that run may
    finish.

    A job that is stopped at its --time has failed. One whose GPU another request needed (--preemptible) waits at its place
    again. A job that ends with 0 after the warning is done.

    Inside a gpu-pool run or another batch, the jobs use the GPUs of that lease; --new requests other GPUs.

    Exit codes: 0 all jobs are done; 1 a job failed; 2 the arguments are invalid or FILE cannot be read; 125 gpu-pool
    failed; 128+N signal N interrupted it.
    """
    from gpu_worker_pool.cli.run.gpu_request import GpuRequest  # noqa: PLC0415 - loads the client
    from gpu_worker_pool.client.command_label import label_text  # noqa: PLC0415

    from .jobs import Batch, read_jobs  # noqa: PLC0415 - the same
    from .runner import BatchPlan  # noqa: PLC0415
    from .state import StateFile  # noqa: PLC0415
    from .view import print_summary  # noqa: PLC0415

    text = _read(file)
    try:
        jobs = read_jobs(text)
    except ValueError as error:
        raise Failure(f"{file} cannot be used: {error}; is it a file of commands, one a line?", USAGE) from None
    if not jobs:
        raise Failure(f"{file} has no command in it; write one command a line", USAGE)
    name = "gpu-pool-batch" if file == "-" else file
    state_path = state or (None if file == "-" else Path(f"{file}.state"))
    folder = logs or Path(f"{name}.logs")
    labels = {"command": label_text(f"batch {Path(name).name}")}
    request = GpuRequest(gpus, memory, model, priority, timeout, labels, new, time, preemptible)
    work = Batch(jobs, retries=retries, keeps_going=keep_going)
    plan = BatchPlan(work, request, folder, grace, parallel, is_remote=remote)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(
            f"the folder {folder} for the logs cannot be created: {error.strerror}; name another with --logs"
        ) from None
    pass_on_warnings(complain)
    with StateFile(state_path, is_fresh=fresh) if state_path else nullcontext() as kept:
        if kept is not None:
            work.skip(kept.load(), kept.preemptions)
        code = asyncio.run(_run(plan, kept, endpoint))
    try:
        print_summary(work, folder, state_path, code, is_json=json)
    except BrokenPipeError:
        stop_printing()  # the batch itself is over, and its exit code stands
    return code


def _read(file: str) -> str:
    try:
        if file == "-":
            if sys.stdin is None:
                raise Failure("standard input is closed; name a file", USAGE)
            return sys.stdin.buffer.read().decode()
        # As bytes: a text file would take a lone carriage return for the end of a line.
        return Path(file).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise Failure(f"{file} cannot be read: {reason}", USAGE) from None


async def _run(plan: BatchPlan, kept: StateFile | None, endpoints: list[str] | None) -> int:
    from gpu_worker_pool.cli.run.gpu_request import core_request  # noqa: PLC0415 - loads the client
    from gpu_worker_pool.cli.run.sources import Sources, check_inside, choose_sources, find_lease_around  # noqa: PLC0415

    from .runner import BatchRunner  # noqa: PLC0415 - the same
    from .view import BatchDisplay  # noqa: PLC0415

    work = plan.batch
    if work.done == len(work.jobs):
        complain("all jobs were done before; --fresh runs them again")
        return 0
    lease = None if plan.request.is_new else find_lease_around(endpoints, os.environ)
    if lease is None:
        sources = await choose_sources(endpoints, os.environ, is_remote=plan.is_remote, is_new=plan.request.is_new)
    else:
        check_inside(lease, core_request(plan.request).wishes, os.environ)
        sources = Sources.inside(lease)
    display = BatchDisplay(work, err())
    runner = BatchRunner(plan, sources, kept, display.attempt_ended)
    display.running = runner.running
    with display.shown():
        await runner.run()
    if runner.interrupted_by is not None:
        return SIGNAL_BASE + runner.interrupted_by
    return SOME_FAILED if work.done < len(work.jobs) else 0
