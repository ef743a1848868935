"""`jobs`, `cancel`, `logs` and `history` know all that a user runs, however it was started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.jobs.submission import JobState
from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs.user_jobs import UserJobs
from tests.cli.own_process import end_all, environment, gpu_pool, start_gpu_pool
from tests.server.leasing import eventually, get, new_id, put, queue, release, take

HELD = "while [ ! -e go ]; do sleep 0.05; done"
SCRIPT = """
import gpu_worker_pool, time
with gpu_worker_pool.gpu() as held:
    print('held', flush=True)
    while not held.is_lost:
        time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    end_all()


def rows(user: UserJobs, *options: str) -> dict[str, list[str]]:
    """The lines of `jobs`, by what they run."""
    lines = [line.split() for line in user.call("jobs", *options).out.splitlines()[1:]]
    return {line[-1]: line for line in lines}


def test_jobs_lists_whatever_was_started_and_cancel_stops_each(user: UserJobs, server: ServerProcess) -> None:
    submitted = user.script(HELD, "-n", "by-submit")
    user.until(submitted, JobState.RUNNING)
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=environment(server), stdout=subprocess.PIPE, cwd=user.folder
    )
    with script:
        try:
            assert script.stdout is not None
            assert script.stdout.readline() == b"held\n"
            waiter = start_gpu_pool(
                "run", "--name", "by-run", "--", "true", server=server, env=user.env, cwd=user.folder
            )
            found = eventually(lambda: shown if len(shown := rows(user)) == 3 else None, "all three are listed")
            states = {what: line[:2] for what, line in found.items()}
            assert states.pop("by-submit") == [submitted, "running"]
            assert states.pop("by-run")[1] == "waiting"
            ((of_script, state),) = states.values()
            assert state == "running"
            assert user.call("jobs").out.splitlines()[0].split() == [
                "ID", "STATE", "GPU", "SINCE", "STARTS", "NOTES", "COMMAND",
            ]  # fmt: skip
            done = user.call("cancel", found["by-run"][0], of_script, submitted)
            assert f"job {submitted} is being ended" in done.out
            assert f"{user_name()}'s request (by-run) left the queue" in done.out
            waiter.communicate(timeout=30)
            assert waiter.returncode == 125
            assert script.wait(timeout=30) == 1  # it was told that its lease is lost
        finally:
            script.kill()
    assert user.until(submitted).task.state is JobState.CANCELLED
    eventually(lambda: not rows(user), "nothing is left")


def test_the_time_at_which_a_request_will_start_is_in_its_column(user: UserJobs, server: ServerProcess) -> None:
    held, waiter = new_id("held"), new_id("waiter")
    take(server, held, gpus=2, owner="bob", time_limit_s=7200)
    queue(server, waiter, labels={"command": "later.py"})
    submitted = user.script("true", "-n", "after-it")
    user.until(submitted, JobState.WAITING)
    try:
        shown = rows(user)
        for name in ("later.py", "after-it"):  # with the day of the week where that is tomorrow
            assert re.match(r"([A-Z][a-z]{2} )?\d\d:\d\d ", " ".join(shown[name][5:])), shown[name]
        of_everyone = user.call("jobs", "--all").out
        assert "bob" in of_everyone
        assert "OWNER" in of_everyone
        as_json = user.call("jobs", "--json").json
        assert [lease["id"] for lease in as_json["leases"]] == [waiter]
        assert as_json["jobs"][0]["expected_start_at"] is not None
    finally:
        user.call("cancel", "--mine", "--yes")
        release(server, held)
    assert get(server, waiter)["end_reason"] == "cancelled"
    assert user.until(submitted).task.state is JobState.CANCELLED


def test_what_is_over_or_is_not_there_is_said(user: UserJobs) -> None:
    over = user.script("true")
    user.until(over)
    done = user.call("cancel", over, "9999", "no-such-lease", code=1)
    assert f"job {over} was over already" in done.err
    assert "there is no job or lease 9999" in done.err
    assert "there is no job or lease no-such-lease" in done.err
    assert user.call("cancel", "--mine", "--yes").err == "gpu-pool: you have nothing running or waiting\n"


# --- logs ----------------------------------------------------------------------------------------------------------------


def test_logs_without_an_id_is_the_last_job_and_its_tail_can_be_had(user: UserJobs) -> None:
    user.until(user.script("echo not this"))
    id_ = user.script("for i in 1 2 3 4 5; do echo line $i; done; printf 'no end'")
    user.until(id_)
    assert user.call("logs").out.splitlines()[0] == "line 1"
    for tail, lines in (("0", ""), ("1", "no end"), ("2", "line 5\nno end"), ("9", user.output(id_))):
        assert user.call("logs", "--tail", tail).out == lines, tail
        assert user.call("logs", "--tail", tail, "-f").out == lines, tail


# --- how it ended --------------------------------------------------------------------------------------------------------


def test_history_says_how_each_run_ended(user: UserJobs, server: ServerProcess) -> None:
    def run(name: str, *words: str) -> None:
        gpu_pool("run", "--name", name, *words, server=server, env=user.env, cwd=user.folder)

    run("good", "--", "true")
    run("bad", "--", "sh", "-c", "exit 2")
    run("killed", "--", "sh", "-c", "kill -9 $$")
    run("limited", "--time", "1s", "--", "sleep", "60")
    died = start_gpu_pool("run", "--name", "died", "--", "sleep", "60", server=server, env=user.env)
    lease = eventually(lambda: next(iter(user.call("jobs", "--json").json["leases"]), None), "it runs")
    os.kill(died.pid, signal.SIGKILL)
    died.communicate(timeout=30)
    eventually(lambda: get(server, lease["id"])["state"] == "ended", "its guard has released it")
    revoked = new_id("revoked")
    put(server, revoked, labels={"command": "revoked"}, owner="bob")
    user.call("cancel", revoked, "--reason", "maintenance, sorry")
    of_job = user.script("exit 7", "-n", "job")
    user.until(of_job)

    lines = {line.split()[-1]: line for line in user.call("history").out.splitlines()}
    for name, words in {
        "good": " ended ",
        "bad": "exit code 2",
        "killed": "signal SIGKILL",
        "limited": "time limit",
        "died": "lost",
        "revoked": f"by {user_name()}: maintenance, sorry",
        "job": "exit code 7",
    }.items():
        assert words in lines[name], lines[name]
    assert " failed " in lines["bad"]
    assert "exit code" not in lines["good"]
    known = {one["command"]: one for one in user.call("history", "--json").json["leases"]}
    assert (known["bad"]["end_reason"], known["bad"]["end_note"]) == ("released", "exit code 2")


# --- certain GPUs --------------------------------------------------------------------------------------------------------


def test_run_gpu_asks_for_certain_gpus(server: ServerProcess) -> None:
    show = ("--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert gpu_pool("run", "--gpu", "1", *show, server=server).out == "1\n"
    assert gpu_pool("run", "--gpu", "1,0", *show, server=server).out == "0,1\n"
    assert gpu_pool("run", "--gpu", "0,1", "--gpus", "1", *show, server=server).out in {"0\n", "1\n"}
    wrong = gpu_pool("run", "--gpu", "7", *show, server=server)
    assert (wrong.code, wrong.out) == (125, "")
    assert "7" in wrong.err
    for text in ("x", "", "1.5"):
        refused = gpu_pool("run", "--gpu", text, *show, server=server)
        assert (refused.code, "is not a GPU" in refused.err) == (125, True), refused
