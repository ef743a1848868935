"""`gpu-pool keeper`: its start."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.output import pass_on_warnings, plain
from gpu_worker_pool.failure import Failure

from .jobs import own_store

if TYPE_CHECKING:
    from gpu_worker_pool.jobs.job_store import JobStore
    from gpu_worker_pool.jobs.keeper_link import Ready

_LONGEST_LOG_BYTES: Final = 1 << 20
# How long another keeper may take to answer, or to end.
_OTHER_S: Final = 10.0
_LOOK_AGAIN_S: Final = 0.05
_TAKE_OVER_S: Final = 2.0


def keeper(
    detach: Annotated[
        bool, Option("--detach", help="Go to the background, without a terminal. `submit` starts it so.")
    ] = False,
    stay: Annotated[
        bool, Option("--stay", help="Stay also while there is nothing to do, for a unit of systemd.")
    ] = False,
) -> int:
    """Wait for GPUs for the submitted jobs, and start them.

    `submit` starts it, and every command about jobs does while one waits or runs. It ends when there is nothing to do, and
    may be killed at any time: the next one goes on. Start it yourself only so that jobs go on after a restart of the
    machine, or where systemd ends all processes of users who log out (KillUserProcesses=yes): by @reboot in a crontab, or
    with --stay in a systemd unit of your user, together with `loginctl enable-linger`. docs/CLI.md has the unit.

    Exit codes: 0 there was nothing left to do, or another keeper is there; 125 it cannot be started.
    """
    from gpu_worker_pool.jobs.keeper_link import LOG_FILE, Ready  # noqa: PLC0415 - only where it runs

    store, ready = own_store(), Ready(os.environ)
    if detach and os.fork():
        os._exit(0)  # with a second fork, no terminal can become the keeper's own
    _settle_signals()
    try:
        store.make()
        os.umask(0o077)
        os.chdir("/")
        _bound_log(store.root / LOG_FILE, is_ours=detach)
        lock = _lock(store, waits=stay)
        if lock is not None:
            asyncio.run(_run(store, ready, stays=stay))
            os.close(lock)
        ready.say("ready")
    except Failure as failure:
        ready.say(str(failure))
        raise
    return 0


def _lock(store: JobStore, *, waits: bool) -> int | None:
    """The lock of the keeper; None where another keeper is there. Where it `waits`, it takes over when that one ends."""
    from gpu_worker_pool.jobs.keeper_link import NoKeeper, lock_keeper, poke  # noqa: PLC0415 - loaded by now

    give_up_at = time.monotonic() + _OTHER_S
    while (lock := lock_keeper(store.root)) is None:
        try:
            poke(store)
        except NoKeeper:
            if time.monotonic() >= give_up_at:
                raise Failure(
                    f"another keeper has {store.root} and does not answer; is it in a container, or stopped?"
                ) from None
        else:
            if not waits:
                return None
            give_up_at = time.monotonic() + _OTHER_S
        time.sleep(_TAKE_OVER_S if waits else _LOOK_AGAIN_S)
    return lock


def _settle_signals() -> None:
    """Have the signals of a program that was just started, whatever shell this was started from; the jobs inherit them.

    It ends at once when it is told to end: all that it knows is on the disk. A terminal that hangs up is not its own.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _bound_log(path: Path, *, is_ours: bool) -> None:
    """Begin another log where the one that standard error goes to has become long."""
    if is_ours and path.exists() and path.stat().st_size > _LONGEST_LOG_BYTES:
        path.replace(path.with_suffix(".log.old"))
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)


def _say(message: str) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError):  # a full disk must not end the keeper
        print(f"{when} {plain(message)}", file=sys.stderr, flush=True)  # noqa: T201 - the keeper's log


async def _run(store: JobStore, ready: Ready, *, stays: bool) -> None:
    from gpu_worker_pool.jobs.keeper import Keeper  # noqa: PLC0415 - loads the client
    from gpu_worker_pool.jobs.keeper_link import FACTS_FILE, listen  # noqa: PLC0415

    pass_on_warnings(_say)
    keeper = Keeper(store, os.environ, _say, stays=stays)
    server = await listen(store, keeper.poke)
    ready.say("ready")
    await keeper.run()
    server.close()
    (store.root / FACTS_FILE).unlink(missing_ok=True)
