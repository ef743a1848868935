"""Programs that are told: what they get, and what becomes of those that fail or do not end."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.notify.notice import Notice
from gpu_worker_pool.notify.rules import Program, rules_of_command
from gpu_worker_pool.notify.sender import Sender
from tests.notify.notices import NOTICE, rule
from tests.processes import has_ended


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
IS_THERE = "until [ -e {0}/pid ]; do sleep 0.01; done"


async def test_a_program_that_does_not_end_is_killed_with_all_that_it_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = script(tmp_path, STAYS.format(tmp_path), "wait")
    with caplog.at_level(logging.WARNING):
        await run(hangs, timeout_s=2.0)

    assert caplog.messages == [f"the notice lost was not sent to {hangs}: {hangs} has not ended within 2 s"]
    assert has_ended(int((tmp_path / "pid").read_text()), within_s=0.0)


async def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    await run(script(tmp_path, STAYS.format(tmp_path), IS_THERE.format(tmp_path)))
    assert has_ended(int((tmp_path / "pid").read_text()), within_s=0.0)


async def test_a_program_ends_with_the_process_that_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hangs = script(tmp_path, STAYS.format(tmp_path), "wait")
    with caplog.at_level(logging.WARNING):
        await run(hangs, within_s=2.0)

    assert caplog.messages == ["notices that were not sent, because this program ends: 1"]
    assert has_ended(int((tmp_path / "pid").read_text()), within_s=0.0)


async def test_a_program_need_not_read_what_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    await run("/bin/true", notice=replace(NOTICE, labels=(("command", "x" * 1_000_000),)))
    assert not caplog.messages


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


def test_the_program_of_a_command_is_found_as_its_user_would() -> None:
    (found,) = rules_of_command("echo 'two words' $HOME", [], {"PATH": os.environ["PATH"], "MINE": "1"}, "/usr")
    assert isinstance(found.target, Program)
    assert found.target.arguments[1:] == ("two words", "$HOME")
    assert (found.target.cwd, dict(found.target.env or ())["MINE"]) == ("/usr", "1")


@pytest.mark.parametrize(
    ("on_granted", "says"),
    [
        ("'open", "cannot be split into words"),
        ("", "is empty"),
        ("no-such-program now", "there is no program 'no-such-program'"),
    ],
)
def test_a_program_that_cannot_be_run_is_refused(on_granted: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rules_of_command(on_granted, [], {"PATH": os.environ["PATH"]}, "/")
