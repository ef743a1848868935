"""Arrays: a few supervisors, each with one lease, take the tasks one after the other."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpu_worker_pool.jobs.submission import JobState, Run
from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs.user_jobs import UserJobs, twice
from tests.server.leasing import OFTEN, eventually, get, queue, queued, release, take

# Says which it is, and goes on until it is told to end.
HELD = "echo {index} >> ran; while [ ! -e go-{index} ]; do sleep 0.02; done"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_PREEMPT_GRACE": "1", **OFTEN}) as running:
        yield running


@pytest.fixture
def user(server: ServerProcess, tmp_path: Path) -> Iterator[UserJobs]:
    with UserJobs(tmp_path, server) as jobs:
        yield jobs


def sweep(user: UserJobs, script: str, array: str, *options: str) -> str:
    return user.submit("--array", array, *options, "--", "sh", "-c", script)


def let_go(user: UserJobs, *indices: int) -> None:
    for index in indices:
        (user.folder / f"go-{index}").touch()


def over(user: UserJobs, id_: str) -> list[JobState]:
    """The states of all tasks, once all are over."""
    number = int(id_)
    eventually(lambda: user.store.load()[number].submission.is_over, f"all are over {user.keeper_log()}", within_s=60.0)
    return [task.state for task in user.store.load()[number].submission.tasks()]


def runs(user: UserJobs, id_: str) -> list[Run]:
    return list(user.store.load()[int(id_)].submission.runs.values())


def test_the_tasks_run_in_their_order_on_one_lease_each_with_its_own_log_and_exit_code(user: UserJobs) -> None:
    id_ = sweep(user, "echo {index} >> ran; echo out {index}; exit $(({index} % 2))", "0-9")
    assert over(user, id_) == [JobState.ENDED, JobState.FAILED] * 5
    assert user.lines("ran") == [str(index) for index in range(10)]
    assert len(runs(user, id_)) == 1
    assert [user.job(f"{id_}_{index}").task.exit_code for index in range(10)] == [0, 1] * 5
    assert [user.output(f"{id_}_{index}") for index in range(10)] == [f"out {index}\n" for index in range(10)]


def test_a_second_owner_who_asks_in_the_middle_of_a_sweep_is_next(user: UserJobs, server: ServerProcess) -> None:
    id_ = sweep(user, HELD, "0-4")
    eventually(lambda: user.lines("ran") == ["0"], "the first task runs")
    other = queue(server, owner="ada", labels={"command": "ada's"})
    let_go(user, 0)
    assert get(server, other["id"], wait_s=30)["state"] == "active"
    eventually(lambda: user.until(f"{id_}_0").task.state is JobState.ENDED, "it has ended")
    assert user.lines("ran") == ["0"]
    eventually(lambda: len(queued(server)) == 1, "the sweep waits again")
    let_go(user, 1, 2, 3, 4)
    release(server, other["id"])
    assert over(user, id_) == [JobState.ENDED] * 5
    assert user.lines("ran") == ["0", "1", "2", "3", "4"]
    assert len(runs(user, id_)) == 2


def test_what_a_task_leaves_running_is_ended_before_the_next_begins(user: UserJobs) -> None:
    script = (
        "for pid in $(cat left 2>/dev/null); do kill -0 $pid 2>/dev/null && echo alive >> bad; done;"
        "sleep 600 & echo $! >> left; (trap '' TERM HUP; exec setsid sleep 600) & echo $! >> left"
    )
    assert over(user, sweep(user, script, "0-3", "--grace", "0.1s")) == [JobState.ENDED] * 4
    assert len(user.lines("left")) == 8
    assert user.lines("bad") == []


def test_one_task_of_a_sweep_is_cancelled_and_the_others_go_on(user: UserJobs) -> None:
    id_ = sweep(user, HELD, "0-3")
    eventually(lambda: user.lines("ran") == ["0"], "the first task runs")
    assert user.call("cancel", f"{id_}_0", f"{id_}_2", "--json").json["ending"] == [f"{id_}_0"]
    let_go(user, 1, 3)
    assert over(user, id_) == [JobState.CANCELLED, JobState.ENDED, JobState.CANCELLED, JobState.ENDED]
    assert user.lines("ran") == ["0", "1", "3"]
    assert len(runs(user, id_)) == 1


@pytest.mark.parametrize("killed", ["supervisor", "guard", "both"])
def test_a_task_whose_supervisor_or_guard_was_killed_is_interrupted_and_the_others_run_once(
    user: UserJobs, killed: str
) -> None:
    id_ = sweep(user, HELD, "0-3")
    eventually(lambda: user.lines("ran") == ["0"], "the first task runs")
    (run,) = runs(user, id_)
    for pid in {"supervisor": (run.pid,), "guard": (run.guard_pid,), "both": (run.pid, run.guard_pid)}[killed]:
        os.kill(pid, signal.SIGKILL)
    let_go(user, 1, 2, 3)
    assert over(user, id_) == [JobState.INTERRUPTED, *[JobState.ENDED] * 3]
    assert user.lines("ran") == ["0", "1", "2", "3"]
    why = user.job(f"{id_}_0").task.why
    assert why == f"its {'guard' if killed == 'guard' else 'supervisor'} was killed while it ran"


def test_keepers_supervisors_guards_and_servers_that_are_killed_run_no_task_twice(tmp_path: Path) -> None:
    rng = random.Random(18)
    with ServerProcess({"SIMULATED_GPUS": "3", **OFTEN}) as server, UserJobs(tmp_path, server) as user:
        script = 'echo {index} >> ran; sleep 0.1; i=0; while [ $i -lt 50 ]; do i=$((i + 1)); echo "line $i"; done'
        id_ = sweep(user, script, "0-79")
        kills = 0
        while not user.store.load()[int(id_)].submission.is_over:
            open_runs = list(user.store.load()[int(id_)].submission.open_runs.values())
            match rng.choice(["keeper", "supervisor", "guard", "server", "nothing", "nothing", "nothing"]):
                case "keeper":
                    user.kill_keeper()
                case "server":
                    server.kill()
                    server.start()
                case "nothing":
                    pass
                case who if open_runs:
                    run = rng.choice(open_runs)
                    with suppress(ProcessLookupError):
                        os.kill(run.pid if who == "supervisor" else run.guard_pid, signal.SIGKILL)
                        kills += 1
            user.call("jobs")
        submission = user.store.load()[int(id_)].submission
        ran = user.lines("ran")
        assert twice(ran) == []
        states = {index: submission.task(index).state for index in range(80)}
        assert set(states.values()) <= {JobState.ENDED, JobState.INTERRUPTED}
        assert sum(state is JobState.INTERRUPTED for state in states.values()) <= kills
        for index, state in states.items():
            if state is JobState.ENDED:
                assert str(index) in ran
                assert user.output(f"{id_}_{index}") == "".join(f"line {line}\n" for line in range(1, 51))


def test_a_job_that_writes_a_checkpoint_at_its_time_limit_has_not_ended_well(user: UserJobs) -> None:
    script = "trap 'exit 0' TERM; while :; do sleep 0.02; done"
    id_ = user.script(script, "--time", "4s", "--grace", "0.5s")
    after = user.script("true", "--after", id_)
    assert user.until(after).task.state is JobState.SKIPPED
    task = user.job(id_).task
    assert (task.state, task.exit_code, task.end_reason) == (JobState.FAILED, 0, "time_limit")
    (shown,) = [job for job in user.call("history", "--mine", "--json").json["jobs"] if job["id"] == id_]
    assert (shown["state"], shown["end_reason"]) == ("failed", "time_limit")
    assert "the time limit" in user.call("history", "--mine").out


def test_retry_of_an_array_repeats_what_did_not_end_well(user: UserJobs) -> None:
    id_ = sweep(user, "echo {index} >> ran; [ {index} != 3 ]", "0-4")
    over(user, id_)
    done = user.call("retry", id_)
    assert done.out == f"job {id_}_3 is submitted again\n"
    assert f"4 tasks of job {id_} ended well" in done.err
    over(user, id_)
    assert user.lines("ran") == ["0", "1", "2", "3", "4", "3"]
    assert user.call("retry", "--all", id_).out == f"5 tasks of job {id_} are submitted again\n"
    over(user, id_)
    assert sorted(user.lines("ran")) == sorted([*"01234", "3", *"01234"])
    assert user.call("retry", f"{id_}_0").out == f"job {id_}_0 is submitted again\n"


def test_retry_of_a_skipped_job_says_what_holds_it(user: UserJobs) -> None:
    first = user.script("[ -e good ]")
    skipped = user.script("true", "--after", first)
    assert user.until(skipped).task.state is JobState.SKIPPED
    done = user.call("retry", skipped, code=1)
    assert done.out == ""
    assert f"job {skipped} would be skipped again: job {first} failed; run `gpu-pool retry {first}` first" in done.err
    assert user.state(skipped) is JobState.SKIPPED
    (user.folder / "good").touch()
    user.call("retry", first)
    user.until(first, JobState.ENDED)
    user.call("retry", skipped)
    assert user.until(skipped, JobState.ENDED).task.attempts == 1


def test_a_job_that_cannot_be_written_stops_no_other(user: UserJobs) -> None:
    first = user.script(HELD.replace("{index}", "0"))
    eventually(lambda: user.lines("ran") == ["0"], "it runs")
    second = user.script("true", "--after", first)
    third = user.script("echo third >> ran", "--after", first, "--after-failure", "run")
    journal = user.store.root / second / "journal.jsonl"
    journal.unlink()
    journal.mkdir()
    user.kill_keeper()
    user.call("jobs")
    let_go(user, 0)
    assert user.until(third).task.state is JobState.ENDED
    assert user.lines("ran") == ["0", "third"]
    assert "cannot be read" in user.call("jobs", second).out


def test_a_task_that_runs_does_not_wait_and_the_next_one_does(tmp_path: Path) -> None:
    with ServerProcess({"SIMULATED_GPUS": "2", **OFTEN}) as server, UserJobs(tmp_path, server) as user:
        others = take(server, owner="ada", time_limit_s=3600)
        id_ = sweep(user, HELD, "0-1")
        states = ["running", "waiting"]

        def seen() -> list[dict[str, object]] | None:
            jobs: list[dict[str, object]] = json.loads(user.call("jobs", "--json", id_).out)["jobs"]
            return jobs if [job["state"] for job in jobs] == states and jobs[1]["position"] else None

        running, waiting = eventually(seen, "one task runs, the other waits")
        assert (running["position"], running["expected_start_at"], waiting["position"]) == (None, None, 1)
        release(server, others["id"])
        let_go(user, 0, 1)
        assert over(user, id_) == [JobState.ENDED] * 2
