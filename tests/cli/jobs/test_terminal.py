"""Jobs as a person uses them, in a real terminal: what the screen shows, what is typed, and what a hang-up ends."""

from __future__ import annotations

import shlex
from pathlib import Path

from gpu_worker_pool.jobs.submission import JobState
from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs.user_jobs import UserJobs
from tests.cli.own_process import GPU_POOL, environment
from tests.cli.terminal import Terminal
from tests.server.leasing import eventually

COMMANDS = ("submit", "jobs", "logs", "cancel", "retry", "history", "keeper")
HELD = "echo began; while [ ! -e go ]; do sleep 0.05; done; echo the end"


def shell(user: UserJobs, tmp_path: Path) -> Terminal:
    """A shell in a terminal, in which `gpu-pool` can be typed."""
    program = tmp_path / "gpu-pool"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(GPU_POOL)} "$@"\n', encoding="utf-8")
    program.chmod(0o700)
    env = environment(user.server, user.env)
    env |= {"PS1": "ready> ", "PATH": f"{tmp_path}:{env['PATH']}"}
    return Terminal(["sh", "-i"], env, columns=100, cwd=user.folder)


def test_a_day_with_jobs_in_a_terminal(user: UserJobs, tmp_path: Path) -> None:
    with shell(user, tmp_path) as terminal:
        terminal.wait_for("ready>")
        terminal.type(f"gpu-pool submit -n training --gpus 2 -- sh -c '{HELD}'\n")
        terminal.wait_for("job 1 is submitted; `gpu-pool logs -f 1`")
        user.until("1", JobState.RUNNING)
        terminal.type("gpu-pool submit -n next -- true; clear; gpu-pool jobs; echo shown\n")
        screen = terminal.wait_for("\nshown")
        rows = {line.split()[0]: line for line in screen.splitlines() if line[:1] in "12I"}
        assert rows["ID"].split() == ["ID", "STATE", "GPU", "SINCE", "STARTS", "NOTES", "COMMAND"]
        assert rows["1"].split()[:2] == ["1", "running"]
        assert "training" in rows["1"]
        assert "wants 1" in rows["2"]
        terminal.type("clear; gpu-pool logs -f 1\n")
        terminal.wait_for("began")
        terminal.type("\x03")
        terminal.type("echo code $?\n")
        terminal.wait_for("code 130")
        assert user.state("1") is JobState.RUNNING
        terminal.type("clear; gpu-pool cancel --mine\n")
        terminal.wait_for("Cancel 2 jobs? [y/N]")
        terminal.type("n\n")
        terminal.type("clear; gpu-pool cancel 2; echo code $?\n")
        terminal.wait_for("code 0")
        assert "job 2 is cancelled" in terminal.text
    # The terminal is closed, and its shell is gone.
    (user.folder / "go").touch()
    assert user.until("1").task.state is JobState.ENDED
    assert user.output("1") == "began\nthe end\n"


def test_a_job_and_its_keeper_have_no_terminal_and_outlive_a_hang_up(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    with UserJobs(tmp_path, server) as user:
        with shell(user, tmp_path / "bin") as terminal:
            terminal.wait_for("ready>")
            terminal.type(f"gpu-pool submit -- sh -c '{HELD}'\n")
            user_number = eventually(user.store.numbers, "it is submitted")[0]
            user.until(str(user_number), JobState.RUNNING)
            for pid in (user.keeper_facts()["pid"], _guard(user, "1")):
                fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                assert fields[4] == "0"  # the terminal that controls it
        keeper = user.keeper_facts()["pid"]
        (tmp_path / "go").touch()
        assert user.until("1").task.state is JobState.ENDED
        assert user.keeper_facts()["pid"] == keeper


def _guard(user: UserJobs, id_: str) -> int:
    run = user.job(id_).run
    assert run is not None
    return run.guard_pid
