"""`gpu-pool batch`: what is run is decided by pure rules, and run in real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.cli.batch.lines import StateFile, read_lines
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs.user_jobs import UserJobs
from tests.cli.own_process import GPU_POOL, Done, end_all, environment, gpu_pool, start_gpu_pool
from tests.cli.terminal import Terminal
from tests.server.leasing import OFTEN, eventually, wait_until_free

# --- which job is run ----------------------------------------------------------------------------------------------


def test_a_line_is_a_command_unless_it_is_blank_or_a_comment() -> None:
    jobs = read_lines("# first\n\n  python a.py \r\npython b.py # with a word\npython a.py\n")
    assert [(job.number, job.command) for job in jobs] == [
        (3, "python a.py"),
        (4, "python b.py # with a word"),
        (5, "python a.py"),
    ]
    assert len({job.key for job in jobs}) == 3  # the same command twice is two jobs


def test_a_job_keeps_its_key_when_others_come_and_go() -> None:
    before = {job.command: job.key for job in read_lines("a\nb\nc\n")}
    after = {job.command: job.key for job in read_lines("new\nc\nb\n")}
    assert (after["b"], after["c"]) == (before["b"], before["c"])


# --- what is kept --------------------------------------------------------------------------------------------------


def test_what_was_good_is_kept_and_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "state"
    first, second = read_lines("one\ntwo\n")
    good, bad = {"exit_code": 0, "end_reason": None}, {"exit_code": 3, "end_reason": None}
    with StateFile(path, is_fresh=False) as state:
        assert state.load() == ({}, None)
        state.append({"submission": 7})
        state.append({"job": first.key, **good})
        state.append({"job": second.key, **bad})
        state.append({"job": second.key, "exit_code": 0, "end_reason": "time_limit"})
    path.write_text(path.read_text(encoding="utf-8") + '{"job": "cut sh', encoding="utf-8")
    with StateFile(path, is_fresh=False) as state:
        done, last = state.load()
        assert done.keys() == {first.key}
        assert last == {"submission": 7}
        state.append({"job": second.key, **good})
    with StateFile(path, is_fresh=False) as state:
        assert state.load()[0].keys() == {first.key, second.key}
    with StateFile(path, is_fresh=True) as state:
        assert state.load() == ({}, None)


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


@pytest.fixture(scope="module")
def jobs_dir(two_gpus: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UserJobs]:
    with UserJobs(tmp_path_factory.mktemp("user"), two_gpus) as jobs:
        yield jobs


@pytest.fixture
def server(two_gpus: ServerProcess, jobs_dir: UserJobs) -> Iterator[ServerProcess]:
    global _env  # noqa: PLW0603 - that of the module
    _env = jobs_dir.env
    yield two_gpus
    end_all()


_env: dict[str, str] = {}


def batch(*arguments: str, server: ServerProcess, cwd: Path, text: str | None = None) -> Done:
    return gpu_pool("batch", *arguments, server=server, env=_env, cwd=cwd, text=text)


def test_jobs_have_a_gpu_each_and_a_later_run_goes_on_where_the_first_failed(
    server: ServerProcess, tmp_path: Path
) -> None:
    # Each says on which GPU it is, and fails where somebody else is on it at the same time.
    job = 'mkdir "on-$CUDA_VISIBLE_DEVICES" || exit 9; echo on $CUDA_VISIBLE_DEVICES; rmdir "on-$CUDA_VISIBLE_DEVICES"'
    lines = [f"{job}; : {number}" for number in range(5)]
    lines.insert(3, "test -e mended || { echo not yet >&2; exit 4; }")
    (tmp_path / "jobs.txt").write_text("\n".join(lines), encoding="utf-8")

    first = batch("--keep-going", "--retries", "1", "--json", "jobs.txt", server=server, cwd=tmp_path)
    assert first.code == 1, first
    assert first.json["schema"] == "gpu-pool/batch/1"
    assert (first.json["done"], first.json["failed"], first.json["not_run"]) == (5, 1, 0)
    failed = first.json["jobs"][3]
    assert (failed["state"], failed["attempts"], failed["exit_code"]) == ("failed", 2, 4)
    assert (tmp_path / failed["log"]).read_text(encoding="utf-8").count("not yet\n") == 2
    log = (tmp_path / first.json["jobs"][0]["log"]).read_text(encoding="utf-8")
    assert log.splitlines()[1] in {"on 0", "on 1"}
    assert "\x1b" not in first.err  # no colours where there is no terminal
    counted = [
        text.split("[")[1].split("/")[0] for text in first.err.splitlines() if "again later" not in text and "[" in text
    ]
    assert counted == ["1", "2", "3", "4", "5", "6"], first.err

    (tmp_path / "mended").touch()
    second = batch("--json", "jobs.txt", server=server, cwd=tmp_path)
    assert second.code == 0, second
    assert (second.json["done"], second.json["done_before"]) == (1, 5)


def test_without_keep_going_nothing_is_begun_after_a_failure_and_the_table_says_so(
    server: ServerProcess, tmp_path: Path
) -> None:
    done = batch("-j", "1", "-", server=server, cwd=tmp_path, text="false\necho two > two\n")
    assert done.code == 1
    assert "0 of 2 done, 1 failed, 1 not run" in done.out
    assert not (tmp_path / "two").exists()


def test_broken_off_it_ends_what_runs_leaves_the_queue_and_goes_on_later(server: ServerProcess, tmp_path: Path) -> None:
    go = tmp_path / "go"
    lines = [f"echo $$ > pid-{number}; test -e go || exec sleep 60" for number in range(4)]
    (tmp_path / "jobs.txt").write_text("\n".join(lines), encoding="utf-8")
    process = start_gpu_pool("batch", "-j", "4", "jobs.txt", server=server, env=_env, cwd=tmp_path)
    # The next one waits in the queue; the last one when that one has its GPU.
    eventually(lambda: server.json("/pool")["queue_length"] == 1, "one waits")
    pids = eventually(lambda: _pids(tmp_path, 2), "two run")
    second = batch("jobs.txt", server=server, cwd=tmp_path)
    assert second.code == 125
    assert "another gpu-pool batch" in second.err
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "0 of 4 done, 0 failed, 4 not run" in out
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert server.json("/pool")["queue_length"] == 0
    go.touch()
    assert batch("jobs.txt", server=server, cwd=tmp_path).code == 0


CHECKPOINT = "trap 'exit 0' TERM INT; echo $$ > pid-0; test -e go || while :; do sleep 0.05; done\n"


def test_a_line_that_ends_with_0_because_it_was_told_to_is_not_done(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text(CHECKPOINT, encoding="utf-8")
    process = start_gpu_pool("batch", "jobs.txt", server=server, env=_env, cwd=tmp_path)
    eventually(lambda: _pids(tmp_path, 1), "it runs")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT, err
    assert "0 of 1 done" in out
    (tmp_path / "go").touch()
    again = batch("--json", "jobs.txt", server=server, cwd=tmp_path)
    assert (again.json["done"], again.json["done_before"]) == (1, 0), again


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_inside_a_lease_it_goes_on_later_however_it_was_ended(
    server: ServerProcess, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "jobs.txt").write_text("echo $$ > pid-0; test -e go || exec sleep 60\ntrue\n", encoding="utf-8")
    command = ("run", "--", *GPU_POOL, "batch", "jobs.txt")
    process = start_gpu_pool(*command, server=server, env=_env, cwd=tmp_path)
    eventually(lambda: _pids(tmp_path, 1), "it runs")
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    wait_until_free(server)
    (tmp_path / "go").touch()
    again = batch("--json", "jobs.txt", server=server, cwd=tmp_path)
    assert (again.code, again.json["done"]) == (0, 2), again


def test_in_a_terminal_it_shows_a_bar_and_what_runs(server: ServerProcess, tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    (tmp_path / "jobs.txt").write_text("true\ncat go\n", encoding="utf-8")
    with Terminal([*GPU_POOL, "batch", "jobs.txt"], environment(server, _env), cwd=tmp_path) as terminal:
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
    done = batch(*arguments, server=server, cwd=tmp_path)
    assert done.code in {2, 125}
    assert hint in done.err
    assert not (tmp_path / "ran").exists()


def _pids(folder: Path, number: int) -> list[int]:
    texts = [path.read_text(encoding="ascii") for path in folder.glob("pid-*")]
    return [int(text) for text in texts] if len(texts) == number and all(texts) else []
