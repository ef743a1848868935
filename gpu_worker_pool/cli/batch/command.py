"""`gpu-pool batch`: the lines of a file as one array of submitted jobs, which this follows."""

from __future__ import annotations

import asyncio
import os
import sys
import time as clock
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from gpu_worker_pool.cli import options
from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.output import complain, pass_on_warnings, stop_printing
from gpu_worker_pool.failure import USAGE, Failure

if TYPE_CHECKING:
    from gpu_worker_pool.jobs.job_spec import JobSpec
    from gpu_worker_pool.jobs.job_store import JobRecord, JobStore

    from .lines import StateFile
    from .progress import Progress

# Jobs that share GPUs: how many request at once for each GPU. Those that do not fit wait in the queue.
SHARERS_PER_GPU: Final = 8
_LOOK_S: Final = 0.1
# How often the keeper is looked for: one that was killed is started again.
_KEEPER_S: Final = 2.0


def batch(
    file: Annotated[str, Argument(metavar="FILE|-", help="One command a line, run by /bin/sh; # begins a comment.")],
    gpus: options.Gpus = 1,
    memory: options.MemoryPerGpu = None,
    model: options.Model = None,
    priority: options.Priority = 0,
    timeout: options.Timeout = None,
    time: options.TimeLimit = None,
    preemptible: options.Preemptible = False,
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
    grace: options.Grace = 10.0,
    remote: options.Remote = False,
    new: options.New = False,
    json: options.Json = False,
    endpoint: options.Endpoints = None,
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
    from gpu_worker_pool.cli.jobs.submit import current_directory, current_umask  # noqa: PLC0415 - not for the help
    from gpu_worker_pool.client.command_label import label_text  # noqa: PLC0415
    from gpu_worker_pool.jobs.job_spec import JobSpec  # noqa: PLC0415

    from .lines import StateFile, read_lines  # noqa: PLC0415
    from .progress import Progress  # noqa: PLC0415

    try:
        lines = read_lines(_read(file))
    except ValueError as error:
        raise Failure(f"{file} cannot be used: {error}; is it a file of commands, one a line?", USAGE) from None
    if not lines:
        raise Failure(f"{file} has no command in it; write one command a line", USAGE)
    name = "gpu-pool-batch" if file == "-" else file
    state_path = state or (None if file == "-" else Path(f"{file}.state"))
    folder = logs or Path(f"{name}.logs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(
            f"the folder {folder} for the logs cannot be created: {error.strerror}; name another with --logs"
        ) from None
    spec = JobSpec(
        submitted_at=clock.time(),
        command=("gpu-pool", "batch", file),
        label=label_text(f"batch {Path(name).name}"),
        name=f"batch {Path(name).name}",
        cwd=current_directory(),
        umask=current_umask(),
        gpus=gpus,
        memory_mb=memory,
        model=model,
        priority=priority,
        timeout_s=timeout,
        time_limit_s=time,
        is_preemptible=preemptible,
        grace_s=grace,
        is_remote=remote,
        endpoints=None if endpoint is None else tuple(endpoint),
        at_once=parallel,
        retries=retries,
        stops_on_failure=not keep_going,
    )
    pass_on_warnings(complain)
    with StateFile(state_path, is_fresh=fresh) if state_path else nullcontext() as kept:
        done = {} if kept is None else _done_before(kept)
        progress = Progress(lines, done, folder)
        if progress.to_run():
            code = _run(spec, progress, kept, is_new=new)
        else:
            complain("all jobs were done before; --fresh runs them again")
            code = 0
    try:
        progress.print_summary(state_path, code, is_json=json)
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


def _done_before(kept: StateFile) -> dict[str, Any]:
    """The lines that were done, by key. A batch that was killed is waited for: the keeper ends it, and its journal says what
    became of each line.
    """
    from gpu_worker_pool.jobs.job_store import JobStore  # noqa: PLC0415 - not for the help
    from gpu_worker_pool.jobs.journal import JobJournal  # noqa: PLC0415
    from gpu_worker_pool.jobs.life import JobState  # noqa: PLC0415

    from .lines import is_good  # noqa: PLC0415
    from .progress import Attempts  # noqa: PLC0415

    done, last, noted = kept.load()
    store = JobStore(Path("" if last is None else str(last["folder"])))
    record = None if last is None else store.load_one(int(last["submission"]))
    if last is None or record is None or record.journal is None:
        return done
    _wait_for_killed(store, record)
    events = JobJournal(record.journal.path, record.submission.terms).refresh()
    attempts = Attempts(record, {int(index): key for index, key in last["keys"].items()})
    for event, facts in list(attempts.ended(events))[noted:]:
        if event.becomes is not JobState.CANCELLED:
            kept.append(facts)
        if is_good(facts):
            done[str(facts["job"])] = facts
    return done


def _wait_for_killed(store: JobStore, record: JobRecord) -> None:
    from gpu_worker_pool.jobs.keeper_link import wake_keeper  # noqa: PLC0415 - not for the help

    told: set[int | None] = set()
    looked_at = -_KEEPER_S
    while not record.submission.is_over:
        if record.number not in store.live_numbers():
            _close_what_is_gone(record)
        elif clock.monotonic() - looked_at >= _KEEPER_S:
            looked_at = clock.monotonic()
            wake_keeper(store)
        for life in record.submission.running():
            run = record.submission.runs.get(life.run or "")
            if life.key.index not in told and run is not None:
                told.add(life.key.index)
                complain(
                    f"job {life.key.index} still runs (pid {run.guard_pid}) under the batch that was killed; waiting for it"
                )
        clock.sleep(_LOOK_S)
        record.refresh()


def _close_what_is_gone(record: JobRecord) -> None:
    """Write down the end of a batch inside a lease, which ran its lines itself: no keeper looks after those."""
    from gpu_worker_pool.core.model.gpu import ProcessId  # noqa: PLC0415 - not for the help
    from gpu_worker_pool.host.identity import Machine  # noqa: PLC0415
    from gpu_worker_pool.jobs.life import CancelAsked, JobEvent, Submission, abandoned  # noqa: PLC0415

    machine = Machine.here()

    def close(submission: Submission) -> list[JobEvent]:
        events: list[JobEvent] = []
        for run in submission.open_runs.values():
            is_same_boot = run.boot_id == machine.boot_id
            processes = (ProcessId(run.pid, run.started), ProcessId(run.guard_pid, run.guard_started))
            if is_same_boot and any(map(machine.is_alive, processes)):
                return []
            events += abandoned(submission, run, clock.time(), is_same_boot=is_same_boot)
        return [*events, CancelAsked(at=clock.time())]

    record.write(close)


def _run(spec: JobSpec, progress: Progress, kept: StateFile | None, *, is_new: bool) -> int:
    """Submit the lines that are not done, and follow them."""
    from gpu_worker_pool.cli.jobs.jobs import own_store  # noqa: PLC0415 - not for the help
    from gpu_worker_pool.cli.jobs.submit import environment_to_keep, wake_for, with_servers  # noqa: PLC0415
    from gpu_worker_pool.cli.run.sources import check_inside, find_lease_around  # noqa: PLC0415
    from gpu_worker_pool.host.clock import boot_id  # noqa: PLC0415
    from gpu_worker_pool.host.identity import own_proc  # noqa: PLC0415
    from gpu_worker_pool.host.processes import ProcessTable  # noqa: PLC0415
    from gpu_worker_pool.jobs.adopt import request_of  # noqa: PLC0415
    from gpu_worker_pool.jobs.job_spec import BatchFacts  # noqa: PLC0415

    from .follow import BatchFollower  # noqa: PLC0415

    store, lines, proc = own_store(), progress.to_run(), own_proc()
    lease = find_lease_around(spec.endpoints, os.environ)
    environ, is_inside = dict(os.environ), lease is not None and not is_new
    if is_inside and lease is not None:
        check_inside(lease, request_of(spec).as_request().wishes, os.environ)
        spec = replace(spec, at_once=spec.at_once or max(len(lease.gpus) // spec.gpus, 1))
    else:
        environ = environment_to_keep(environ, is_told=False)
        if lease is not None and not spec.endpoints:
            spec = replace(spec, endpoints=(lease.url.url,))
        spec = with_servers(spec, environ, sharers=SHARERS_PER_GPU)
    facts = BatchFacts(
        lines=tuple(line.command for line in lines),
        logs=tuple(str(progress.log_of(line).absolute()) for line in lines),
        pid=os.getpid(),
        pid_started=ProcessTable(proc).started(os.getpid()) if proc else None,
        boot_id=boot_id(),
    )
    spec = replace(spec, batch=facts, array=tuple(line.number for line in lines))
    number = store.submit(spec, environ, is_live=not is_inside)
    record = store.load_one(number)
    if record is None:
        raise Failure(f"the submission {number} of this batch was removed")
    if kept is not None:
        keys = {str(line.number): line.key for line in lines}
        kept.append({"submission": number, "folder": str(store.root), "keys": keys})
    progress.record = record
    follower = BatchFollower(store, record, progress, kept)
    if not is_inside:
        wake_for(store, number)
    return asyncio.run(follower.run(is_inside=is_inside))
