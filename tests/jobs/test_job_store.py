"""The files of jobs: written as a whole, and understood after a crash at any byte."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.cli.jobs.job_view import say_of_jobs
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.jobs.gpu_wait import JobPools
from gpu_worker_pool.jobs.job_key import JobKey
from gpu_worker_pool.jobs.job_spec import JobSpec
from gpu_worker_pool.jobs.job_store import JobStore, jobs_folder
from gpu_worker_pool.jobs.journal import JobJournal, JournalUnreadable, encode
from gpu_worker_pool.jobs.keeper import kept_s
from gpu_worker_pool.jobs.keeper_link import lock_keeper
from gpu_worker_pool.jobs.life import (
    CancelAsked,
    JobEvent,
    JobState,
    JobTerms,
    Requested,
    RunClosed,
    TasksClosed,
    TasksRetried,
    Usage,
    replay,
)

from .lives import OPENED, became, started

EVENTS: list[JobEvent] = [
    Requested(at=1.0, worker="w"),
    OPENED,
    started(0),
    became(JobState.SUBMITTED, 0, end_reason="preempted"),
    started(0),
    CancelAsked(at=3.0, indices=(0,)),
    became(JobState.CANCELLED, 0, exit_code=143, why="cancelled"),
    TasksRetried(at=5.0, behind=7, indices=(0,)),
    TasksClosed(at=6.0, becomes=JobState.FAILED, why="no GPU", exit_code=124),
    RunClosed(at=7.0, run="run-1", usage=Usage(peak_memory_mb=1.0)),
]
TERMS = JobTerms(1, (0, 1))


def spec(**options: object) -> JobSpec:
    return JobSpec(submitted_at=1.0, command=("true",), label="true", cwd="/", **options)  # type: ignore[arg-type]


def journal(folder: Path, data: bytes = b"") -> JobJournal:
    path = folder / "journal.jsonl"
    path.write_bytes(data)
    return JobJournal(path, TERMS)


def test_every_event_is_read_as_it_was_written_also_by_another_process_that_has_it_open(tmp_path: Path) -> None:
    first = journal(tmp_path)
    second = JobJournal(first.path, TERMS)
    first.write(lambda _: EVENTS[:2])
    first.write(lambda _: EVENTS[2:4])
    assert second.refresh() == EVENTS[:4]
    second.write(lambda _: EVENTS[4:])
    assert first.refresh() == EVENTS[4:]
    assert list(first.submission.lives()) == list(second.submission.lives()) == list(replay(TERMS, EVENTS).lives())


def test_a_decision_is_made_on_all_that_others_have_written(tmp_path: Path) -> None:
    first = journal(tmp_path)
    second = JobJournal(first.path, TERMS)
    first.write(lambda _: [OPENED, started(0)])
    assert second.write(lambda now: [started(life.key.index)] if (life := now.next_task()) else []) == [started(1)]


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    """A command that follows one task of 10,000 looks five times a second."""
    followed = journal(tmp_path, b"".join(map(encode, EVENTS[:4])))
    assert followed.refresh() == EVENTS[:4]
    with followed.path.open("r+b") as file:
        file.write(b"what was read before")
    with followed.path.open("ab") as file:
        file.write(encode(EVENTS[4]))
    assert followed.refresh() == EVENTS[4:5]


@given(st.integers(0, sum(len(encode(event)) for event in EVENTS)))
@settings(max_examples=60)
def test_a_journal_that_was_cut_anywhere_is_understood_and_goes_on(cut_at: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = b"".join(map(encode, EVENTS))
        cut = journal(Path(folder), whole[:cut_at])
        known = cut.refresh()
        assert known == EVENTS[: len(known)]
        assert sum(len(encode(event)) for event in known) <= cut_at
        cut.write(lambda _: EVENTS[len(known) : len(known) + 1])
        assert JobJournal(cut.path, TERMS).refresh() == EVENTS[: len(known) + 1]


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b'{"event": "started", "at": 1.0}\n',
        b'{"event": "ended", "at": 1.0, "becomes": "rich"}\n',
        b"[]\n",
        b'{"event": "measured"}\n',
        encode(became(JobState.ENDED, 0)),
    ],
)
def test_a_job_whose_journal_is_damaged_is_never_run(tmp_path: Path, line: bytes) -> None:
    with pytest.raises(JournalUnreadable, match="byte 49"):
        journal(tmp_path, encode(EVENTS[0]) + line).refresh()
    store = JobStore(tmp_path / "jobs")
    number = store.submit(spec(array=(0, 1)), {})
    (store.root / str(number) / "journal.jsonl").write_bytes(encode(EVENTS[0]) + line)
    record = store.load()[number]
    assert [life.state for life in record.submission.lives()] == [JobState.INTERRUPTED] * 2
    assert record.trouble is not None
    assert "byte 49" in record.trouble
    with pytest.raises(OSError, match="byte 49"):
        record.write(lambda now: [started(0)] if now.next_task() else [])


def test_a_submission_is_there_as_a_whole_with_a_number_that_is_never_used_again(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    assert [store.submit(spec(), {"A": "\udcff"}) for _ in range(2)] == [1, 2]
    store.forget(2)
    assert store.submit(spec(array=(0, 4)), {}) == 3
    found = store.load()
    assert [str(life.key) for record in found.values() for life in record.submission.lives()] == ["1", "3_0", "3_4"]
    assert store.live_numbers() == [1, 3]
    assert store.environment_of(1) == {"A": "\udcff"}
    with pytest.raises(Failure, match="environment of job 2"):
        store.environment_of(2)


def test_the_names_of_the_files_of_a_job_are_on_the_disk_before_the_first_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, no job that ran may look new."""
    synced: list[list[str]] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}")
        if path.is_dir():
            synced.append(sorted(os.listdir(path)))  # noqa: PTH208 - names
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    JobStore(tmp_path / "jobs").submit(spec(), {})
    assert synced[0] == ["environment.json", "job.json", "journal.jsonl"]
    assert "1" in synced[1]


