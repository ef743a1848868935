"""`gpu-pool batch`: the lines of a file as one array of submitted jobs, which this follows."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gpu_worker_pool.cli import options
from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.output import complain, pass_on_warnings, stop_printing
from gpu_worker_pool.failure import USAGE, Failure

if TYPE_CHECKING:
    from .lines import Line


def batch(
    file: Annotated[str, Argument(metavar="FILE|-", help="One command a line, run by /bin/sh; # begins a comment.")],
    asked: options.GpuOptions,
    keep_going: Annotated[bool, Option("--keep-going", "-k", help="Start further jobs after one has failed.")] = False,
    retries: options.Retries = 0,
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
    new: options.New = False,
    json: options.Json = False,
) -> int:
    """Run many commands, each on its own GPUs as they become free.

    The lines are submitted as one array, and followed: `gpu-pool jobs` shows them too. Each job writes to its own log. A state
    file keeps which jobs are done: the same command, after a failure, a Ctrl-C or a crash, runs the others. Without --keep-going
    no more jobs are started once one has failed; those that run may finish.

    A job that is stopped at its --time has failed. One whose GPU another request needed (--preemptible) is run again, whatever
    its exit code.

    Inside a gpu-pool run or another batch, the jobs use the GPUs of that lease; --new requests other GPUs.

    Exit codes: 0 all jobs are done; 1 a job failed; 2 the arguments are invalid or FILE cannot be read; 125 gpu-pool
    failed; 128+N signal N interrupted it.
    """
    from gpu_worker_pool.cli.run.asking import make_spec  # noqa: PLC0415
    from gpu_worker_pool.jobs.job_store import own_store  # noqa: PLC0415 - not for the help

    from .follow import BatchFollower, done_before, submit_lines  # noqa: PLC0415
    from .lines import StateFile  # noqa: PLC0415
    from .progress import Progress  # noqa: PLC0415

    lines = _read_lines(file)
    name = "gpu-pool-batch" if file == "-" else file
    state_path = state or (None if file == "-" else Path(f"{file}.state"))
    folder = logs or Path(f"{name}.logs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(
            f"the folder {folder} for the logs cannot be created: {error.strerror}; name another with --logs"
        ) from None
    spec = make_spec(
        asked,
        ("gpu-pool", "batch", file),
        f"batch {Path(name).name}",
        at_once=parallel,
        retries=retries,
        stops_on_failure=not keep_going,
    )
    pass_on_warnings(complain)
    with StateFile(state_path, is_fresh=fresh) if state_path else nullcontext() as kept:
        progress = Progress(lines, {} if kept is None else done_before(kept), folder)
        code = 0
        if not progress.to_run:
            complain("all jobs were done before; --fresh runs them again")
        else:
            store = own_store()
            lease, record = submit_lines(store, spec, progress, kept, is_new=new)
            code = asyncio.run(BatchFollower(store, record, progress, kept, lease).run())
    try:
        progress.print_summary(state_path, code, is_json=json)
    except BrokenPipeError:
        stop_printing()  # the batch itself is over, and its exit code stands
    return code


def _read_lines(file: str) -> list[Line]:
    from .lines import read_lines  # noqa: PLC0415 - not for the help

    try:
        if file == "-" and sys.stdin is None:
            raise Failure("standard input is closed; name a file", USAGE)
        # As bytes: a text file would take a lone carriage return for the end of a line.
        text = (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode()
    except OSError as error:
        raise Failure(f"{file} cannot be read: {os.strerror(error.errno or 0)}", USAGE) from None
    except UnicodeDecodeError:
        raise Failure(f"{file} cannot be read: it is not UTF-8", USAGE) from None
    try:
        lines = read_lines(text)
    except ValueError as error:
        raise Failure(f"{file} cannot be used: {error}; is it a file of commands, one a line?", USAGE) from None
    if not lines:
        raise Failure(f"{file} has no command in it; write one command a line", USAGE)
    return lines
