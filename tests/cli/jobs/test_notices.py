"""`gpu-pool submit --on-granted` and `--notify`: told by the keeper."""

from __future__ import annotations

from pathlib import Path

from gpu_worker_pool.jobs.life import JobState
from tests.cli.jobs.user_jobs import UserJobs
from tests.notify.receiver import receiver
from tests.server.leasing import eventually


def test_a_job_that_ends_is_told_with_its_exit_code(user: UserJobs) -> None:
    with receiver() as at:
        id_ = user.script("exit 4", "--name", "mine", "--notify", at.url)
        granted, ended = at.next().json, at.next().json

    assert (granted["on"], granted["job"], granted["labels"]) == ("granted", id_, {"command": "mine"})
    assert (ended["on"], ended["job"], ended["exit_code"]) == ("ended", id_, 4)
    assert ended["lease_id"] == granted["lease_id"] != ""
    assert user.server is not None
    assert [gpu["node"] for gpu in granted["gpus"]] == [user.server.json("/pool")["node"]]


def test_a_repeated_job_is_told_of_each_time(user: UserJobs) -> None:
    with receiver() as at:
        user.script("exit 4", "--retries", "1", "--notify", at.url)
        assert [at.next().json["on"] for _ in range(4)] == ["granted", "ended", "granted", "ended"]


def test_a_job_that_cannot_run_is_told(user: UserJobs) -> None:
    with receiver() as at:
        user.script("true", "--gpus", "64", "--notify", at.url)
        ended = at.next().json
    assert (ended["on"], ended["reason"], ended["lease_id"]) == ("ended", "failed", None)
    assert ended["why"]


def test_the_next_keeper_tells_of_the_end_and_not_again_of_the_grant(user: UserJobs) -> None:
    with receiver() as at:
        id_ = user.script("until [ -e go-on ]; do sleep 0.05; done", "--notify", at.url)
        assert at.next().json["on"] == "granted"
        user.until(id_, JobState.RUNNING)
        user.kill_keeper()
        user.call("jobs")
        (user.folder / "go-on").touch()
        ended = at.next().json
    assert (ended["on"], ended["exit_code"], ended["job"]) == ("ended", 0, id_)


def test_the_keeper_stays_until_the_receiver_answers(user: UserJobs) -> None:
    with receiver(503, 503) as at:
        id_ = user.script("true", "--notify", at.url)
        told = [at.next() for _ in range(4)]
    assert told[0].body == told[1].body == told[2].body
    assert told[3].json["on"] == "ended"
    assert user.until(id_).life.state is JobState.ENDED


def test_a_program_is_run_in_the_directory_of_the_job(user: UserJobs) -> None:
    id_ = user.script("true", "--on-granted", "sh -c 'echo $GPU_POOL_JOB_ID > of-job'")
    told: Path = user.folder / "of-job"
    eventually(lambda: told.exists() and told.read_text() == f"{id_}\n", "the program has run")
