"""`gpu-pool hold`, `shell` and `env`: a GPU for a shell, a notebook, a debugger, or a program that runs already."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import time as clock
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final
from uuid import uuid4

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.options import CommandOptions, Endpoints, GpuWishes, Json, Name, TimeLimit, Timeout
from gpu_worker_pool.cli.output import complain, out, plain, print_body
from gpu_worker_pool.cli.pools.reading import ask_names, lease_path
from gpu_worker_pool.cli.pools.report import show_gpus
from gpu_worker_pool.cli.pools.servers import Servers, call, one_server, read_answer
from gpu_worker_pool.cli.units import parse_duration_s, show_moment
from gpu_worker_pool.core.model.bounds import MAX_TTL_S
from gpu_worker_pool.core.model.request import task_of
from gpu_worker_pool.failure import REFUSED, TIMED_OUT, USAGE, Failure
from gpu_worker_pool.wire.leases import LeaseList, LeaseView
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import read, read_time

# How long GPUs are held where --time is not given.
HOLD_VARIABLE: Final = "GPU_POOL_HOLD"
_DEFAULT_HOLD: Final = "8h"
# The label by which `env` finds what `hold` holds, and the name of what `shell` holds.
_LABEL: Final = "held"
_SHELL_NAME: Final = "shell"
# How much longer its TTL is than its time limit.
_TTL_AFTER_S: Final = 60.0
# How long one call waits for the grant, as a part of the time in which a server must answer.
_ROUND_PART: Final = 0.5
# The GPUs in the prompt. A shell expands the variable itself, so that it is right in a terminal that joins, too.
_PROMPT: Final = "(gpu $GPU_POOL_LEASE_GPUS) "
_BASH_RC: Final = Path(__file__).with_name("prompt.bash")


class Shell(StrEnum):
    """The shells for which variables can be printed."""

    SH = "sh"
    FISH = "fish"
    CSH = "csh"


ShellOption = Annotated[Shell, Option("--shell", metavar="sh|fish|csh", help="The shell to print them for. [sh]")]


def hold(
    asked: GpuWishes,
    time: Annotated[
        float | None,
        Option(
            "--time", parser=parse_duration_s, metavar="4h", help=f"For how long. [{_DEFAULT_HOLD}, or {HOLD_VARIABLE}]"
        ),
    ] = None,
    pid: Annotated[
        int | None,
        Option(
            "--pid", metavar="PID", min=1, help="Lease the GPUs that this program of yours uses already, until it ends."
        ),
    ] = None,
    name: Name = None,
    *,
    no_wait: Annotated[bool, Option("--no-wait", help="Do not wait: fail if no GPU is free.")] = False,
    shell: ShellOption = Shell.SH,
    json: Json = False,
) -> None:
    """Hold GPUs without a command, and print what to export: `eval "$(gpu-pool hold)"`.

    They are yours until the time is up or you release them with `gpu-pool cancel`, even after you log out. To use them in
    another terminal, run `eval "$(gpu-pool env)"` there.
    """
    servers = one_server(asked.endpoint)
    labels = {"name": name or ("hold" if pid is None else f"hold --pid {pid}"), _LABEL: "yes"}
    form: dict[str, Any] = {"gpus": asked.number, "memory_mb": asked.memory, "model": asked.model, "labels": labels}
    form |= {
        "min_memory_mb": asked.min_memory,
        "among": asked.gpu,
        "exclude": asked.exclude,
        "host": socket.gethostname(),
    }
    if pid is not None:
        if asked.gpus is not None or asked.gpu is not None:
            raise Failure("--pid leases the GPUs that the program uses; leave --gpus and --gpu out", USAGE)
        _adopt(servers, pid, {**form, "time_limit_s": time}, is_json=json, no_wait=no_wait)
        return
    # Nobody renews it, so its time limit ends it. Its TTL is over after that.
    seconds = _for_how_long(time)
    form |= {"ttl_s": min(seconds + _TTL_AFTER_S, MAX_TTL_S), "time_limit_s": seconds}
    body = servers.run(lambda opened: _granted(opened, form, no_wait=no_wait))
    lease = _read(body)
    if json:
        print_body(body)
    else:
        _print(lease, _url(servers), shell)
    are = "is" if len(lease.gpus) == 1 else "are"
    ends = f"{show_moment(read_time(lease.ends_at), clock.time())}, or until `gpu-pool cancel {lease.id[:8]}`"
    complain(f"{_gpus(lease)} {are} yours until {ends}")


def shell(asked: GpuWishes, *, time: TimeLimit = None, timeout: Timeout = None) -> int:
    """Wait for GPUs, and start your shell ($SHELL) on them. They are released when you leave it.

    The prompt shows the GPUs. To use them in another terminal, run `eval "$(gpu-pool env)"` there. Ends with the exit code of
    the shell.
    """
    from gpu_worker_pool.cli.run.command import run  # noqa: PLC0415 - loads the client

    os.environ["PS1"] = f"{_PROMPT}$ "  # for sh; others set their own when they start
    return run(_shell_command(), CommandOptions(**vars(asked), time=time, timeout=timeout, name=_SHELL_NAME))


def _shell_command() -> list[str]:
    """The user's shell, with the GPUs in its prompt where it can be told."""
    program = os.environ.get("SHELL") or "/bin/sh"
    match Path(program).name:
        case "bash":
            return [program, "--rcfile", str(_BASH_RC), "-i"]
        case "fish":
            prompt = 'functions -c fish_prompt _gpu_prompt; function fish_prompt; echo -n "(gpu $GPU_POOL_LEASE_GPUS) "; _gpu_prompt; end'
            return [program, "--init-command", prompt]
    return [program, "-i"]


