"""Keepers, guards and servers that are killed: no job runs twice, none is lost, and the order stays."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.cli.jobs.keeper_link import lock_keeper
from gpu_worker_pool.jobs.life import JobState
from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs import soak
from tests.cli.jobs.user_jobs import UserJobs
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


def guard_pid(user: UserJobs, id_: str) -> int:
    guard = user.record(id_).life.guard
    assert guard is not None
    return guard.pid


def test_what_ran_goes_on_and_what_waited_waits_again_in_its_order(user: UserJobs) -> None:
    running = held(user)
    waiting = [user.script("echo $GPU_POOL_JOB_ID >> order") for _ in range(4)]
    user.until(waiting[-1], JobState.WAITING)
    user.kill_keeper()
    guard = guard_pid(user, running)
    last = user.script("echo $GPU_POOL_JOB_ID >> order")  # this starts a keeper
    assert f"job {running} goes on (pid {guard})" in user.keeper_log()
    user.until(last, JobState.WAITING)
    assert user.state(running) is JobState.RUNNING
    let_go(user, running)
    for id_ in (running, *waiting, last):
        life = user.until(id_).life
        assert (life.state, life.exit_code, life.attempts) == (JobState.ENDED, 0, 1)
    assert user.lines("order") == [*waiting, last]
    assert user.lines("ran").count(f"began {running}") == 1
    assert user.output(running) == "good\n"


def test_a_killed_keeper_is_replaced_while_a_job_runs_without_any_command(user: UserJobs) -> None:
    running = held(user)
    waiting = user.script("echo went on")
    killed = user.keeper_facts()["pid"]
    user.kill_keeper()
    eventually(lambda: user.keeper_facts().get("pid", killed) != killed, "a keeper is there again", within_s=60.0)
    let_go(user, running)
    assert user.until(running).life.state is JobState.ENDED
    assert (user.until(waiting).life.state, user.output(waiting)) == (JobState.ENDED, "went on\n")
    # The guard that started it has ended, and has not ended the keeper.
    assert user.keeper_facts()["pid"] not in (None, killed)
    assert user.call("jobs").err.startswith("gpu-pool: no job waits or runs")


def test_a_job_that_goes_on_is_cancelled_by_the_next_keeper(user: UserJobs) -> None:
    running = held(user)
    user.kill_keeper()
    assert user.call("cancel", running).out == f"job {running} is being ended\n"
    assert user.until(running).life.state is JobState.CANCELLED


def test_a_lease_that_was_released_while_no_keeper_was_there_ends_its_job(user: UserJobs) -> None:
    running = held(user)
    lease = user.record(running).life.lease
    assert lease is not None
    user.kill_keeper()
    user.call("release", lease.id)
    user.call("jobs")
    life = user.until(running).life
    assert life.state is JobState.FAILED
    assert "its GPU was lost" in (life.why or "")


def test_how_a_job_ended_is_known_also_where_no_keeper_was_there(user: UserJobs) -> None:
    running = held(user)
    guard = guard_pid(user, running)
    user.kill_keeper()
    let_go(user, running)
    assert has_ended(guard)
    user.call("jobs")
    life = user.until(running).life
    assert (life.state, life.exit_code) == (JobState.ENDED, 0)


def test_a_job_whose_guard_was_killed_is_interrupted_and_not_run_again(user: UserJobs) -> None:
    running = held(user)
    os.kill(guard_pid(user, running), signal.SIGKILL)
    life = user.until(running).life
    assert (life.state, life.why) == (JobState.INTERRUPTED, "its guard was killed while it ran")
    with_keeper = held(user)
    guard = guard_pid(user, with_keeper)
    user.kill_keeper()
    os.kill(guard, signal.SIGKILL)
    assert has_ended(guard)
    user.call("jobs")
    assert user.until(with_keeper).life.state is JobState.INTERRUPTED
    assert user.lines("ran").count(f"began {with_keeper}") == 1
    let_go(user, with_keeper)
    user.call("retry", with_keeper)
    assert user.until(with_keeper, JobState.ENDED).life.attempts == 2


def test_after_a_restart_of_the_machine_what_ran_is_interrupted_and_what_waited_waits(user: UserJobs) -> None:
    running, waiting = held(user), user.script("echo waited")
    user.until(waiting, JobState.WAITING)
    guard = guard_pid(user, running)
    user.kill_keeper()
    os.kill(guard, signal.SIGKILL)
    assert has_ended(guard)
    # The same files, from an earlier boot.
    journal = user.record(running).folder / "events.jsonl"
    events = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    for event in events:
        if event["event"] == "started":
            event["guard"] |= {"boot_id": "an earlier boot", "pid": os.getpid()}
    journal.write_text("".join(f"{json.dumps(event)}\n" for event in events), encoding="utf-8")
    user.call("jobs")
    life = user.until(running).life
    assert (life.state, life.why) == (JobState.INTERRUPTED, "the machine was restarted while it ran")
    assert user.until(waiting).life.state is JobState.ENDED


def locked_after_a_kill(user: UserJobs) -> int:
    """Kill the keeper and take its lock. The guard of a job may start another keeper in between: then that one is killed too."""
    for _ in range(20):
        user.kill_keeper()
        lock = lock_keeper(user.store.root)
        if lock is not None:
            return lock
    raise AssertionError("another keeper was always faster")


def test_a_job_that_was_written_down_as_started_and_never_was_is_run(user: UserJobs) -> None:
    """As a keeper that died between the two leaves it: its guard has written that nothing was started."""
    running, waiting = held(user), user.script("echo ran at last")
    user.until(waiting, JobState.WAITING)
    lock = locked_after_a_kill(user)  # no other keeper may start before all is as that one has left it
    started = (user.record(running).folder / "events.jsonl").read_text(encoding="utf-8").splitlines()[1]
    event = json.loads(started)
    event["guard"]["pid"], event["guard"]["address"] = guard_pid(user, running), "nothing listens here"
    event["guard"]["boot_id"] = "an earlier boot"
    folder = user.record(waiting).folder
    with (folder / "events.jsonl").open("a", encoding="utf-8") as journal:
        journal.write(f"{json.dumps(event)}\n")
    outcome = folder / "outcome-1.json"
    outcome.write_text('{"address": "nothing listens here", "is_started": false}', encoding="utf-8")
    os.close(lock)
    let_go(user, running)
    user.call("jobs")
    life = user.until(waiting).life
    assert (life.state, life.attempts, user.output(waiting)) == (JobState.ENDED, 1, "ran at last\n")


# Of one job a keeper appends: that it is requested, that it starts, what it used, and how it ended.
@pytest.mark.parametrize(
    "failpoint", ["before_append:2", "in_append:2", "after_append:2", "before_append:4", "after_append:4"]
)
def test_a_keeper_that_dies_at_a_boundary_of_the_journal_leaves_a_job_that_runs_once(
    user: UserJobs, failpoint: str
) -> None:
    user.kill_keeper()
    id_ = user.submit("--", "sh", "-c", "echo $GPU_POOL_JOB_ID >> once", env={"GPU_POOL_FAILPOINT": failpoint})
    pid = user.keeper_facts()["pid"]
    assert has_ended(pid, within_s=60.0)
    user.call("jobs")
    life = user.until(id_).life
    assert (life.state, life.exit_code, life.attempts) == (JobState.ENDED, 0, 1)
    assert user.lines("once").count(id_) == 1


def test_what_the_guard_of_an_attempt_before_wrote_does_not_count(user: UserJobs) -> None:
    """An attempt that was not started and the one after it have the same number: the job must not run twice."""
    running = held(user)
    guard = guard_pid(user, running)
    user.kill_keeper()
    os.kill(guard, signal.SIGKILL)
    assert has_ended(guard)
    outcome = user.record(running).folder / "outcome-1.json"
    outcome.write_text('{"address": "of another guard", "is_started": false}', encoding="utf-8")
    user.call("jobs")
    assert user.until(running).life.state is JobState.INTERRUPTED
    assert user.lines("ran").count(f"began {running}") == 1


def test_a_job_whose_waiting_process_was_killed_is_requested_again(user: UserJobs) -> None:
    running = held(user)
    waiting = [user.script("echo $GPU_POOL_JOB_ID >> places") for _ in range(3)]
    eventually(lambda: len(_holders(user)) == 3, "the requests are in the queue")
    os.kill(_holders(user)[0], signal.SIGKILL)
    let_go(user, running)
    for id_ in waiting:
        assert user.until(id_).life.state is JobState.ENDED
    assert user.lines("places") == waiting  # it has kept its place


def _holders(user: UserJobs) -> list[int]:
    assert user.server is not None
    return [lease["pid"] for lease in user.server.json("/leases")["leases"] if lease["state"] == "queued"]


def test_a_preempted_job_is_run_again_before_those_behind_it(tmp_path: Path) -> None:
    settings = {"SIMULATED_GPUS": "1", "GPU_POOL_PREEMPT_GRACE": "1", **OFTEN}
    with ServerProcess(settings) as server, UserJobs(tmp_path, server) as user:
        script = "echo $GPU_POOL_JOB_ID >> order; while [ ! -e go ]; do sleep 0.05; done"
        ids = [user.script(script, "--preemptible", "--grace", "0.1s") for _ in range(3)]
        eventually(lambda: len(_holders(user)) == 2, "the others wait")
        eventually(lambda: user.lines("order"), "the first one runs")
        other = queue(server, priority=1)
        assert get(server, other["id"], wait_s=30)["state"] == "active"
        eventually(lambda: len(_holders(user)) == 3, "the first one waits again")
        (user.folder / "go").touch()
        release(server, other["id"])
        for id_ in ids:
            assert user.until(id_).life.state is JobState.ENDED
        assert user.lines("order") == [ids[0], *ids]
        life = user.record(ids[0]).life
        assert (life.attempts, life.tries, life.preemptions) == (2, 1, 1)


def test_a_job_without_its_environment_is_not_run(user: UserJobs) -> None:
    running, waiting = held(user), user.script("touch it-ran")
    user.kill_keeper()
    (user.record(waiting).folder / "environment.json").unlink()
    user.call("jobs")
    assert "environment of job" in (user.until(waiting).life.why or "")
    let_go(user, running)
    user.until(running)
    assert not (user.folder / "it-ran").exists()


def test_there_is_one_keeper(user: UserJobs) -> None:
    running = held(user)
    first = user.keeper_facts()
    assert user.call("keeper").code == 0
    assert user.keeper_facts() == first
    let_go(user, running)
    user.until(running)


def test_a_job_waits_for_a_server_that_is_not_there_yet(tmp_path: Path) -> None:
    with ServerProcess({"SIMULATED_GPUS": "1", **OFTEN}) as server, UserJobs(tmp_path, server) as user:
        server.kill()
        id_ = user.script("echo at last")
        eventually(lambda: "no GPU server can be used" in user.call("jobs").out, "it says what it waits for")
        server.start()
        assert user.until(id_).life.state is JobState.ENDED


def test_jobs_survive_the_end_of_shells_keepers_and_servers(tmp_path: Path) -> None:
    """Some of what `python -m tests.cli.jobs.soak` does with 200."""
    assert soak.run(tmp_path, 5, random.Random(3), lambda _: None, most_faults=3) == []


def test_a_job_that_was_preempted_while_no_keeper_was_there_is_run_again(tmp_path: Path) -> None:
    settings = {"SIMULATED_GPUS": "1", "GPU_POOL_PREEMPT_GRACE": "1", **OFTEN}
    with ServerProcess(settings) as server, UserJobs(tmp_path, server) as user:
        script = "trap '' TERM; echo began >> ran; while [ ! -e go ]; do sleep 0.05; done"
        id_ = user.script(script, "--preemptible")
        eventually(lambda: user.lines("ran"), "it runs")
        other = queue(server, priority=1)
        eventually(lambda: "save your work" in user.keeper_log(), "it is warned")
        user.kill_keeper()
        assert get(server, other["id"], wait_s=30)["state"] == "active"
        user.call("jobs")
        assert user.until(id_, JobState.WAITING).life.end_reason == "preempted"
        (user.folder / "go").touch()
        release(server, other["id"])
        assert user.until(id_).life.state is JobState.ENDED
        assert user.lines("ran") == ["began", "began"]


def test_a_job_that_waits_says_that_its_server_has_gone(tmp_path: Path) -> None:
    with ServerProcess({"SIMULATED_GPUS": "1", **OFTEN}) as server, UserJobs(tmp_path, server) as user:
        held(user)
        waiting = user.script("echo at last")
        eventually(lambda: "leased by" in user.call("jobs", waiting).out, "it says why it waits")
        server.kill()
        (shown,) = user.call("jobs", "--json", waiting).json["jobs"]
        assert shown["reason"].startswith("no server answers: ")
        assert "no server answers" in user.call("jobs").out


def test_a_job_whose_submission_was_damaged_is_shown_and_can_be_cancelled(user: UserJobs) -> None:
    running = held(user)
    user.kill_keeper()
    (user.record(running).folder / "job.json").write_text("{", encoding="utf-8")
    (shown,) = user.call("jobs", "--json").json["jobs"]
    assert (shown["id"], shown["state"]) == (running, "unreadable")
    assert "cannot be read" in user.call("jobs").out
    assert user.call("cancel", running).out == f"job {running} is being ended\n"
    assert user.until(running).life.state is JobState.CANCELLED
    assert "cannot be read" in user.call("retry", running, code=1).err


def test_a_job_whose_journal_was_emptied_while_it_ran_is_not_run_a_second_time(user: UserJobs) -> None:
    running = held(user)
    guard = guard_pid(user, running)
    user.kill_keeper()
    (user.record(running).folder / "events.jsonl").write_bytes(b"")
    assert "its journal is damaged" in user.call("jobs", running).out
    life = user.until(running).life
    assert (life.state, user.lines("ran").count(f"began {running}")) == (JobState.INTERRUPTED, 1)
    let_go(user, running)
    assert has_ended(guard)
    user.call("retry", running)
    assert user.until(running).life.state is JobState.ENDED
    assert user.lines("ran").count(f"began {running}") == 2


def test_a_job_that_runs_is_cancelled_also_where_nothing_can_be_written(user: UserJobs) -> None:
    running = held(user)
    guard, journal = guard_pid(user, running), user.record(running).folder / "events.jsonl"
    kept = journal.rename(journal.with_name("kept"))
    journal.mkdir()
    assert user.call("cancel", running).out == f"job {running} is being ended\n"
    assert has_ended(guard)
    journal.rmdir()
    kept.rename(journal)
    assert user.until(running).life.state is JobState.CANCELLED


def test_a_keeper_whose_log_cannot_be_written_lives(tmp_path: Path) -> None:
    with UserJobs(tmp_path, None) as user:
        user.store.make()
        (user.store.root / "keeper.log").symlink_to("/dev/full")
        id_ = user.submit("--endpoint", "http://127.0.0.1:9", "--", "true")
        first = user.keeper_facts()
        eventually(lambda: "no GPU server" in user.call("jobs").out, "it has said what it waits for")
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
    assert user.until(done.out.strip()).life.state is JobState.ENDED
