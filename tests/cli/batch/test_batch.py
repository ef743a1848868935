"""`gpu-pool batch`: what is run is decided by pure rules, and run in real processes."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.cli.batch.jobs import Batch, Job, State, read_jobs
from gpu_worker_pool.cli.batch.state import StateFile
from gpu_worker_pool.cli.batch.view import BatchDisplay, summary_table
from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.cli.output import Console
from gpu_worker_pool.cli.run.attempt import Outcome
from gpu_worker_pool.cli.table import print_table
from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import GPU_POOL, end_all, environment, gpu_pool, start_gpu_pool
from tests.cli.terminal import Terminal
from tests.server.leasing import OFTEN, eventually, wait_until_free

GOOD, BAD = Outcome(0), Outcome(3)


# --- which job is run ----------------------------------------------------------------------------------------------


def test_a_line_is_a_command_unless_it_is_blank_or_a_comment() -> None:
    jobs = read_jobs("# first\n\n  python a.py \r\npython b.py # with a word\npython a.py\n")
    assert [(job.line, job.command) for job in jobs] == [
        (3, "python a.py"),
        (4, "python b.py # with a word"),
        (5, "python a.py"),
    ]
    assert len({job.key for job in jobs}) == 3  # the same command twice is two jobs


def test_a_mark_of_utf_8_is_no_part_of_the_first_command_and_nul_is_refused() -> None:
    assert [job.command for job in read_jobs("\ufefftrue\n")] == ["true"]
    with pytest.raises(ValueError, match="line 2 has a NUL character"):
        read_jobs("true\nfal\0se\n")


def test_what_a_terminal_would_obey_is_not_shown() -> None:
    jobs = read_jobs("echo\t'\x1b[2Ja\u202eb'\n")
    batch, printed = Batch(jobs), io.StringIO()
    assert batch.next_job() == jobs[0]
    batch.ended(jobs[0], GOOD)
    BatchDisplay(batch, Console(file=printed, width=200)).attempt_ended(jobs[0], GOOD)
    print_table(Console(file=printed, width=200), summary_table(batch, Path("logs")))
    first, *_ = printed.getvalue().splitlines()
    assert first == "gpu-pool: [1/1] ok: line 1: echo '\ufffd[2Ja\ufffdb'"
    assert not set("\x1b\u202e") & set(printed.getvalue())


def test_a_job_keeps_its_key_when_others_come_and_go() -> None:
    before = {job.command: job.key for job in read_jobs("a\nb\nc\n")}
    after = {job.command: job.key for job in read_jobs("new\nc\nb\n")}
    assert (after["b"], after["c"]) == (before["b"], before["c"])


@given(
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5), max_size=8),
    st.integers(0, 3),
    st.booleans(),
    st.integers(1, 3),
)
def test_every_job_is_run_until_it_is_good_or_failed_too_often(
    fates: list[list[bool]], retries: int, keeps_going: bool, at_once: int
) -> None:
    jobs = [Job(str(number), number, str(number)) for number in range(len(fates))]
    batch = Batch(jobs, retries=retries, keeps_going=keeps_going)
    running: list[Job] = []
    while True:
        while len(running) < at_once and (job := batch.next_job()) is not None:
            assert job not in running
            running.append(job)
        if not running:
            break
        job = running.pop(0)
        is_good = fates[job.line][batch.progress[job.key].attempts - 1]
        batch.ended(job, GOOD if is_good else BAD)

    for job, fate in zip(jobs, fates, strict=True):
        found = batch.progress[job.key]
        tries = fate[: retries + 1]
        if found.state is State.DONE:
            assert fate[found.attempts - 1]
            assert not any(fate[: found.attempts - 1])
        elif found.state is State.FAILED:
            assert not any(tries[: found.attempts])
        else:
            assert found.state is State.WAITING
        if keeps_going:
            assert found.state is (State.DONE if any(tries) else State.FAILED)
    if not keeps_going and any(not any(fate[: retries + 1]) for fate in fates):
        # Once one has failed for good nothing is begun; those that ran then are let finish.
        assert 1 <= batch.count(State.FAILED) <= at_once


# --- what is kept --------------------------------------------------------------------------------------------------


def test_what_was_good_is_kept_and_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "state"
    first, second = read_jobs("one\ntwo\n")
    with StateFile(path, is_fresh=False) as state:
        assert state.load() == {}
        state.note(first, 1, GOOD)
        state.note(second, 1, BAD)
    path.write_text(path.read_text(encoding="utf-8") + '{"job": "cut sh', encoding="utf-8")
    with StateFile(path, is_fresh=False) as state:
        assert state.load().keys() == {first.key}
        state.note(second, 2, GOOD)
    with StateFile(path, is_fresh=False) as state:
        assert state.load().keys() == {first.key, second.key}
    with StateFile(path, is_fresh=True) as state:
        assert state.load() == {}


@pytest.mark.parametrize("text", ["my thesis", "my thesis\n", '{"schema": "another"}\n', '["a list"]\n'])
@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_file_that_is_something_else_is_left_as_it_is(tmp_path: Path, text: str, is_fresh: bool) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(Failure, match="not the state file"), StateFile(path, is_fresh=is_fresh) as state:
        state.load()
    assert path.read_text(encoding="utf-8") == text


# --- in real processes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", **OFTEN}) as running:
        yield running


@pytest.fixture
def server(two_gpus: ServerProcess) -> Iterator[ServerProcess]:
    yield two_gpus
    end_all()


def test_jobs_have_a_gpu_each_and_a_later_run_goes_on_where_the_first_failed(
    server: ServerProcess, tmp_path: Path
) -> None:
    # Each says on which GPU it is, and fails where somebody else is on it at the same time.
    job = 'mkdir "on-$CUDA_VISIBLE_DEVICES" || exit 9; echo on $CUDA_VISIBLE_DEVICES; rmdir "on-$CUDA_VISIBLE_DEVICES"'
    lines = [f"{job}; : {number}" for number in range(5)]
    lines.insert(3, "test -e mended || { echo not yet >&2; exit 4; }")
    (tmp_path / "jobs.txt").write_text("\n".join(lines), encoding="utf-8")

    first = gpu_pool("batch", "--keep-going", "--retries", "1", "--json", "jobs.txt", server=server, cwd=tmp_path)
    assert first.code == 1, first
    assert first.json["schema"] == "gpu-pool/batch/1"
    assert (first.json["done"], first.json["failed"], first.json["not_run"]) == (5, 1, 0)
    failed = first.json["jobs"][3]
    assert (failed["state"], failed["attempts"], failed["exit_code"]) == ("failed", 2, 4)
    assert (tmp_path / failed["log"]).read_text(encoding="utf-8").count("not yet\n") == 2
    log = (tmp_path / first.json["jobs"][0]["log"]).read_text(encoding="utf-8")
    assert log.splitlines()[1] in {"on 0", "on 1"}
    assert "\x1b" not in first.err  # no colours where there is no terminal

    (tmp_path / "mended").touch()
    second = gpu_pool("batch", "--json", "jobs.txt", server=server, cwd=tmp_path)
    assert second.code == 0, second
    assert (second.json["done"], second.json["done_before"]) == (1, 5)


def test_without_keep_going_nothing_is_begun_after_a_failure_and_the_table_says_so(
    server: ServerProcess, tmp_path: Path
) -> None:
    done = gpu_pool("batch", "-j", "1", "-", server=server, cwd=tmp_path, text="false\necho two > two\n")
    assert done.code == 1
    assert "0 of 2 done, 1 failed, 1 not run" in done.out
    assert not (tmp_path / "two").exists()


def test_broken_off_it_ends_what_runs_leaves_the_queue_and_goes_on_later(server: ServerProcess, tmp_path: Path) -> None:
    go = tmp_path / "go"
    lines = [f"echo $$ > pid-{number}; test -e go || exec sleep 60" for number in range(4)]
    (tmp_path / "jobs.txt").write_text("\n".join(lines), encoding="utf-8")
    process = start_gpu_pool("batch", "-j", "4", "jobs.txt", server=server, cwd=tmp_path)
    eventually(lambda: server.json("/pool")["queue_length"] == 2, "two wait")
    pids = eventually(lambda: _pids(tmp_path, 2), "two run")
    second = gpu_pool("batch", "jobs.txt", server=server, cwd=tmp_path)
    assert second.code == 125
    assert "another gpu-pool batch" in second.err
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "0 of 4 done, 0 failed, 4 not run" in out
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert server.json("/pool")["queue_length"] == 0
    go.touch()
    assert gpu_pool("batch", "jobs.txt", server=server, cwd=tmp_path).code == 0


def test_killed_with_9_its_jobs_end_and_their_gpus_are_free(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text("echo $$ > pid-0; sleep 60\n", encoding="utf-8")
    process = start_gpu_pool("batch", "jobs.txt", server=server, cwd=tmp_path)
    (pid,) = eventually(lambda: _pids(tmp_path, 1), "it runs")
    process.kill()
    process.communicate(timeout=30)
    wait_until_free(server)
    assert not Path(f"/proc/{pid}").exists()


def test_in_a_terminal_it_shows_a_bar_and_what_runs(server: ServerProcess, tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    (tmp_path / "jobs.txt").write_text("true\ncat go\n", encoding="utf-8")
    with Terminal([*GPU_POOL, "batch", "jobs.txt"], environment(server), cwd=tmp_path) as terminal:
        shown = terminal.wait_for("cat go")
        terminal.wait_for("1/2")
        assert "line 2" in shown
        fifo.write_text("", encoding="ascii")
        assert terminal.wait() == 0
        assert "2 of 2 done, 0 failed" in terminal.text


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("nowhere.txt",), "cannot be read"),
        (("empty.txt",), "no command"),
        (("--gpus", "3", "jobs.txt"), "3 GPUs"),
        (("--state", "/dev/full", "jobs.txt"), "--state"),
        (("--logs", "jobs.txt", "jobs.txt"), "--logs"),
    ],
)
def test_bad_input_runs_nothing(server: ServerProcess, tmp_path: Path, arguments: tuple[str, ...], hint: str) -> None:
    (tmp_path / "empty.txt").write_text("# nothing\n", encoding="utf-8")
    (tmp_path / "jobs.txt").write_text("touch ran\n", encoding="utf-8")
    done = gpu_pool("batch", *arguments, server=server, cwd=tmp_path)
    assert done.code in {2, 125}
    assert hint in done.err
    assert not (tmp_path / "ran").exists()


def _pids(folder: Path, number: int) -> list[int]:
    texts = [path.read_text(encoding="ascii") for path in folder.glob("pid-*")]
    return [int(text) for text in texts] if len(texts) == number and all(texts) else []
