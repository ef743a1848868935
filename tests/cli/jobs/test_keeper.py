"""Keepers, guards and servers that are killed: no job runs twice, none is lost, and the order stays."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpu_worker_pool.jobs.submission import JobState, Run
from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs import soak
from tests.cli.jobs.user_jobs import UserJobs
from tests.cli.own_process import GPU_POOL, environment, gpu_pool
from tests.processes import has_ended
from tests.server.leasing import OFTEN, eventually, get, queue, release

# Says that it began, and goes on until it is told to end.
HELD = "echo began $GPU_POOL_JOB_ID >> ran; while [ ! -e go-$GPU_POOL_JOB_ID ]; do sleep 0.05; done; echo good"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "1", **OFTEN}) as running:
        yield running


def held(user: UserJobs) -> str:
    """A job that runs until `let_go`; its id."""
    id_ = user.script(HELD)
    user.until(id_, JobState.RUNNING)
    eventually(lambda: f"began {id_}" in user.lines("ran"), "its command runs")
    return id_


def let_go(user: UserJobs, id_: str) -> None:
    (user.folder / f"go-{id_}").touch()


def run_of(user: UserJobs, id_: str) -> Run:
    run = user.job(id_).run
    assert run is not None
    return run


def guard_pid(user: UserJobs, id_: str) -> int:
    return run_of(user, id_).guard_pid


def rewrite_journal(user: UserJobs, id_: str, **facts: object) -> None:
    """Change what the journal says of the supervisor."""
    journal = user.job(id_).record.folder / "journal.jsonl"
    events = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    for event in events:
        if "run" in event:
            event["run"] |= facts
    journal.write_text("".join(f"{json.dumps(event)}\n" for event in events), encoding="utf-8")


def test_what_ran_goes_on_and_what_waited_waits_again_in_its_order(user: UserJobs) -> None:
    running = held(user)
    waiting = [user.script("echo $GPU_POOL_JOB_ID >> order") for _ in range(4)]
    user.until(waiting[-1], JobState.WAITING)
    user.kill_keeper()
    guard = guard_pid(user, running)
    last = user.script("echo $GPU_POOL_JOB_ID >> order")  # this starts a keeper
    assert guard_pid(user, running) == guard
    user.until(last, JobState.WAITING)
    assert user.state(running) is JobState.RUNNING
    keeper = user.keeper_facts()
    assert (user.call("keeper").code, user.keeper_facts()) == (0, keeper), "there is one keeper"
    let_go(user, running)
    for id_ in (running, *waiting, last):
        task = user.until(id_).task
        assert (task.state, task.exit_code, task.attempts) == (JobState.ENDED, 0, 1)
    assert user.lines("order") == [*waiting, last]
    assert user.lines("ran").count(f"began {running}") == 1
    assert user.output(running) == "good\n"


def test_a_killed_keeper_is_replaced_when_a_job_ends_without_any_command(user: UserJobs) -> None:
    running = held(user)
    waiting = user.script("echo went on")
    user.kill_keeper()
    let_go(user, running)
    assert user.until(running).task.state is JobState.ENDED
    assert (user.until(waiting).task.state, user.output(waiting)) == (JobState.ENDED, "went on\n")
    # The GPU of the last one drains first.
    eventually(
        lambda: user.call("jobs").err.startswith("gpu-pool: you have nothing running or waiting"), "nothing is left"
    )


def test_a_lease_that_was_released_while_no_keeper_was_there_ends_its_job(user: UserJobs) -> None:
    running = held(user)
    lease_id = run_of(user, running).lease_id
    assert lease_id is not None
    user.kill_keeper()
    user.call("release", lease_id)
    task = user.until(running).task
    assert task.state is JobState.FAILED
    assert "its GPU was lost" in (task.why or "")


def test_a_job_whose_guard_was_killed_without_a_keeper_is_interrupted_and_not_run_again(user: UserJobs) -> None:
    running = held(user)
    guard = guard_pid(user, running)
    user.kill_keeper()
    os.kill(guard, signal.SIGKILL)
    assert has_ended(guard)
    user.call("jobs")
    assert user.until(running).task.state is JobState.INTERRUPTED
    assert user.lines("ran").count(f"began {running}") == 1
    let_go(user, running)
    user.call("retry", running)
    assert user.until(running, JobState.ENDED).task.attempts == 2


def test_after_a_restart_of_the_machine_what_ran_is_interrupted_and_what_waited_waits(user: UserJobs) -> None:
    running, waiting = held(user), user.script("echo waited")
    user.until(waiting, JobState.WAITING)
    run = run_of(user, running)
    user.kill_keeper()
    for pid in (run.pid, run.guard_pid):
        os.kill(pid, signal.SIGKILL)
        assert has_ended(pid)
    # The same files, from an earlier boot.
    rewrite_journal(user, running, boot_id="an earlier boot", pid=os.getpid(), guard_pid=os.getpid())
    user.call("jobs")
    task = user.until(running).task
    assert (task.state, task.why) == (JobState.INTERRUPTED, "the machine was restarted while it ran")
    assert user.until(waiting).task.state is JobState.ENDED


# Of one job the keeper appends that it is requested; its supervisor, that it begins (two records), that the job starts, and
# how it ended.
@pytest.mark.parametrize(
    ("failpoint", "ran"),
    [
        ("before_append:1", 1),
        ("in_append:1", 1),
        ("before_append:3", 1),
        ("in_append:3", 0),
        ("after_append:1", 0),
        ("before_append:4", 1),
        ("in_append:4", 1),
    ],
)
def test_a_process_that_dies_at_a_boundary_of_the_journal_leaves_a_job_that_runs_once_or_is_interrupted(
    user: UserJobs, failpoint: str, ran: int
) -> None:
    user.kill_keeper()
    done = gpu_pool(
        *("submit", "--", "sh", "-c", "echo $GPU_POOL_JOB_ID >> once"),
        server=user.server,
        env={**user.env, "GPU_POOL_FAILPOINT": failpoint},
        cwd=user.folder,
    )
    id_ = done.out.strip()
    facts = user.keeper_facts()
    eventually(
        lambda: (
            not facts
            or has_ended(facts["pid"], within_s=0.0)
            or any(has_ended(run.pid, within_s=0.0) for run in user.job(id_).record.submission.runs.values())
        ),
        "the process has died",
        within_s=60.0,
    )
    user.kill_keeper()
    user.call("jobs")
    task = user.until(id_).task
    assert task.attempts == 1
    assert user.lines("once").count(id_) == ran
    # What a journal says that was not acted upon is not known to have run: it is not run again.
    was_cut = failpoint in {"in_append:3", "after_append:1", "before_append:4"}
    assert task.state is (JobState.INTERRUPTED if was_cut else JobState.ENDED)


def test_a_job_whose_waiting_process_was_killed_is_requested_again(user: UserJobs) -> None:
    running = held(user)
    waiting = [user.script("echo $GPU_POOL_JOB_ID >> places") for _ in range(3)]
    eventually(lambda: len(_holders(user)) == 3, "the requests are in the queue")
    os.kill(_holders(user)[0], signal.SIGKILL)
    let_go(user, running)
    for id_ in waiting:
        assert user.until(id_).task.state is JobState.ENDED
    assert user.lines("places") == waiting  # it has kept its place


def _holders(user: UserJobs) -> list[int]:
    assert user.server is not None
    return [lease["pid"] for lease in user.server.json("/leases")["leases"] if lease["state"] == "queued"]


def test_a_preempted_job_is_run_again_before_those_behind_it_whatever_its_exit_code(tmp_path: Path) -> None:
    settings = {"SIMULATED_GPUS": "1", "GPU_POOL_PREEMPT_GRACE": "1", **OFTEN}
    with ServerProcess(settings) as server, UserJobs(tmp_path, server) as user:
        script = "trap 'exit 0' TERM; echo $GPU_POOL_JOB_ID $GPU_POOL_RESTART >> order; while [ ! -e go ]; do sleep 0.05; done"
        ids = [user.script(script, "--preemptible", "--grace", "0.1s") for _ in range(3)]
        after = user.script("echo after >> order", "--after", ids[0], "--preemptible")
        eventually(lambda: len(_holders(user)) == 2, "the others wait")
        eventually(lambda: user.lines("order"), "the first one runs")
        other = queue(server, priority=1)
        assert get(server, other["id"], wait_s=30)["state"] == "active"
        eventually(lambda: len(_holders(user)) == 3, "the first one waits again")
        (user.folder / "go").touch()
        release(server, other["id"])
        for id_ in ids:
            assert user.until(id_).task.state is JobState.ENDED
        assert user.until(after).task.state is JobState.ENDED
        assert user.lines("order") == [f"{ids[0]} 0", f"{ids[0]} 1", *(f"{id_} 0" for id_ in ids[1:]), "after"]
        task = user.job(ids[0]).task
        assert (task.attempts, task.tries, task.restarts) == (2, 1, 1)


def test_a_job_without_its_environment_is_not_run(user: UserJobs) -> None:
    running, waiting = held(user), user.script("touch it-ran")
    user.kill_keeper()
    (user.job(waiting).record.folder / "environment.json").unlink()
    user.call("jobs")
    assert "environment of job" in (user.until(waiting).task.why or "")
    let_go(user, running)
    user.until(running)
    assert not (user.folder / "it-ran").exists()


def test_a_job_waits_for_a_server_that_is_away_and_says_so(tmp_path: Path) -> None:
    with ServerProcess({"SIMULATED_GPUS": "1", **OFTEN}) as server, UserJobs(tmp_path, server) as user:
        running, waiting = held(user), user.script("echo at last")
        eventually(lambda: "leased by" in user.call("jobs", waiting).out, "it says why it waits")
        server.kill()
        later = user.script("echo at last")
        for id_ in (waiting, later):
            (shown,) = user.call("jobs", "--json", id_).json["jobs"]
            assert shown["reason"].startswith("no server answers: ")
        assert "no server answers" in user.call("jobs").out
        server.start()
        let_go(user, running)
        assert user.until(later).task.state is JobState.ENDED


def test_jobs_survive_the_end_of_shells_keepers_and_servers(tmp_path: Path) -> None:
    """Some of what `python -m tests.cli.jobs.soak` does with 200."""
    assert soak.run(tmp_path, 5, random.Random(3), lambda _: None, most_faults=3) == []


def test_a_job_whose_submission_was_damaged_is_shown_and_can_be_cancelled(user: UserJobs) -> None:
    running = held(user)
    user.kill_keeper()
    (user.job(running).record.folder / "job.json").write_text("{", encoding="utf-8")
    (shown,) = user.call("jobs", "--json").json["jobs"]
    assert (shown["id"], shown["state"]) == (running, "unreadable")
    assert "cannot be read" in user.call("jobs").out
    assert user.call("cancel", running).out == f"job {running} is being ended\n"
    assert user.until(running).task.state is JobState.CANCELLED
    assert "cannot be read" in user.call("retry", running, code=1).err


@pytest.mark.parametrize("has_keeper", [False, True])
def test_a_job_whose_journal_was_emptied_while_it_ran_is_not_run_a_second_time(
    user: UserJobs, has_keeper: bool
) -> None:
    running = held(user)
    guard = guard_pid(user, running)
    if not has_keeper:
        user.kill_keeper()
    (user.job(running).record.folder / "journal.jsonl").write_bytes(b"")
    let_go(user, running)
    assert has_ended(guard)
    user.call("jobs")
    task = user.until(running).task
    assert (task.state, user.lines("ran").count(f"began {running}")) == (JobState.INTERRUPTED, 1)
    assert "its journal is damaged" in (task.why or "")
    assert "Traceback" not in user.keeper_log()
    user.call("retry", running)
    assert user.until(running).task.state is JobState.ENDED
    assert user.lines("ran").count(f"began {running}") == 2


def test_a_full_disk_is_named_and_what_ended_meanwhile_is_written_down_later(
    server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "jobs").mkdir(mode=0o700)
    mount = ["/bin/mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", str(tmp_path / "jobs")]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with UserJobs(tmp_path, server) as user:
            # Enough of them that the journal needs more room.
            script = "until [ -e go-$GPU_POOL_ARRAY_ID ]; do sleep 0.02; done"
            id_ = user.submit("--array", "0-40", "--", "sh", "-c", script)
            user.until(f"{id_}_0", JobState.RUNNING)
            filler = user.store.root / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            let_go(user, id_)
            why = f"nothing can be written to {user.store.root}: No space left on device; make room"
            journal = user.store.root / id_ / "journal.jsonl"

            sizes: list[int] = []

            def is_stuck() -> bool:
                sizes.append(journal.stat().st_size)
                return why in user.call("jobs").err and len(sizes) > 3 and len(set(sizes[-3:])) == 1

            eventually(is_stuck, "it is said, and no more is written")
            assert "No space left on device" in user.call("submit", "--", "true", code=125).err
            filler.unlink()
            user.until(f"{id_}_40")
            assert f"job {id_} was written down late: No space left on device" in user.keeper_log()
    finally:
        subprocess.run(["/bin/umount", "--lazy", str(tmp_path / "jobs")], check=True)


def test_a_job_that_runs_is_cancelled_also_where_nothing_can_be_written(user: UserJobs) -> None:
    running = held(user)
    cancel = shlex.join([*GPU_POOL, "cancel", running])
    # No file can be made longer.
    script = ["sh", "-c", f"ulimit -f 0; exec {cancel}"]
    done = subprocess.run(script, env=environment(user.server, user.env), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"job {running} is being ended\n"), done
    assert user.until(running).task.state is JobState.CANCELLED


def test_a_keeper_whose_log_cannot_be_written_lives(tmp_path: Path) -> None:
    with UserJobs(tmp_path, None) as user:
        user.store.make()
        (user.store.root / "keeper.log").symlink_to("/dev/full")
        id_ = user.submit("--endpoint", "http://127.0.0.1:9", "--", "true")
        first = user.keeper_facts()
        eventually(lambda: "no server answers" in user.call("jobs").out, "it waits")
        assert user.keeper_facts() == first != {}
        assert user.call("cancel", id_).out == f"job {id_} is cancelled\n"


def test_a_keeper_that_is_stopped_keeps_no_command_waiting_for_long(user: UserJobs) -> None:
    running = held(user)
    pid = user.keeper_facts()["pid"]
    os.kill(pid, signal.SIGSTOP)
    done = user.call("submit", "--", "true")
    assert done.out.strip().isdigit()
    assert f"kill -CONT {pid}" in done.err
    os.kill(pid, signal.SIGCONT)
    let_go(user, running)
    assert user.until(done.out.strip()).task.state is JobState.ENDED
