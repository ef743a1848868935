"""Programs that are told: what they get, and what becomes of those that fail or do not end."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.notify.notice import Notice
from gpu_worker_pool.notify.rules import Program
from gpu_worker_pool.notify.sender import Sender
from tests.notify.notices import NOTICE, rule
from tests.processes import has_ended
from tests.server.running import ROOT


def script(folder: Path, *lines: str) -> str:
    program = folder / "program"
    program.write_text("\n".join(["#!/bin/sh", *lines, ""]), encoding="utf-8")
    program.chmod(0o700)
    return str(program)


async def run(*arguments: str, timeout_s: float = 30.0, within_s: float = 60.0, notice: Notice = NOTICE) -> None:
    sender = Sender(boot_time)
    sender.tell(notice, [rule(Program(arguments), timeout_s=timeout_s)])
    await sender.finish(within_s)


async def test_a_program_gets_the_notice_and_no_shell_reads_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_TOKENS", "ada:a-long-random-secret")
    told = script(tmp_path, f"cat > {tmp_path}/stdin", f'echo "$@" > {tmp_path}/args', f"env > {tmp_path}/env")

    await run(told, "$HOME; touch x")

    assert (tmp_path / "stdin").read_bytes() == NOTICE.as_json()
    assert (tmp_path / "args").read_text() == "$HOME; touch x\n"
    env = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert (env["GPU_POOL_EVENT"], env["GPU_POOL_OWNER"], env["GPU_POOL_REASON"]) == ("lost", "ada", "revoked")
    assert "GPU_POOL_TOKENS" not in env


STAYS = "setsid sh -c 'echo $$ > {0}/new; mv {0}/new {0}/pid; exec sleep 600' &"


async def test_a_program_that_does_not_end_is_killed_with_all_that_it_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = script(tmp_path, STAYS.format(tmp_path), "wait")
    with caplog.at_level(logging.WARNING):
        await run(hangs, timeout_s=2.0)

    assert caplog.messages == [f"the notice lost was not sent to {hangs}: {hangs} has not ended within 2 s"]
    assert has_ended(int((tmp_path / "pid").read_text()), within_s=0.0)


async def test_a_program_ends_with_the_process_that_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hangs = script(tmp_path, STAYS.format(tmp_path), "wait")
    with caplog.at_level(logging.WARNING):
        await run(hangs, within_s=2.0)

    assert caplog.messages == ["notices that were not sent, because this program ends: 1"]
    assert has_ended(int((tmp_path / "pid").read_text()), within_s=0.0)


async def test_a_program_that_fails_or_is_not_there_is_run_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = script(tmp_path, f"echo once >> {tmp_path}/runs", "exit 3")
    with caplog.at_level(logging.WARNING):
        await run(fails)
        await run("/no/such/program")

    assert (tmp_path / "runs").read_text() == "once\n"
    assert caplog.messages == [
        f"the notice lost was not sent to {fails}: {fails} ended with 3",
        "the notice lost was not sent to /no/such/program: /no/such/program cannot be run: the program that its first line names does not exist; correct that line",
    ]


SCARCE_FILES = """
import asyncio, os, resource
from gpu_worker_pool.notify.sender import run_program

async def main():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert (await run_program(["true"], b"", 30.0, env={}))[0] is None  # what is opened once is open
    before = os.listdir("/proc/self/fd")
    for more in range(20):
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) - 1 + more, most))
        why, _ = await run_program(["true"], b"", 30.0, env={})
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        assert why is None or why.startswith("true cannot be run: "), why
        assert os.listdir("/proc/self/fd") == before, (more, os.listdir("/proc/self/fd"), before)
        print("failed" if why else "ran")

asyncio.run(main())
"""


def test_a_program_without_a_file_to_open_says_why_it_cannot_run_one_and_leaves_none_open() -> None:
    """Whichever of the files that it opens is the first that is too many."""
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", SCARCE_FILES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.split()
    assert (said[0], said[-1]) == ("failed", "ran")


IN_ANOTHER_NAMESPACE = """
import asyncio, os
from gpu_worker_pool.host.processes import own_proc
from gpu_worker_pool.notify.sender import run_program

print(own_proc(), asyncio.run(run_program(["true"], b"", 30.0, env={}))[0])
"""


def test_a_program_where_proc_shows_other_processes_is_not_run_and_says_what_to_do() -> None:
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", IN_ANOTHER_NAMESPACE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.stderr.startswith("unshare:"):
        pytest.skip(f"this system makes no pid namespace: {done.stderr.strip()}")
    assert done.stdout.startswith("None /proc does not show this process by its own number"), done.stderr
