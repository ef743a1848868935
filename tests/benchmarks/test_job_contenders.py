"""The schedulers of jobs that we are compared with: each hands out its GPUs, and ends with all that it has started."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.contenders.field import COMMAND, FIELD, Contender
from benchmarks.contenders.measures import Clients, Running, hand_overs, running

JOBS = [each for each in FIELD if each.name in ("HyperQueue", "Slurm, srun")]


def processes_in(namespace: Path) -> list[str]:
    """The processes in a network namespace, by pid."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "ns/net").readlink() == namespace:
                found.append(folder.name)
        except OSError:
            continue  # it has ended
    return found


def check_two_gpus(run: Running, contender: Contender) -> None:
    with ExitStack() as ends:
        first, second, third = (ends.enter_context(run.client(contender)) for _ in range(3))
        held, other = first.ask("take"), second.ask("take")
        assert {held["gpu"], other["gpu"]} == {0, 1}

        third.tell("take")
        os.kill(held["pid"], signal.SIGKILL)
        assert third.answer()["gpu"] == held["gpu"]

        if restart := run.servers[contender.server].restart:
            restart()
            os.kill(other["pid"], 0)
        second.ask("release")
        third.ask("release")


@pytest.mark.parametrize("contender", JOBS, ids=lambda each: each.server)
def test_a_scheduler_of_jobs_grants_what_a_killed_job_held_and_leaves_no_process(
    contender: Contender, tmp_path: Path
) -> None:
    told: list[str] = []
    with running([contender], 2, tmp_path, lambda _, why: told.append(why)) as run:
        if not run.contenders:
            pytest.skip(told[0])
        namespace = Path(f"/proc/{run.servers[contender.server].pids[0]}/ns/net").readlink()
        assert namespace != Path("/proc/self/ns/net").readlink()
        check_two_gpus(run, contender)

    assert processes_in(namespace) == []


def test_the_command_of_a_job_is_timed_without_a_scheduler(tmp_path: Path) -> None:
    (alone,) = (each for each in FIELD if each.name == COMMAND)

    with running([alone], 1, tmp_path, lambda _, why: pytest.fail(why)) as run, Clients(run) as clients:
        times_s = hand_overs(clients, alone, 2)

    assert len(times_s) == 2
    assert min(times_s) > 0
