"""The files of jobs: written as a whole, and understood after a crash at any byte."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from gpu_worker_pool.cli.jobs.history_limit import keep_s, numbers_to_forget
from gpu_worker_pool.cli.jobs.job_journal import append, encode, read_events
from gpu_worker_pool.cli.jobs.job_spec import JobSpec
from gpu_worker_pool.cli.jobs.job_store import JobStore, jobs_folder
from gpu_worker_pool.cli.jobs.keeper_link import lock_keeper
from gpu_worker_pool.cli.jobs.keeper_server import write_facts
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.cli.jobs.job_view import say_of_jobs
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.jobs.job_key import JobKey
from gpu_worker_pool.jobs.life import (
    CancelAsked,
    GuardOutcome,
    JobClosed,
    JobEvent,
    JobRequested,
    JobRetried,
    JobState,
    RunEnded,
    RunNotStarted,
    UsageMeasured,
    found_again,
)
from tests.jobs.lives import STARTED, failed, job, running

USED = UsageMeasured(at=2.5, peak_memory_mb=1.0, peak_utilization_percent=None, mean_utilization_percent=2.0)
EVENTS: list[JobEvent] = [
    JobRequested(at=1.0),
    STARTED,
    RunNotStarted(at=2.0),
    JobRequested(at=2.0),
    STARTED,
    USED,
    CancelAsked(at=3.0),
    RunEnded(at=4.0, becomes=JobState.CANCELLED, exit_code=143, why="cancelled"),
    JobRetried(at=5.0, behind=7),
    JobClosed(at=6.0, becomes=JobState.FAILED, why="no GPU", exit_code=124),
]


def spec(**options: object) -> JobSpec:
    return JobSpec(submitted_at=1.0, command=("true",), label="true", cwd="/", **options)  # type: ignore[arg-type]


def test_every_event_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for event in EVENTS:
        append(path, event, is_synced=False)
    assert read_events(path) == EVENTS
    assert path.stat().st_mode & 0o077 == 0


@given(st.integers(0, sum(len(encode(event)) for event in EVENTS)))
@settings(max_examples=60)
def test_a_journal_that_was_cut_anywhere_is_understood_and_goes_on(cut_at: int) -> None:
    import tempfile  # noqa: PLC0415 - hypothesis shares fixtures between its examples

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        whole = b"".join(map(encode, EVENTS))
        path.write_bytes(whole[:cut_at])
        known = read_events(path)
        assert known == EVENTS[: len(known)]
        assert sum(len(encode(event)) for event in known) <= cut_at
        append(path, USED, is_synced=False)
        assert read_events(path) == [*known, USED]


def test_a_job_whose_journal_is_damaged_is_never_run(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    number = store.submit(spec(), {})
    (store.root / str(number) / "events.jsonl").write_bytes(b'{"event": "requested", "at": 1.0}\nnonsense\n')
    (record,) = store.load().values()
    assert record.life.state is JobState.INTERRUPTED
    assert record.trouble is not None
    assert "line 2" in record.trouble


def test_a_submission_is_there_as_a_whole_with_a_number_that_is_never_used_again(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    assert [store.submit(spec(), {"A": "\udcff"}) for _ in range(2)] == [1, 2]
    (store.root / ".new-1-abc").mkdir()  # what a crash leaves
    store.forget(2)
    assert store.submit(spec(array=(0, 4)), {}) == 3
    assert [str(key) for key in store.load()] == ["1", "3_0", "3_4"]
    assert store.environment_of(JobKey(1)) == {"A": "\udcff"}
    with pytest.raises(Failure, match="environment of job 2"):
        store.environment_of(JobKey(2))


def test_a_job_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    store.make()
    (store.root / "submit.lock").mkdir()
    with pytest.raises(Failure, match="submit it again"):
        store.submit(spec(), {})
    assert os.listdir(store.root) == ["submit.lock"]  # noqa: PTH208 - names


def test_a_damaged_last_number_is_told(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    store.submit(spec(), {})
    (store.root / "last-id").write_text("9" * 30, encoding="ascii")
    with pytest.raises(Failure, match="write the number of the last job into it"):
        store.submit(spec(), {})
    assert store.numbers() == [1]
    assert not list(store.root.glob(".new-*"))


def test_an_array_that_was_damaged_has_the_tasks_that_have_begun(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    store.submit(spec(array=(0, 1, 2)), {})
    for record in store.load_number(1)[:2]:
        store.note(record, EVENTS[0])
    (store.root / "1" / "job.json").unlink()
    records = store.load_number(1)
    assert [(str(record.key), record.life.state) for record in records] == [
        ("1_0", JobState.INTERRUPTED),
        ("1_1", JobState.INTERRUPTED),
    ]
    assert all(record.trouble for record in records)


def test_many_tasks_are_told_once() -> None:
    said: list[str] = []
    say_of_jobs(["3", "5_0", "5_1", "5_2"], "is cancelled", "are cancelled", said.append)
    assert said == ["job 3 is cancelled", "3 tasks of job 5 are cancelled"]


async def test_a_keeper_writes_its_address_over_the_one_before_where_there_is_no_room_for_a_file(
    tmp_path: Path,
) -> None:
    facts = tmp_path / "keeper.json"
    said: list[str | None] = []
    for address in ("first", "second"):
        await write_facts(facts, address, said.append)
        assert json.loads(facts.read_bytes()) == {"pid": os.getpid(), "address": address}
        facts.with_suffix(".new").mkdir(exist_ok=True)  # no new file can be made
    assert said == [None, None]


def test_where_jobs_are_kept(tmp_path: Path) -> None:
    assert jobs_folder({"GPU_POOL_JOBS_DIR": str(tmp_path)}) == tmp_path
    found = jobs_folder({"HOME": "/home/ada", "STATE_DIRECTORY": "/var/lib/x"})
    assert found.parent == Path("/home/ada/.local/state/gpu-worker-pool/jobs")
    assert jobs_folder({"XDG_STATE_HOME": "/state"}).parent == Path("/state/gpu-worker-pool/jobs")


def test_one_keeper_has_the_lock(tmp_path: Path) -> None:
    first = lock_keeper(tmp_path)
    assert first is not None
    assert lock_keeper(tmp_path) is None
    os.close(first)
    second = lock_keeper(tmp_path)
    assert second is not None
    os.close(second)


def test_jobs_that_were_over_for_long_are_forgotten_unless_a_job_comes_after_them() -> None:
    lives = [failed(1), failed(2), running(3), job(4, after=(JobKey(2),))]
    assert numbers_to_forget(lives, now=1000.0, kept_s=500.0) == [1]
    assert numbers_to_forget(lives, now=100.0, kept_s=500.0) == []
    assert keep_s({"GPU_POOL_JOBS_KEEP": "2d"}) == 172_800
    assert keep_s({"GPU_POOL_JOBS_KEEP": "long"}) == 30 * 86_400


@pytest.mark.parametrize(
    ("outcome", "is_same_boot", "becomes", "code"),
    [
        (None, True, JobState.INTERRUPTED, None),
        (GuardOutcome(is_started=True, exit_code=0), False, JobState.ENDED, 0),
        (GuardOutcome(is_started=True, exit_code=1), False, JobState.FAILED, 1),
        (GuardOutcome(is_started=True, exit_code=143), False, JobState.INTERRUPTED, 143),
        (GuardOutcome(is_started=True, exit_code=143), True, JobState.FAILED, 143),
        (GuardOutcome(is_started=True, exit_code=143, was_limited=True), True, JobState.FAILED, None),
        (
            GuardOutcome(is_started=True, exit_code=137, was_limited=True, warned_of=EndReason.PREEMPTED),
            True,
            JobState.SUBMITTED,
            None,
        ),
        (GuardOutcome(is_started=True, exit_code=143, warned_of=EndReason.PREEMPTED), True, JobState.SUBMITTED, None),
        (GuardOutcome(is_started=True, exit_code=0, warned_of=EndReason.PREEMPTED), True, JobState.ENDED, 0),
        (GuardOutcome(is_started=True, exit_code=143, was_late=True), True, JobState.FAILED, None),
    ],
)
def test_what_became_of_a_job_is_read_from_what_its_guard_wrote(
    outcome: GuardOutcome | None, is_same_boot: bool, becomes: JobState, code: int | None
) -> None:
    found = found_again(running(), 9.0, outcome, is_same_boot=is_same_boot, last_number=1)
    assert isinstance(found, RunEnded)
    assert (found.becomes, found.exit_code) == (becomes, code)


def test_a_command_that_was_never_started_may_be() -> None:
    found = found_again(running(), 9.0, GuardOutcome(is_started=False), is_same_boot=False, last_number=1)
    assert found == RunNotStarted(at=9.0)
