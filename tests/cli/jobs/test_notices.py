"""`gpu-pool submit --on-granted` and `--notify`: told by its supervisor, or by the keeper of what does not run."""

from __future__ import annotations

from gpu_worker_pool.jobs.submission import JobState
from tests.cli.jobs.user_jobs import UserJobs
from tests.notify.receiver import receiver


def test_a_job_that_ends_is_told_with_its_exit_code(user: UserJobs) -> None:
    with receiver() as at:
        id_ = user.script("exit 4", "--name", "mine", "--notify", at.url)
        granted, ended = at.next(), at.next()

    assert user.server is not None
    assert f"'s job {id_} (mine) has GPU " in granted.title
    assert granted.title.endswith(f" of {user.server.json('/pool')['node']}")
    assert ended.title.endswith(f"'s job {id_} (mine) ended with exit code 4")
    assert ended.details["Lease"] == granted.details["Lease"] != ""


def test_a_job_that_cannot_run_is_told(user: UserJobs) -> None:
    with receiver() as at:
        user.script("true", "--timeout", "0s", "--endpoint", "http://127.0.0.1:9", "--notify", at.url)
        ended = at.next()
    assert ended.title.endswith(" ended with exit code 124: failed")
    assert "Lease" not in ended.details
    assert ended.details["Details"]


def test_the_end_is_told_also_where_the_keeper_was_killed(user: UserJobs) -> None:
    with receiver() as at:
        id_ = user.script("until [ -e go-on ]; do sleep 0.05; done", "--notify", at.url)
        assert " has GPU " in at.next().title
        user.until(id_, JobState.RUNNING)
        user.kill_keeper()
        user.call("jobs")
        (user.folder / "go-on").touch()
        ended = at.next()
    assert (ended.details["Exit code"], ended.details["Job"]) == ("0", id_)


def test_the_supervisor_stays_until_the_receiver_answers(user: UserJobs) -> None:
    with receiver(503, 503) as at:
        id_ = user.script("true", "--notify", at.url)
        told = [at.next() for _ in range(4)]
    assert told[0].body == told[1].body == told[2].body
    assert " ended with exit code 0" in told[3].title
    assert user.until(id_).task.state is JobState.ENDED


def test_the_program_of_on_granted_is_found_in_the_directory_of_submit(user: UserJobs) -> None:
    told = user.folder / "told"
    told.write_text("#!/bin/sh\necho $GPU_POOL_EVENT $GPU_POOL_JOB_ID > was-told\n")
    told.chmod(0o755)
    id_ = user.script("until [ -s was-told ]; do sleep 0.05; done", "--on-granted", "./told")
    assert user.until(id_).task.state is JobState.ENDED
    assert (user.folder / "was-told").read_text() == f"granted {id_}\n"


def test_a_job_says_that_the_program_of_on_granted_was_removed(user: UserJobs) -> None:
    told = user.folder / "told"
    told.write_text("#!/bin/sh\n")
    told.chmod(0o755)
    first = user.script("until [ -e go-on ]; do sleep 0.05; done")
    id_ = user.script("true", "--after", first, "--on-granted", "./told")
    told.unlink()
    (user.folder / "go-on").touch()
    task = user.until(id_).task
    assert (task.state, task.why is not None and "--on-granted: there is no program './told'" in task.why) == (
        JobState.FAILED,
        True,
    )
