"""The files of jobs: written as a whole, and understood after a crash at any byte."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.failure import Failure
from gpu_worker_pool.jobs.gpu_wait import JobPools
from gpu_worker_pool.jobs.job_log import opened_log
from gpu_worker_pool.jobs.job_record import JobRecord, encode
from gpu_worker_pool.jobs.job_spec import BatchFacts
from gpu_worker_pool.jobs.job_store import JobStore, jobs_folder, kept_s
from gpu_worker_pool.jobs.keeper_process import start_keeper
from gpu_worker_pool.jobs.submission import JobState, JobTask, Record, Usage, Whole, cancelled, retried

from .test_submission import RUN, became, running, spec

RECORDS: list[Record] = [
    Whole(requested_at=1.0, requested_by="w"),
    RUN,
    running(0),
    became(JobState.SUBMITTED, 0, end_reason="preempted", restarts=1),
    became(JobState.CANCELLED, 0, exit_code=143, why="cancelled", is_cancel_asked=True),
    JobTask(0, JobState.SUBMITTED, 1, behind=7),
    Whole(is_held=True, first_at=2.0, edits={"gpus": 2}),
    replace(RUN, is_open=False, usage=Usage(peak_memory_mb=1.0)),
]


def journal(folder: Path, data: bytes = b"") -> JobRecord:
    (folder / "journal.jsonl").write_bytes(data)
    return JobRecord(1, spec(2), folder)


def state(record: JobRecord) -> object:
    now = record.submission
    return list(now.tasks()), now.runs, now.whole


def test_every_record_is_read_as_it_was_written_also_by_another_process_that_has_it_open(tmp_path: Path) -> None:
    first = journal(tmp_path)
    second = JobRecord(1, spec(2), tmp_path)
    first.write(lambda _: RECORDS[:2])
    first.write(lambda _: RECORDS[2:4])
    assert second.refresh() == [(JobTask(0), RECORDS[2]), (RECORDS[2], RECORDS[3])]
    second.write(lambda _: RECORDS[4:])
    first.refresh()
    assert state(first) == state(second) == state(JobRecord(1, spec(2), tmp_path))
    assert second.submission.runs == {RUN.id: RECORDS[-1]}


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    """A command that follows one task of 10,000 looks five times a second."""
    followed = journal(tmp_path, b"".join(map(encode, RECORDS[:3])))
    with (tmp_path / "journal.jsonl").open("r+b") as file:
        file.write(b"what was read before")
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(encode(RECORDS[3]))
    assert followed.refresh() == [(RECORDS[2], RECORDS[3])]


@given(st.integers(0, sum(len(encode(record)) for record in RECORDS)))
@settings(max_examples=60)
def test_a_journal_that_was_cut_anywhere_is_understood_and_goes_on(cut_at: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = b"".join(map(encode, RECORDS))
        cut = journal(Path(folder), whole[:cut_at])
        known = whole[:cut_at].count(b"\n")
        cut.write(lambda _: RECORDS[known : known + 1])
        assert cut.trouble is None
        assert (Path(folder) / "journal.jsonl").read_bytes() == b"".join(map(encode, RECORDS[: known + 1]))


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b'{"run": {"id": 1}}\n',
        b'{"task": {"index": 0, "state": "rich"}}\n',
        b'{"task": {"index": 7}}\n',
        b'{"whole": {"edits": {"wings": 2}}}\n',
        b"[]\n",
        b'{"event": {}}\n',
    ],
)
def test_a_job_whose_journal_is_damaged_is_never_run(tmp_path: Path, line: bytes) -> None:
    store = JobStore(tmp_path / "jobs")
    number = store.submit(spec(2), {})
    (store.root / str(number) / "journal.jsonl").write_bytes(encode(running(0)) + line)
    record = store.load()[number]
    assert [task.state for task in record.submission.tasks()] == [JobState.RUNNING, JobState.INTERRUPTED]
    assert record.trouble is not None
    assert f"byte {len(encode(running(0)))}" in record.trouble
    with pytest.raises(OSError, match="byte"):
        record.write(lambda now: [running(1)] if now.next_task() else [])


def test_a_submission_is_there_as_a_whole_with_a_number_that_is_never_used_again(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    assert [store.submit(spec(), {"A": "\udcff"}) for _ in range(2)] == [1, 2]
    store.forget(2)
    assert store.numbers() == [1, 2]  # the last one stays
    assert store.submit(replace(spec(), array=(0, 4)), {}) == 3
    store.forget(2)
    found = store.load()
    assert [(number, list(record.spec.indices)) for number, record in found.items()] == [(1, [None]), (3, [0, 4])]
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
    longest = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, longest[1]))
    try:
        with pytest.raises(Failure, match="submit it again"):
            store.submit(spec(), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, longest)
    assert os.listdir(store.root) == ["live"]  # noqa: PTH208 - names


def test_submissions_at_the_same_time_get_a_number_each(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    with ThreadPoolExecutor(8) as threads:
        numbers = list(threads.map(lambda _: store.submit(spec(), {}), range(40)))
    assert sorted(numbers) == store.numbers() == store.live_numbers() == list(range(1, 41))


def test_what_is_over_is_not_live_unless_it_was_retried_meanwhile(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    number = store.submit(spec(), {})
    record, other = store.load()[number], store.load()[number]
    record.write(lambda now: cancelled(now, 1.0, [None]))
    store.note_over(record)
    assert store.live_numbers() == []
    other.write(lambda now: retried(now, [None], 1, has_all=False))
    store.note_over(record)
    assert store.live_numbers() == [number]


def test_jobs_whose_environments_differ_in_what_no_client_reads_share_one_client() -> None:
    pools = JobPools()
    one = pools.of(spec(), {"GPU_SEED": "1", "GPU_SERVICE_ENDPOINT": "http://box:8000"})
    assert pools.of(spec(), {"GPU_SEED": "2", "GPU_SERVICE_ENDPOINT": "http://box:8000", "HOME": "/x"}) is one
    assert pools.of(spec(), {"GPU_SERVICE_ENDPOINT": "http://other:8000"}) is not one
    assert pools.of(spec(), {"GPU_SERVICE_ENDPOINT": "http://box:8000", "GPU_POOL_TOKEN": "t"}) is not one
    assert "GPU_SERVICE_ENDPOINT" not in os.environ


def test_where_jobs_are_kept(tmp_path: Path) -> None:
    assert jobs_folder({"GPU_POOL_JOBS_DIR": str(tmp_path)}) == tmp_path
    found = jobs_folder({"HOME": "/home/ada", "STATE_DIRECTORY": "/var/lib/x"})
    assert found.parent == Path("/home/ada/.local/state/gpu-worker-pool/jobs")
    assert jobs_folder({"XDG_STATE_HOME": "/state"}).parent == Path("/state/gpu-worker-pool/jobs")
    assert kept_s({"GPU_POOL_JOBS_KEEP": "2d"}) == 172_800
    assert kept_s({"GPU_POOL_JOBS_KEEP": "long"}) == 30 * 86_400


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names


async def test_a_log_whose_first_line_cannot_be_written_leaves_nothing_open(tmp_path: Path) -> None:
    facts = BatchFacts(lines=("true",), logs=("/dev/full",), pid=1, boot_id="b")
    store = JobStore(tmp_path / "jobs")
    number = store.submit(spec(1, batch=facts), {})
    record = store.load()[number]
    before = descriptors()
    for _ in range(3):
        with pytest.raises(Failure, match="its log /dev/full cannot be written: No space left"):
            async with opened_log(record, record.submission.task(0), ["0"]):
                pass
    assert descriptors() == before


def test_a_keeper_that_cannot_be_started_leaves_nothing_open(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    store.make()
    files, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, descriptors())) + 8, files[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(3):  # those of the pipe and of the log can be had, and no more for the process
            os.close(taken.pop())
        with pytest.raises(Failure, match="the keeper of the jobs cannot be started: Too many open files"):
            start_keeper(store)
        taken += [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        for descriptor in taken:
            os.close(descriptor)
