"""`gpu-pool submit`: its options."""

from __future__ import annotations

import os
import sys
import time as clock
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Annotated

from gpu_worker_pool.cli import options
from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.output import complain, print_json
from gpu_worker_pool.cli.units import count, parse_memory_mb
from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.jobs.life import AfterFailure

from .jobs import own_store

if TYPE_CHECKING:
    from gpu_worker_pool.cli.pools.servers import Servers
    from gpu_worker_pool.core.model.request import Wishes
    from gpu_worker_pool.jobs.job_spec import JobSpec
    from gpu_worker_pool.jobs.job_store import JobStore

_MB = 1 << 20


def submit(
    command: options.Command,
    name: options.Name = None,
    after: Annotated[
        list[str] | None,
        Option("--after", metavar="ID", help="Run it when this job or array has ended; may be given again."),
    ] = None,
    after_failure: Annotated[
        AfterFailure,
        Option(
            "--after-failure",
            metavar="skip|run|wait",
            help="If a job of --after has not ended well: skip this one, run it all the same, or let it wait until that one "
            "was retried.",
        ),
    ] = AfterFailure.SKIP,
    array: Annotated[
        str | None,
        Option(
            metavar="0-9",
            help="Run it once for each index: 0-9, 1,5,7-9, 0-100:10, or 0-99%4 for at most 4 at once. {index} in a word of "
            "the command is the index; so is GPU_POOL_ARRAY_INDEX.",
        ),
    ] = None,
    retries: options.Retries = 0,
    gpus: options.Gpus = 1,
    memory: options.MemoryPerGpu = None,
    model: options.Model = None,
    priority: options.Priority = 0,
    timeout: options.Timeout = None,
    time: options.TimeLimit = None,
    preemptible: options.Preemptible = False,
    grace: options.Grace = 10.0,
    max_log: Annotated[
        float | None,
        Option(
            "--max-log", parser=parse_memory_mb, metavar="100MB", help="Keep only the end of its output: so much of it."
        ),
    ] = None,
    remote: options.Remote = False,
    nodes: options.Nodes = 1,
    ssh: options.Ssh = False,
    env: options.EnvNames = None,
    on_granted: options.OnGranted = None,
    notify: options.Notify = None,
    json: options.Json = False,
    endpoint: options.Endpoints = None,
) -> int:
    """Submit a command that waits for GPUs and runs without a terminal. Prints its id, and returns.

    The keeper of your jobs runs it, and goes on when you log out. It runs in the directory and with the environment of now, as
    under `gpu-pool run`, and what it writes is kept: `gpu-pool logs ID`. `gpu-pool jobs` shows what waits and runs.

    A job that fails is run again --retries times, behind what was submitted until then. One that was preempted keeps its
    place. A job is never run twice by itself after a crash: what ran when the machine or its guard died is `interrupted`,
    and `gpu-pool retry ID` runs it again.

    Exit codes: 0 it is submitted; 2 the arguments are invalid; 126 or 127 the command cannot be run; 125 gpu-pool failed.
    """
    from gpu_worker_pool.cli.run.gang import check_gang  # noqa: PLC0415 - not for the help
    from gpu_worker_pool.client.command_label import command_label, label_text  # noqa: PLC0415
    from gpu_worker_pool.host.guarded import check_can_run, check_proc  # noqa: PLC0415
    from gpu_worker_pool.jobs.job_key import parse_array  # noqa: PLC0415
    from gpu_worker_pool.jobs.job_spec import JobSpec  # noqa: PLC0415
    from gpu_worker_pool.jobs.notices import rules_of_options  # noqa: PLC0415

    if not command[0]:
        raise Failure("the command is empty; write it after --, as in: gpu-pool submit -- python train.py", USAGE)
    if any("\0" in word for word in command):
        raise Failure("a word of the command has a NUL character, which no command can have", USAGE)
    try:
        tasks = None if array is None else parse_array(array)
    except ValueError as error:
        raise Failure(f"--array: {error}", USAGE) from None
    check_gang(nodes, env or (), os.environ, uses_ssh=ssh)
    check_can_run(command[0], os.environ)
    check_proc()
    rules_of_options(on_granted, notify, os.environ)
    store, environ = own_store(), environment_to_keep(os.environ)
    spec = JobSpec(
        submitted_at=clock.time(),
        command=tuple(command),
        label=label_text(name) if name else command_label(command),
        name=name,
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
        nodes=nodes,
        uses_ssh=ssh,
        env_names=tuple(env or ()),
        endpoints=None if endpoint is None else tuple(endpoint),
        after=_known(store, after or ()),
        after_failure=after_failure,
        array=None if tasks is None else tasks.indices,
        at_once=None if tasks is None else tasks.at_once,
        retries=retries,
        log_limit_bytes=None if max_log is None else int(max_log * _MB),
        on_granted=on_granted,
        notify=tuple(notify or ()),
    )
    store.make()
    spec = with_servers(spec, environ)
    number = store.submit(spec, environ)
    keys = spec.keys(number)
    if json:
        print_json(
            "submit",
            {"id": str(number), "jobs": [str(key) for key in keys], "folder": str(store.root / str(number))},
        )
    else:
        print(number, flush=True)  # noqa: T201 - the result
    wake_for(store, number)
    if sys.stderr.isatty() and not json:
        what = f"job {number} is submitted" if spec.array is None else f"{count(len(keys), 'job')} are submitted"
        complain(f"{what}; `gpu-pool logs -f {keys[0]}` follows its output, `gpu-pool jobs` shows all")
    return 0