def env(
    lease_id: Annotated[str | None, Argument(metavar="[ID]", help="Which lease, if you hold several.")] = None,
    endpoint: Endpoints = None,
    *,
    shell: ShellOption = Shell.SH,
    json: Json = False,
) -> None:
    """Print what to export in another terminal for the GPUs that you hold: `eval "$(gpu-pool env)"`."""
    servers = one_server(endpoint)

    async def find(opened: Servers) -> list[LeaseView]:
        answer = await call(opened, "/leases", what="which GPUs you hold is not known")
        name = (await ask_names(opened))[opened.ids[0]]
        held = [each for each in read_answer(LeaseList, answer).leases if each.state == "active" and each.owner == name]
        if lease_id is not None:
            return [each for each in held if each.id.startswith(lease_id)]
        return [each for each in held if each.labels.get(_LABEL) or task_of(each.labels) == _SHELL_NAME]

    found = servers.run(find)
    if not found:
        which = "no GPU" if lease_id is None else f"no lease {lease_id}"
        raise Failure(f"you hold {which}; `gpu-pool hold` takes one, `gpu-pool jobs` lists yours", REFUSED)
    if len(found) > 1:
        ids = ", ".join(f"{each.id[:8]} ({_gpus(each)})" for each in found)
        raise Failure(f"you hold several: name one of {ids}", USAGE)
    if json:
        path = lease_path(found[0].id)
        print_body(servers.run(lambda opened: call(opened, path, what="the lease is not known")).data)
    else:
        _print(found[0], _url(servers), shell)


def _read(body: Any) -> LeaseView:
    lease = read(LeaseView, body, clean=plain)
    if lease is None:
        raise Failure("no GPU is held: the answer of the server is not understood")
    return lease


def _url(servers: Servers) -> str:
    return servers.config.endpoints[servers.ids[0]].url


def _gpus(lease: LeaseView) -> str:
    return show_gpus([str(gpu.gpu_id) for gpu in lease.gpus])


def _for_how_long(time: float | None) -> float:
    try:
        seconds = parse_duration_s(os.environ.get(HOLD_VARIABLE) or _DEFAULT_HOLD) if time is None else time
    except ValueError as error:
        raise Failure(f"{HOLD_VARIABLE}: {error}", USAGE) from None
    if not 1 <= seconds <= MAX_TTL_S:
        origin = HOLD_VARIABLE if time is None else "--time"
        raise Failure(f"{origin} must be 1 second to 7 days; book GPUs for longer with `gpu-pool reserve`", USAGE)
    return seconds


