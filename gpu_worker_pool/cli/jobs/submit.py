"""`gpu-pool submit` and `gpu-pool keeper`: their options, and those that a submitted script brings itself."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Final

from gpu_worker_pool.cli import options
from gpu_worker_pool.cli.declare import MORE, Option
from gpu_worker_pool.cli.output import complain, pass_on_warnings, print_json
from gpu_worker_pool.cli.units import count, parse_memory_mb
from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.jobs.job_spec import AfterFailure
from gpu_worker_pool.jobs.job_store import JobStore, own_store

_MB: Final = 1 << 20
# Lines `#GPU --gpus 2 --time 4h` among the comments at the beginning of a script are its options.
_MARK: Final = "#GPU"
_READ_BYTES: Final = 64 << 10


def submit(
    command: options.Command,
    asked: options.CommandOptions,
    after: Annotated[
        list[str] | None,
        Option("--after", metavar="ID", help="Run it when this job or array has ended; repeatable."),
    ] = None,
    after_failure: Annotated[
        AfterFailure,
        Option(
            "--after-failure",
            metavar="skip|run|wait",
            group=MORE,
            help="If a job of --after fails: skip this one, run it all the same, or let it wait until that one was retried.",
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
    max_log: Annotated[
        float | None,
        Option(
            "--max-log",
            parser=parse_memory_mb,
            metavar="100MB",
            group=MORE,
            help="Keep only the last part of its output.",
        ),
    ] = None,
    begin: Annotated[
        str | None,
        Option(
            metavar="22:00",
            group=MORE,
            help="Request no GPUs before this time: 22:00, '2026-12-01 09:00', or 2h from now.",
        ),
    ] = None,
    requeue: Annotated[
        bool,
        Option(
            "--requeue",
            group=MORE,
            help="Run it again when its --time has ended it, behind what was submitted until then.",
        ),
    ] = False,
    json: options.Json = False,
) -> int:
    """Submit a command that waits for GPUs and runs without a terminal. Prints its id, and returns.

    The keeper of your jobs runs it, and goes on when you log out. It runs in the directory and with the environment of now, as
    under `gpu-pool run`, and what it writes is kept: `gpu-pool logs ID`. `gpu-pool jobs` shows what waits and runs.

    A job that fails is run again --retries times, behind what was submitted until then. One that was preempted keeps its
    place. A job is never run twice by itself after a crash: what ran when the machine or its guard died is `interrupted`,
    and `gpu-pool retry ID` runs it again.

    Lines `#GPU --gpus 2 --time 4h` among the comments at the beginning of a script are its options; what is typed comes first.

    Exit codes: 0 it is submitted; 2 the arguments are invalid; 126 or 127 the command cannot be run; 125 gpu-pool failed.
    """
    from gpu_worker_pool.cli.run.asking import (  # noqa: PLC0415 - not for the help
        check_command,
        check_servers,
        environment_to_keep,
        make_spec,
    )
    from gpu_worker_pool.cli.run.gang import check_gang  # noqa: PLC0415
    from gpu_worker_pool.jobs.job_spec import parse_array  # noqa: PLC0415
    from gpu_worker_pool.jobs.notices import rules_of_options  # noqa: PLC0415

    store = own_store()
    try:
        tasks = None if array is None else parse_array(array)
    except ValueError as error:
        raise Failure(f"--array: {error}", USAGE) from None
    spec = make_spec(
        asked,
        command,
        after=_known(store, after or ()),
        after_failure=after_failure,
        array=None if tasks is None else tasks.indices,
        at_once=None if tasks is None else tasks.at_once,
        retries=retries,
        log_limit_bytes=None if max_log is None else int(max_log * _MB),
        begin_at=None if begin is None else _begin_at(begin),
        is_requeued=requeue,
    )
    check_gang(spec, os.environ)
    check_command(spec)
    rules_of_options(spec, os.environ)
    store.make()
    if os.environ.get("GPU_POOL_LEASE_ID"):
        complain("the job will outlive the lease around this command, so it requests GPUs of its own")
    environ = environment_to_keep(os.environ)
    check_servers(spec, environ)
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


def _begin_at(text: str) -> float:
    from gpu_worker_pool.cli.units import parse_moment, show_moment  # noqa: PLC0415 - only where it is needed

    now = time.time()
    at = parse_moment(text, now, "--begin")
    if at < now:
        raise Failure(
            f"--begin {text} is in the past ({show_moment(at, now)}); give a time in the future, or leave it out", USAGE
        )
    return at


def wake_for(store: JobStore, number: int) -> None:
    """Have the keeper take in what was just submitted; say what the user must know about it."""
    from gpu_worker_pool.host.systemd import logout_ends  # noqa: PLC0415 - not for the help
    from gpu_worker_pool.jobs.keeper_process import KeeperSilent, wake_keeper  # noqa: PLC0415

    try:
        keeper = wake_keeper(store)
    except KeeperSilent as silent:
        complain(f"job {number} is saved, and waits: {silent}")
        return
    except Failure as failure:
        raise Failure(
            f"job {number} is saved, and waits for a keeper: {failure}. `gpu-pool jobs` tries again"
        ) from None
    if logout_ends(keeper):
        complain(
            "systemd ends your processes when you log out (KillUserProcesses=yes), and with them the keeper and your jobs; "
            "run the keeper as a unit: see `gpu-pool keeper --help`"
        )


def _known(store: JobStore, after: Sequence[str]) -> tuple[str, ...]:
    """The ids of --after, each of which must be that of a job."""
    from gpu_worker_pool.jobs.job_spec import parse_key  # noqa: PLC0415 - not for the help

    found = []
    for text in (part for given in after for part in given.split(",")):
        try:
            key = parse_key(text)
        except ValueError as error:
            raise Failure(f"--after: {error}", USAGE) from None
        record = store.load_one(key.number)
        if record is None or not (key.index is None or record.submission.has(key.index)):
            raise Failure(
                f"--after {key}: there is no such job; `gpu-pool jobs` and `gpu-pool history` list yours", USAGE
            )
        found.append(str(key))
    return tuple(dict.fromkeys(found))


def keeper(
    stay: Annotated[
        bool, Option("--stay", help="Keep running while there is nothing to do, as a systemd service.")
    ] = False,
) -> int:
    """Wait for GPUs for the submitted jobs, and start them.

    `submit` starts it, and every command about jobs does while one waits or runs. It ends when there is nothing to do, and
    may be killed at any time: the next one goes on. Start it yourself only so that jobs go on after a restart of the
    machine, or where systemd ends all processes of users who log out (KillUserProcesses=yes): by @reboot in a crontab, or
    with --stay in a systemd unit of your user, together with `loginctl enable-linger`. `gpu-pool service install --keeper` writes it.

    Exit codes: 0 there was nothing left to do, or another keeper is there; 125 it cannot be started.
    """
    from gpu_worker_pool.jobs.keeper import run_keeper  # noqa: PLC0415 - loads the client
    from gpu_worker_pool.jobs.keeper_process import become_keeper, log  # noqa: PLC0415

    store = own_store()
    lock = become_keeper(store, waits=stay)
    if lock is not None:
        pass_on_warnings(log)
        asyncio.run(run_keeper(store, stays=stay))
        os.close(lock)
    return 0


# --- the options of a script ---------------------------------------------------------------------------------------------


def options_in(command: Sequence[str]) -> tuple[str, list[str]]:
    """The script of a command, and the words of its #GPU lines. The script is the first word, or the first one behind a program
    such as `bash` that is not an option.
    """
    behind = next((word for word in command[1:] if not word.startswith("-")), None)
    for path in (command[0], behind) if command else ():
        words = [] if path is None else _words_in(path)
        if path is not None and words:
            return path, words
    return "", []


def _words_in(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - as the user names it
            text = file.read(_READ_BYTES).decode()
    except (OSError, ValueError):
        return []  # it is not there, or not a text
    words: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            break
        mark, _, rest = stripped.partition(" ")
        if mark == _MARK:
            try:
                words += shlex.split(rest)
            except ValueError as error:
                raise Failure(f"{path}, line {number}: {error}", USAGE) from None
    return words