def with_servers(spec: JobSpec, environ: Mapping[str, str], *, sharers: int | None = None) -> JobSpec:
    """The submission with the servers of this machine that can run it. Failure where none ever could, so that no job waits for
    a night in vain; where the named servers do not answer now, it waits for them. At most so many `sharers` of each GPU run at
    once.
    """
    from gpu_worker_pool.cli.pools.servers import NobodyAnswered, Servers  # noqa: PLC0415 - not for the help
    from gpu_worker_pool.cli.run.sources import find_sources  # noqa: PLC0415
    from gpu_worker_pool.core.model.request import Holder, Request, Wishes  # noqa: PLC0415
    from gpu_worker_pool.jobs.keeper import check_keep  # noqa: PLC0415

    try:
        wishes = Wishes(spec.gpus, spec.memory_mb, spec.model, nodes=spec.nodes)
        Request(
            wishes, Holder(), priority=spec.priority, time_limit_s=spec.time_limit_s, preemptible=spec.is_preemptible
        )
        check_keep(os.environ)
    except ValueError as error:
        raise Failure(str(error), USAGE) from None
    servers = Servers(spec.endpoints, environ=environ)
    is_named = servers.config.is_named

    async def look(servers: Servers) -> JobSpec:
        try:
            sources = await find_sources(servers, environ, is_remote=spec.is_remote)
        except NobodyAnswered as error:
            if not is_named or error.is_reached:
                raise
            complain(f"it waits until a server answers: {error}")
            return spec
        if spec.nodes == 1:
            await _check_can_ever(servers, sources.urls, replace(wishes, among=sources.among))
        at_once = spec.at_once
        if sharers is not None and spec.memory_mb is not None and at_once is None:
            at_once = max(sources.gpu_count * sharers // spec.gpus, 1)
        endpoints = tuple(sources.urls) if sources.is_named else None
        return replace(spec, endpoints=endpoints, is_multi=sources.is_multi, among=sources.among, at_once=at_once)

    return servers.run(look)


async def _check_can_ever(servers: Servers, urls: Sequence[str], wishes: Wishes) -> None:
    """Failure where no server has the GPUs that are asked for. What a server does not show counts as fitting: it decides."""
    from gpu_worker_pool.core.model.request import matches_model  # noqa: PLC0415 - not for the help
    from gpu_worker_pool.wire.pool import PoolView  # noqa: PLC0415
    from gpu_worker_pool.wire.reader import read  # noqa: PLC0415

    most = 0
    for answer in await servers.ask_all("/pool?queue=0&leases=0"):
        pool = read(PoolView, answer.data)
        if answer.url not in urls:
            continue
        if pool is None or pool.fleet is not None:
            return
        fitting = [
            gpu
            for gpu in pool.gpus
            if (gpu.name is None or matches_model(wishes.model, gpu.name))
            and (wishes.memory_mb or 0.0) <= (gpu.memory_total_mb or inf)
            and (wishes.among is None or gpu.uuid in wishes.among)
        ]
        most = max(most, len(fitting))
    if most < wishes.gpus:
        raise Failure(
            f"no server could ever run this: it asks for {wishes}, and "
            f"{f'only {most} such' if most else 'no such'} GPU{'' if most == 1 else 's'} can be had here; ask for less "
            "(`gpu-pool status` shows the GPUs), or name other servers with --endpoint"
        )


def wake_for(store: JobStore, number: int) -> None:
    """Have the keeper take in what was just submitted; say what the user must know about it."""
    from gpu_worker_pool.host.systemd import logout_ends  # noqa: PLC0415 - not for the help
    from gpu_worker_pool.jobs.keeper_link import KeeperSilent, wake_keeper  # noqa: PLC0415

    try:
        keeper = wake_keeper(store)
    except KeeperSilent as silent:
        complain(f"job {number} is written down, and waits: {silent}")
        return
    except Failure as failure:
        raise Failure(
            f"job {number} is written down, and waits for a keeper: {failure}. `gpu-pool jobs` tries again"
        ) from None
    if logout_ends(keeper):
        complain(
            "systemd ends your processes when you log out (KillUserProcesses=yes), and with them the keeper and your jobs; "
            "run the keeper as a unit: see `gpu-pool keeper --help`"
        )


def _known(store: JobStore, after: Sequence[str]) -> tuple[str, ...]:
    """The ids of --after, each of which must be that of a job."""
    from gpu_worker_pool.jobs.job_key import parse_key  # noqa: PLC0415 - not for the help

    found = []
    for text in (part for given in after for part in given.split(",")):
        try:
            key = parse_key(text)
        except ValueError as error:
            raise Failure(f"--after: {error}", USAGE) from None
        record = store.load_one(key.number)
        if record is None or not (key.index is None or record.submission.has(key.index)):
            raise Failure(
                f"--after {key}: there is no such job; `gpu-pool jobs` and `gpu-pool history` list them", USAGE
            )
        found.append(str(key))
    return tuple(dict.fromkeys(found))


def environment_to_keep(environ: Mapping[str, str], *, is_told: bool = True) -> dict[str, str]:
    """The environment for the job. It outlives a lease or a job around this process, so it knows nothing of those."""
    of_others = (
        "GPU_POOL_LEASE_",
        "GPU_POOL_GUARD",
        "GPU_POOL_JOB_ID",
        "GPU_POOL_ARRAY_",
        "GPU_POOL_RESTART",
        "GPU_POOL_BATCH_LINE",
    )
    kept = {name: value for name, value in environ.items() if not name.startswith(of_others)}
    if environ.get("GPU_POOL_LEASE_ID"):
        from gpu_worker_pool.client.guarded_lease import is_set_by_lease  # noqa: PLC0415 - only inside a lease
        from gpu_worker_pool.client.inherited_lease import VISIBLE_DEVICES_VARIABLE  # noqa: PLC0415

        if is_told:
            complain("the job will outlive the lease around this command, so it requests GPUs of its own")
        if is_set_by_lease(environ):
            kept.pop(VISIBLE_DEVICES_VARIABLE, None)
    return kept


def current_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - as it was reached
    except OSError as error:
        raise Failure(f"the current directory cannot be used: {error.strerror}; cd to another one") from None


def current_umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