def test_what_a_submit_that_died_has_left_is_removed(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    store.submit(spec(), {})
    left, recent = store.root / ".new-4711-abc", store.root / ".new-4712-abc"
    for folder in (left, recent):
        folder.mkdir()
        (folder / "environment.json").write_text('{"TOKEN": "s3cret"}', encoding="ascii")
    hour_ago = time.time() - 3600
    os.utime(left, (hour_ago, hour_ago))
    store.submit(spec(), {})
    assert not left.exists()
    assert recent.exists()  # that submit may still be at it


def test_a_job_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    store.make()
    (store.root / "submit.lock").mkdir()
    with pytest.raises(Failure, match="submit it again"):
        store.submit(spec(), {})
    assert sorted(os.listdir(store.root)) == ["live", "submit.lock"]  # noqa: PTH208 - names


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
    number = store.submit(spec(array=(0, 1, 2)), {})
    store.load()[number].write(lambda _: [OPENED, started(0), started(1), became(JobState.ENDED, 1)])
    (store.root / "1" / "job.json").write_text("{", encoding="ascii")
    record = store.load()[number]
    assert [(life.key.index, life.state) for life in record.submission.lives()] == [
        (0, JobState.RUNNING),
        (1, JobState.ENDED),
    ]
    assert record.trouble is not None


def test_what_is_over_is_not_live_unless_it_was_retried_meanwhile(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    number = store.submit(spec(), {})
    record, other = store.load()[number], store.load()[number]
    record.write(lambda _: [CancelAsked(at=1.0)])
    store.note_over(record)
    assert store.live_numbers() == []
    other.write(lambda _: [TasksRetried(at=2.0, behind=1, indices=(None,))])
    store.note_over(record)
    assert store.live_numbers() == [number]


def test_jobs_whose_environments_differ_in_what_no_client_reads_share_one_client() -> None:
    pools = JobPools()
    one = pools.of(spec(), {"GPU_SEED": "1", "GPU_SERVICE_ENDPOINT": "http://box:8000"})
    assert pools.of(spec(), {"GPU_SEED": "2", "GPU_SERVICE_ENDPOINT": "http://box:8000", "HOME": "/x"}) is one
    assert pools.of(spec(), {"GPU_SERVICE_ENDPOINT": "http://other:8000"}) is not one
    assert pools.of(spec(), {"GPU_SERVICE_ENDPOINT": "http://box:8000", "GPU_POOL_TOKEN": "t"}) is not one
    assert "GPU_SERVICE_ENDPOINT" not in os.environ


def test_many_tasks_are_told_once() -> None:
    said: list[str] = []
    keys = [JobKey(3), *(JobKey(5, index) for index in range(3))]
    say_of_jobs(keys, "is cancelled", "are cancelled", said.append)
    assert said == ["job 3 is cancelled", "3 tasks of job 5 are cancelled"]


def test_where_jobs_are_kept(tmp_path: Path) -> None:
    assert jobs_folder({"GPU_POOL_JOBS_DIR": str(tmp_path)}) == tmp_path
    found = jobs_folder({"HOME": "/home/ada", "STATE_DIRECTORY": "/var/lib/x"})
    assert found.parent == Path("/home/ada/.local/state/gpu-worker-pool/jobs")
    assert jobs_folder({"XDG_STATE_HOME": "/state"}).parent == Path("/state/gpu-worker-pool/jobs")
    assert kept_s({"GPU_POOL_JOBS_KEEP": "2d"}) == 172_800
    assert kept_s({"GPU_POOL_JOBS_KEEP": "long"}) == 30 * 86_400


def test_one_keeper_has_the_lock(tmp_path: Path) -> None:
    first = lock_keeper(tmp_path)
    assert first is not None
    assert lock_keeper(tmp_path) is None
    os.close(first)
    second = lock_keeper(tmp_path)
    assert second is not None
    os.close(second)


def test_what_was_submitted_is_read_as_it_was_written() -> None:
    written = spec(array=(0, 2), after=("3_1",))
    assert JobSpec.from_json(json.loads(json.dumps(written.as_json()))) == written
