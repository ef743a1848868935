"""Submitted jobs, from `submit` to `history`, by real processes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpu_worker_pool.jobs.submission import JobState
from tests.cli.jobs.user_jobs import UserJobs
from tests.server.leasing import eventually, wait_until_free


def test_a_job_runs_without_a_terminal_and_leaves_all_that_is_known_of_it(user: UserJobs) -> None:
    script = "pwd; echo $SECRET $GPU_POOL_JOB_ID $CUDA_VISIBLE_DEVICES; ls /proc/self/fd | wc -l; tty; umask; exit 3"
    done = user.call("submit", "-n", "my name", "--json", "--", "sh", "-c", script, env={"SECRET": "s3cret"})
    id_ = done.json["id"]
    assert done.json["folder"] == str(user.store.root / id_)
    record = user.until(id_)
    lines = user.output(id_).splitlines()
    gpu = lines[1].split()[2]
    assert lines[:2] == [str(user.folder), f"s3cret {id_} {gpu}"]
    assert lines[3] == "not a tty"
    assert (record.task.state, record.task.exit_code) == (JobState.FAILED, 3)
    (shown,) = [job for job in user.call("history", "--mine", "--json").json["jobs"] if job["id"] == id_]
    assert (shown["exit_code"], shown["gpus"], shown["name"]) == (3, [int(gpu)], "my name")
    assert shown["submitted_at"] <= shown["started_at"] <= shown["ended_at"]
    table = user.call("history", "--mine").out
    assert "exit code 3" in table
    assert "my name" in table
    for path in (user.store.root, *user.store.root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_no_value_of_the_environment_is_on_a_command_line(user: UserJobs) -> None:
    script = "echo began; while [ ! -e done-1 ]; do sleep 0.05; done"
    id_ = user.submit("--", "sh", "-c", script, env={"TOKEN": "s3cret-value"})
    user.until(id_, JobState.RUNNING)
    eventually(lambda: user.output(id_), "its command runs")
    shown = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            shown += path.read_bytes()
        except OSError:
            continue
    (user.folder / "done-1").touch()
    assert b"done-1" in shown
    assert b"s3cret-value" not in shown
    assert user.until(id_).task.state is JobState.ENDED


def test_what_a_job_used_is_measured_by_the_server(user: UserJobs) -> None:
    id_ = user.script("sleep 0.5")
    user.until(id_)
    peak_mb = eventually(lambda: user.job(id_).usage.peak_memory_mb, "it is known")
    (shown,) = [job for job in user.call("history", "--mine", "--json").json["jobs"] if job["id"] == id_]
    assert shown["peak_memory_mb"] == peak_mb > 0
    assert shown["mean_utilization_percent"] is not None


def test_an_array_runs_each_index_and_a_job_after_it_waits_for_all(user: UserJobs) -> None:
    first = user.submit(
        "--array", "0-2%1", "--", "sh", "-c", 'echo {index} $GPU_POOL_ARRAY_INDEX >> "$0"', "order-{index}"
    )
    last = user.script("cat order-*", "--after", first)
    assert user.until(last).task.state is JobState.ENDED
    assert user.output(last).splitlines() == ["0 0", "1 1", "2 2"]
    starts = [user.job(f"{first}_{index}").task.started_at or 0.0 for index in range(3)]
    assert starts == sorted(starts)
    shown = user.call("logs", first).out
    assert f"==> {first}_2 <==" in shown


def test_what_comes_after_a_failure_is_what_was_chosen(user: UserJobs) -> None:
    first = user.script("[ -e good ]")
    skipped = user.script("echo never", "--after", first)
    run = user.script("echo anyway", "--after", first, "--after-failure", "run")
    waits = user.script("echo at last", "--after", first, "--after-failure", "wait")
    assert user.until(skipped).task.state is JobState.SKIPPED
    assert user.until(run).task.state is JobState.ENDED
    assert user.state(waits) is JobState.SUBMITTED
    assert f"after {first}" in user.call("jobs").out
    assert f"job {first} failed" in user.call("history", "--mine").out
    (user.folder / "good").touch()
    assert user.call("retry", first).out == f"job {first} is submitted again\n"
    assert user.until(waits).task.state is JobState.ENDED
    assert user.job(first).task.attempts == 2


def test_a_job_that_fails_is_run_again_and_each_attempt_has_its_log(user: UserJobs) -> None:
    id_ = user.script("echo try >> tries; wc -l < tries; [ $(wc -l < tries) -ge 3 ]", "--retries", "2")
    assert user.until(id_).task.state is JobState.ENDED
    assert user.call("logs", id_, "--attempt", "1").out.split() == ["1"]
    assert user.call("logs", id_).out.split() == ["3"]
    assert "no output of an attempt 4" in user.call("logs", id_, "--attempt", "4", code=1).err


def test_jobs_are_cancelled_while_they_wait_and_while_they_run(user: UserJobs) -> None:
    trapped = "trap 'echo asked; exit 9' TERM; echo began; while :; do sleep 0.05; done"
    running = user.script(trapped, "--gpus", "2")
    user.until(running, JobState.RUNNING)
    eventually(lambda: user.output(running) == "began\n", "it has set its trap")
    waiting = user.script("echo never")
    user.until(waiting, JobState.WAITING)
    eventually(lambda: "leased by" in user.call("jobs", waiting).out, "it says why it waits")
    done = user.call("cancel", waiting, running, "--json").json
    assert (done["cancelled"], done["ending"], done["over"]) == ([waiting], [running], [])
    task = user.until(running).task
    assert (task.state, task.exit_code) == (JobState.CANCELLED, 9)
    assert user.output(running).splitlines()[-1] == "asked"
    assert user.state(waiting) is JobState.CANCELLED
    assert not user.log(waiting, 1).exists()
    assert "was over already" in user.call("cancel", running, code=1).err
    assert user.server is not None
    wait_until_free(user.server)
    assert user.call("cancel", "--mine", "--yes").err == "gpu-pool: you have nothing running or waiting\n"


def test_the_logs_are_followed_to_the_end_through_a_retry(user: UserJobs) -> None:
    id_ = user.script(
        "echo one more >> more; cat more; sleep 0.2; [ -e more.2 ] || { touch more.2; exit 1; }", "-r", "1"
    )
    assert user.call("logs", "-f", id_).out == "one more\n" * 3


def test_a_bounded_log_keeps_the_end(user: UserJobs) -> None:
    id_ = user.script("seq 400000", "--max-log", "1MB")
    record = user.until(id_)
    assert record.task.state is JobState.ENDED
    written = user.call("logs", id_).out
    assert 1 << 19 <= len(written) <= 1 << 20
    assert "".join(f"{number}\n" for number in range(1, 400_001)).endswith(written)


@pytest.mark.parametrize(
    ("arguments", "env", "hint"),
    [
        (("--gpus", "3"), {}, "it asks for 3 GPUs on one node, and only 2 such GPUs"),
        (("--model", "H100"), {}, "1 GPU of model H100, and no such GPU"),
        (("--memory", "900GB"), {}, "no such GPU"),
        ((), {"CUDA_VISIBLE_DEVICES": "9"}, "CUDA_VISIBLE_DEVICES='9' names no GPU of the pool"),
        ((), {"GPU_SERVICE_ENDPOINT": ""}, "no GPU server can be used"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    user: UserJobs, arguments: tuple[str, ...], env: dict[str, str], hint: str
) -> None:
    before = user.store.numbers()
    assert hint in user.call("submit", *arguments, "--", "true", code=125, env=env).err
    assert user.store.numbers() == before


def test_a_job_whose_server_does_not_answer_waits_for_it_for_as_long_as_it_may(user: UserJobs) -> None:
    done = user.call("submit", "--timeout", "0s", "--endpoint", "http://127.0.0.1:9", "--", "true")
    assert "it waits until a server answers" in done.err
    task = user.until(done.out.strip()).task
    assert (task.state, task.exit_code) == (JobState.FAILED, 124)


def test_a_job_of_a_shell_inside_a_lease_requests_gpus_of_its_own(user: UserJobs) -> None:
    inside = {"GPU_POOL_LEASE_ID": "ended", "GPU_POOL_LEASE_URL": "http://127.0.0.1:9", "CUDA_VISIBLE_DEVICES": "7"}
    inside |= {"GPU_POOL_LEASE_GPUS": "7", "GPU_POOL_GUARD": "outer"}
    show = "echo $GPU_POOL_LEASE_ID; echo $CUDA_VISIBLE_DEVICES; echo $GPU_POOL_GUARD"
    done = user.call("submit", "--", "sh", "-c", show, env=inside)
    assert "requests GPUs of its own" in done.err
    id_ = done.out.strip()
    assert user.until(id_).task.state is JobState.ENDED
    lease, gpu, guards = user.output(id_).split()
    assert lease != "ended"
    assert "outer" not in guards  # what kills the processes of that guard leaves the job alone
    assert gpu in {"0", "1"}


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (("submit",), 2, "-- CMD"),
        (("submit", "--", ""), 2, "the command is empty"),
        (("submit", "--", "no-such-program"), 127, "no such program"),
        (("submit", "--", "/etc/passwd"), 126, "not executable"),
        (("submit", "--array", "9-0", "--", "true"), 2, "0-9"),
        (("submit", "--after", "4711", "--", "true"), 2, "there is no such job"),
        (("submit", "--after", "x", "--", "true"), 2, "not the id of a job"),
        (("submit", "--after-failure", "panic", "--", "true"), 2, "after-failure"),
        (("submit", "--endpoint", "ftp://box", "--", "true"), 2, "--endpoint"),
        (("submit", "--max-log", "1", "--gpus", "0", "--", "true"), 2, "gpus"),
        (("submit", "--time", "0", "--", "true"), 2, "--time: '0' is too short"),
        (("submit", "--priority", "9999999", "--", "true"), 2, "priority"),
        (("submit", "--model", " ", "--", "true"), 2, "model is empty"),
        (("logs", "4711"), 1, "there is no job 4711"),
        (("logs", "1/../2"), 2, "not the id of a job"),
        (("jobs", "4711"), 1, "there is no job"),
        (("cancel",), 2, "--mine"),
        (("cancel", "1", "--mine"), 2, "not both"),
        (("retry",), 2, "name the jobs"),
        (("history", "--since", "soon"), 2, "--since"),
        (("history", "--since", "9999-01-01"), 2, "future"),
    ],
)
def test_bad_input_is_told_and_submits_nothing(
    tmp_path: Path, arguments: tuple[str, ...], code: int, hint: str
) -> None:
    jobs = UserJobs(tmp_path, None)
    assert hint in jobs.call(*arguments, code=code).err
    assert not list(jobs.store.root.glob("[0-9]*"))
    assert jobs.keeper_facts() == {}


def test_a_folder_that_other_users_could_write_to_is_refused(tmp_path: Path) -> None:
    jobs = UserJobs(tmp_path, None)
    jobs.store.root.mkdir()
    jobs.store.root.chmod(0o777)
    said = jobs.call("submit", "--", "true", code=125).err
    assert "of your jobs (mode 0777" in said
    assert "chmod go-w" in said
    assert os.listdir(jobs.store.root) == []  # noqa: PTH208 - names


def test_a_setting_that_is_not_a_duration_is_told(tmp_path: Path) -> None:
    jobs = UserJobs(tmp_path, None)
    said = jobs.call("submit", "--", "true", code=2, env={"GPU_POOL_JOBS_KEEP": "rubbish"}).err
    assert "GPU_POOL_JOBS_KEEP is 'rubbish'" in said
