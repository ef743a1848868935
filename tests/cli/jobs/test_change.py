"""Jobs that are changed while they wait, begin later, are run again at their time limit, or bring their own options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.jobs.out_of_memory import cause_by_kernel, cause_in_text, kernel_kills
from gpu_worker_pool.jobs.submission import JobState
from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs.user_jobs import UserJobs
from tests.server.leasing import OFTEN, eventually, queued

HELD = "echo began >> ran; while [ ! -e go ]; do sleep 0.02; done"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "1", **OFTEN}) as running:
        yield running


@pytest.fixture
def user(server: ServerProcess, tmp_path: Path) -> Iterator[UserJobs]:
    with UserJobs(tmp_path, server) as jobs:
        yield jobs


def busy(user: UserJobs) -> str:
    """A job that has the only GPU until `go` is there."""
    id_ = user.script(HELD)
    eventually(lambda: user.lines("ran"), "it runs")
    return id_


def waiting(user: UserJobs) -> int:
    assert user.server is not None
    return len(queued(user.server))


def noted(user: UserJobs, *options: str) -> str:
    return user.script("echo $GPU_POOL_JOB_ID >> order", *options)


def go(user: UserJobs, *ids: str) -> list[str]:
    (user.folder / "go").touch()
    for id_ in ids:
        assert user.until(id_).task.state is JobState.ENDED
    return user.lines("order")


def test_a_held_job_does_not_start_before_it_is_released(user: UserJobs) -> None:
    first = busy(user)
    one, other = noted(user), noted(user)
    eventually(lambda: waiting(user) == 2, "they wait")
    assert user.call("jobs", "hold", one).out == f"job {one} is held\n"
    assert waiting(user) == 1
    assert f"held; `gpu-pool jobs release {one}`" in user.call("jobs").out
    assert go(user, first, other) == [other]
    assert user.call("jobs", "release", one).out == f"job {one} is released\n"
    assert go(user, one) == [other, one]
    assert "it is over" in user.call("jobs", "hold", one, code=1).err


def test_a_job_that_is_put_first_runs_before_the_others_whatever_they_ask_for(user: UserJobs) -> None:
    first = busy(user)
    one, other, last = noted(user), noted(user, "--time", "1h"), noted(user, "--time", "2h")
    eventually(lambda: waiting(user) == 3, "they wait")
    assert user.call("jobs", "first", last).out == f"job {last} is first of your jobs\n"
    eventually(lambda: waiting(user) == 3, "they wait again")
    assert go(user, first, last, one, other) == [last, one, other]


def test_a_waiting_job_is_edited_and_what_it_cannot_have_is_refused(user: UserJobs) -> None:
    first = busy(user)
    one, other = noted(user), noted(user)
    assert "no server could ever run this" in user.call("jobs", "edit", other, "--gpus", "2", code=125).err
    assert user.call("jobs", "edit", other, "--priority", "7", "--time", "1h").out == f"job {other} is changed\n"

    def asked() -> set[tuple[int, float | None]]:
        assert user.server is not None
        leases = user.server.json("/leases")["leases"]
        return {(lease["priority"], lease["time_limit_s"]) for lease in leases if lease["state"] == "queued"}

    eventually(lambda: asked() == {(0, None), (7, 3600.0)}, "it is requested again")
    assert go(user, first, one, other) == [other, one]


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (("jobs", "hold", "1_2"), 2, "name the array: 1"),
        (("jobs", "hold", "4711"), 1, "there is no job 4711"),
        (("jobs", "edit", "1"), 2, "say what to change"),
        (("submit", "--begin", "2020-01-01", "--", "true"), 2, "is in the past"),
        (("submit", "--begin", "soon", "--", "true"), 2, "is not a time"),
        (("exec", "4711", "--", "true"), 1, "there is no job or lease 4711"),
        (("submit", "--", "./bad.sh"), 2, "the #GPU lines of ./bad.sh cannot be used"),
    ],
)
def test_bad_input_is_told(user: UserJobs, arguments: tuple[str, ...], code: int, hint: str) -> None:
    script = user.folder / "bad.sh"
    script.write_text("#!/bin/sh\n#GPU --gpus many\n", encoding="utf-8")
    script.chmod(0o755)
    assert hint in user.call(*arguments, code=code).err


def test_a_job_begins_when_it_is_to(user: UserJobs) -> None:
    id_ = noted(user, "--begin", "2s")
    assert "begins " in user.call("jobs").out
    task = user.until(id_).task
    assert (task.started_at or 0.0) >= (user.job(id_).record.spec.begin_at or 0.0) > 0.0


def test_a_job_is_run_again_at_its_time_limit_where_it_is_to_be(user: UserJobs) -> None:
    script = "echo $GPU_POOL_RESTART >> ran; trap 'exit 0' TERM; while [ ! -e go ]; do sleep 0.02; done"
    id_ = user.script(script, "--time", "2s", "--grace", "0.2s", "--requeue")
    eventually(lambda: len(user.lines("ran")) == 2, "it was run again")
    assert go(user, id_) == []
    task = user.job(id_).task
    assert (user.lines("ran")[:2], task.restarts >= 1, task.tries) == (["0", "1"], True, 1)


def test_the_lines_of_a_script_are_its_options_and_what_is_typed_wins(user: UserJobs) -> None:
    script = user.folder / "train.sh"
    script.write_text(
        "#!/bin/sh\n# train\n#GPU --name mine --time 1h\n#GPU -p 3\n\ntrue\n#GPU --gpus 9\n", encoding="utf-8"
    )
    one, other = user.submit("--", "sh", "train.sh"), user.submit("-p", "4", "--", "sh", "-e", "train.sh")
    asked = [user.job(id_).record.spec for id_ in (one, other)]
    assert [(spec.name, spec.time_limit_s, spec.priority) for spec in asked] == [
        ("mine", 3600.0, 3),
        ("mine", 3600.0, 4),
    ]


def test_a_second_command_runs_inside_the_lease_of_a_job_and_ends_with_it(user: UserJobs) -> None:
    id_ = busy(user)
    run = user.job(id_).run
    assert run is not None
    show = "echo $CUDA_VISIBLE_DEVICES $GPU_POOL_LEASE_ID; exit 7"
    assert user.call("exec", id_, "--", "sh", "-c", show, code=7).out == f"0 {run.lease_id}\n"
    assert run.lease_id is not None
    assert user.call("exec", run.lease_id[:12], "--", "sh", "-c", show, code=7).out == f"0 {run.lease_id}\n"
    (user.folder / "go").touch()
    user.until(id_)
    assert "does not run" in user.call("exec", id_, "--", "true", code=1).err


# --- out of memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "on the GPU: OutOfMemoryError: CUDA",
        ),
        ("RuntimeError: HIP out of memory. Tried to allocate 20 MiB", "on the GPU: HIP out of memory"),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4 bytes", "RESOURCE_EXHAUSTED"),
        ("CUDA error: cudaErrorMemoryAllocation", "on the GPU: cudaErrorMemoryAllocation"),
        ("MemoryError: Unable to allocate 9 TiB", "out of memory: MemoryError"),
    ],
)
def test_what_frameworks_say_when_memory_is_short_is_known(text: str, said: str) -> None:
    assert said in (cause_in_text(f"Traceback\n{text}\n".encode()) or "")


def test_what_says_nothing_of_memory_is_another_failure(tmp_path: Path) -> None:
    assert cause_in_text(b"ValueError: out of range\nmemory: 12 GB\n") is None
    (tmp_path / "vmstat").write_text("oom_kill_disable 0\noom_kill 3\n", encoding="ascii")
    assert kernel_kills(tmp_path / "vmstat") == 3
    assert "OOM killer" in (cause_by_kernel(137, 3, 4) or "")
    assert [cause_by_kernel(137, 3, 3), cause_by_kernel(1, 3, 4), cause_by_kernel(137, None, 4)] == [None] * 3


def test_a_job_without_memory_is_shown_as_such(user: UserJobs) -> None:
    id_ = user.script("echo 'RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB' >&2; exit 1")
    task = user.until(id_).task
    assert (task.state, task.end_reason, task.exit_code) == (JobState.FAILED, "out_of_memory", 1)
    assert "out of memory on the GPU: CUDA out of memory" in user.call("history", "--mine").out
    assert "out of memory on the GPU" in user.call("jobs", id_).out