def _adopt(servers: Servers, pid: int, form: dict[str, Any], *, is_json: bool, no_wait: bool) -> None:
    """Lease the GPUs that a program uses already, each by a lease of its own, which ends with the program."""
    from gpu_worker_pool.host.clock import boot_id  # noqa: PLC0415 - only for a program that runs already
    from gpu_worker_pool.host.processes import PROC, pid_namespace, read_process, read_uids  # noqa: PLC0415
    from gpu_worker_pool.host.users import user_name  # noqa: PLC0415

    seen, users = read_process(PROC, pid), read_uids(PROC, pid)
    if seen is None or seen.has_ended or not users:
        raise Failure(f"pid {pid} does not run on this machine", REFUSED)
    owner = user_name(users[0])
    if os.geteuid() not in (0, *users):
        raise Failure(
            f"pid {pid} belongs to {owner}; you can lease the GPUs of your own programs, and root of all", REFUSED
        )
    form |= {"pid": pid, "pid_started": seen.id.started, "boot_id": boot_id(), "pid_namespace": pid_namespace()}
    form |= {"gpus": 1, "owner": owner} if os.geteuid() == 0 else {"gpus": 1}

    async def adopt(opened: Servers) -> list[Any]:
        answer = await call(opened, "/pool?queue=0&leases=0", what="which GPUs it uses is not known")
        gpus = read_answer(PoolView, answer).gpus
        used = [gpu.uuid for gpu in gpus if any(process.pid == pid for process in gpu.processes or ())]
        return [await _granted(opened, {**form, "among": [uuid]}, no_wait=no_wait) for uuid in used]

    bodies = servers.run(adopt)
    if not bodies:
        raise Failure(
            f"pid {pid} uses no GPU that the server sees; to hold one before it starts, use `gpu-pool run` or "
            "`gpu-pool hold`",
            REFUSED,
        )
    if is_json:
        print_body({"leases": bodies})
    for lease in map(_read, bodies):
        complain(f"{_gpus(lease)} is leased to {lease.owner} until pid {pid} ends ({lease.id[:8]})")


async def _granted(servers: Servers, form: dict[str, Any], *, no_wait: bool) -> Any:
    """Wait for the grant; the lease as the server shows it. Where it is interrupted, the request leaves the queue."""
    path = lease_path(uuid4().hex)
    waiting = asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Without a process of its own, nothing else would tell the server that nobody waits any more.
        asyncio.get_running_loop().add_signal_handler(number, waiting.cancel)  # type: ignore[union-attr]
    try:
        return await _wait(servers, path, form, no_wait=no_wait)
    except BaseException:
        await servers.ask(servers.ids[0], path, "DELETE")
        raise


async def _wait(servers: Servers, path: str, form: dict[str, Any], *, no_wait: bool) -> Any:
    told = ""
    wait_s = 0.0 if no_wait else _ROUND_PART * servers.config.endpoint_timeout
    while True:
        answer = await call(servers, path, "PUT", {**form, "wait_s": wait_s}, what="no GPU is held")
        lease = _read(answer.data)
        if lease.state == "active":
            return answer.data
        if lease.state != "queued":
            raise Failure(f"no GPU is held: {lease.reason}")
        if lease.position == 0:  # the GPUs are there, and the next call takes them up
            continue
        if no_wait:
            why = (lease.reason or "").partition(": ")[2] or lease.reason
            raise Failure(f"no GPU is free now: {why}. Without --no-wait it waits for one", TIMED_OUT)
        if lease.reason and lease.reason != told:
            told = lease.reason
            complain(f"waiting: {told}")


def _print(lease: LeaseView, url: str, shell: Shell) -> None:
    """What a program needs to see these GPUs and no others, and commands of the pool to know the lease around them."""
    from gpu_worker_pool.client.guarded_lease import command_env  # noqa: PLC0415 - loads the client
    from gpu_worker_pool.models import make_assignment  # noqa: PLC0415

    node = lease.gpus[0].node or "localhost"
    assignment = make_assignment(
        [(node, gpu.gpu_id or 0) for gpu in lease.gpus],
        lease.worker_id or "hold",
        datetime.now().astimezone(),
        is_multi=False,
        lease_id=lease.id,
        server_url=url,
        uuids=tuple(gpu.uuid for gpu in lease.gpus),
        memory_mb=lease.memory_mb,
        fence=lease.fence,
        env=dict(lease.env),
    )
    words = {Shell.SH: "export {}={}", Shell.FISH: "set -gx {} {}", Shell.CSH: "setenv {} {};"}[shell]
    for name, value in command_env({}, assignment).items():
        if value:
            out().print(words.format(name, shlex.quote(value)))
