"""`gpu-pool keeper`: its start."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.output import pass_on_warnings
from gpu_worker_pool.jobs.job_store import own_store
from gpu_worker_pool.jobs.keeper import run_keeper
from gpu_worker_pool.jobs.keeper_process import become_keeper, log


def keeper(
    stay: Annotated[
        bool, Option("--stay", help="Stay also while there is nothing to do, for a unit of systemd.")
    ] = False,
) -> int:
    """Wait for GPUs for the submitted jobs, and start them.

    `submit` starts it, and every command about jobs does while one waits or runs. It ends when there is nothing to do, and
    may be killed at any time: the next one goes on. Start it yourself only so that jobs go on after a restart of the
    machine, or where systemd ends all processes of users who log out (KillUserProcesses=yes): by @reboot in a crontab, or
    with --stay in a systemd unit of your user, together with `loginctl enable-linger`. `gpu-pool service install --keeper` writes it.

    Exit codes: 0 there was nothing left to do, or another keeper is there; 125 it cannot be started.
    """
    store = own_store()
    lock = become_keeper(store, waits=stay)
    if lock is not None:
        pass_on_warnings(log)
        asyncio.run(run_keeper(store, stays=stay))
        os.close(lock)
    return 0
