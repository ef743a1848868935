"""`gpu-pool run --on-granted` and `--notify`, in real processes, against a real receiver."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import gpu_pool, start_gpu_pool
from tests.cli.run.test_run import end, the_lease
from tests.notify.receiver import receiver
from tests.server.leasing import eventually


def test_a_url_is_told_of_the_grant_and_of_the_end(server: ServerProcess) -> None:
    with receiver(503) as at:
        done = gpu_pool("run", "--name", "mine", "--notify", at.url, "--", "sh", "-c", "exit 3", server=server)
        refused, granted, ended = at.next(), at.next(), at.next()

    assert done.code == 3
    assert granted.body == refused.body, "a notice that was not taken is sent again"
    assert granted.title.startswith(f"{user_name()}'s mine has GPU ")
    assert granted.title.endswith(f" of {server.json('/pool')['node']}")
    assert ended.title == f"{user_name()}'s mine ended with exit code 3"
    assert ended.details["Lease"] == granted.details["Lease"]


def test_a_url_is_told_of_a_loss(server: ServerProcess) -> None:
    with receiver() as at:
        process = start_gpu_pool("run", "--notify", at.url, "--", "sleep", "1000", server=server)
        assert " has GPU " in at.next().title
        server.ask(f"/leases/{the_lease(server)['id']}", "DELETE")
        lost, ended = at.next(), at.next()
        assert end(process) == 125

    assert " lost GPU " in lost.title
    assert lost.details["Details"]
    assert ended.title.endswith("ended with exit code 125")


def test_a_receiver_that_hangs_ends_no_command(server: ServerProcess) -> None:
    with receiver(None) as at:
        process = start_gpu_pool("run", "--notify", at.url, "--", "sleep", "1000", server=server)
        at.next()
        process.send_signal(signal.SIGTERM)
        eventually(lambda: not server.json("/leases")["leases"], "the lease is given back meanwhile")
    assert end(process) == 128 + signal.SIGTERM


def test_a_program_runs_when_the_gpus_are_there_and_no_shell_reads_it(server: ServerProcess, tmp_path: Path) -> None:
    told = tmp_path / "told"
    program = tmp_path / "tell"
    program.write_text(f'#!/bin/sh\necho "$PWD $GPU_POOL_EVENT $MINE $*" > {told}; cat >> {told}\n')
    program.chmod(0o700)
    done = gpu_pool(
        "run",
        "--on-granted",
        "./tell '$HOME;' `id`",
        "--",
        "sh",
        "-c",
        f"until [ -s {told} ]; do sleep 0.05; done",
        server=server,
        env={"MINE": "of the user"},
        cwd=tmp_path,
    )
    said, notice = told.read_text().splitlines()
    assert done.code == 0
    assert said == f"{os.path.realpath(tmp_path)} granted of the user $HOME; `id`"
    assert json.loads(notice)["on"] == "granted"


@pytest.mark.parametrize(("command", "code"), [("run", 125), ("submit", 2)])
def test_what_cannot_be_told_is_refused_before_anything_happens(command: str, code: int) -> None:
    done = gpu_pool(command, "--notify", "https://example.org/s3cr3t", "--", "true", server="http://127.0.0.1:9")
    assert done.code == code
    assert "https://… cannot be used: for a webhook, write jsons:// instead of https://" in done.err
    assert "s3cr3t" not in done.err


def test_a_program_goes_on_when_the_guard_of_the_command_is_killed(server: ServerProcess, tmp_path: Path) -> None:
    program = "sh -c 'grep SigBlk /proc/self/status > mask; until [ -e go-on ]; do sleep 0.05; done; touch done'"
    process = start_gpu_pool("run", "--on-granted", program, "--", "sleep", "1000", server=server, cwd=tmp_path)
    eventually(lambda: (tmp_path / "mask").exists() and (tmp_path / "mask").read_text(), "the program runs")
    os.kill(int(str(the_lease(server)["pid"])), signal.SIGKILL)
    eventually(lambda: not server.json("/leases")["leases"], "the lease is given back")
    (tmp_path / "go-on").touch()

    assert end(process) == 125
    assert (tmp_path / "done").exists()
    assert int((tmp_path / "mask").read_text().split()[1], 16) == 0, "it can be ended by SIGTERM"
