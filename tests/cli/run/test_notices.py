"""`gpu-pool run --on-granted` and `--notify`, in real processes, against a real receiver."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from gpu_worker_pool.cli.run.notices import CommandNotices
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.notify.notice import Notice
from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import gpu_pool, start_gpu_pool
from tests.cli.run.test_run import end, the_lease
from tests.notify.receiver import receiver
from tests.server.leasing import eventually


def test_a_url_is_told_of_the_grant_and_of_the_end_and_each_is_signed(server: ServerProcess) -> None:
    with receiver(503) as at:
        env = {"GPU_POOL_NOTIFY_SECRET": "a secret of sixteen"}
        done = gpu_pool("run", "--name", "mine", "--notify", at.url, "--", "sh", "-c", "exit 3", server=server, env=env)
        refused, granted, ended = at.next(), at.next(), at.next()

    assert done.code == 3
    assert granted.body == refused.body, "a notice that was not taken is sent again"
    assert "GPU-Pool-Signature" in granted.headers
    assert (granted.json["on"], granted.json["labels"]) == ("granted", {"command": "mine"})
    assert [gpu["node"] for gpu in granted.json["gpus"]] == [server.json("/pool")["node"]]
    assert (ended.json["on"], ended.json["exit_code"]) == ("ended", 3)
    assert ended.json["lease_id"] == granted.json["lease_id"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without a name")
def test_a_user_without_a_name_is_told_as_the_server_names_it() -> None:
    told: list[Notice] = []
    notices = CommandNotices(told.append, "mine")
    notices.know("run-1", "http://box:8000", ["GPU-0", "GPU-1"], ["gpu-1"])
    os.seteuid(424242)
    try:
        notices.granted()
    finally:
        os.seteuid(0)
    (notice,) = told
    assert notice.owner == "uid-424242"
    assert notice.gpus == (GpuKey("gpu-1", "GPU-0"), GpuKey("box", "GPU-1"))


def test_a_url_is_told_of_a_loss(server: ServerProcess) -> None:
    with receiver() as at:
        process = start_gpu_pool("run", "--notify", at.url, "--", "sleep", "1000", server=server)
        assert at.next().json["on"] == "granted"
        server.ask(f"/leases/{the_lease(server)['id']}", "DELETE")
        lost, ended = at.next().json, at.next().json
        assert end(process) == 125

    assert (lost["on"], ended["on"], ended["exit_code"]) == ("lost", "ended", 125)
    assert lost["why"]


def test_a_url_is_told_of_the_warning(server: ServerProcess) -> None:
    with receiver() as at:
        done = gpu_pool("run", "--time", "2", "--notify", at.url, "--", "sleep", "1000", server=server)
        told = [at.next().json for _ in range(4)]

    assert done.code == 123
    assert [one["on"] for one in told] == ["granted", "time_limit", "lost", "ended"]
    assert told[1]["ends_at"]


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


def test_a_program_that_fails_is_said_and_the_command_goes_on(server: ServerProcess) -> None:
    done = gpu_pool("run", "--on-granted", "false", "--", "sleep", "0.5", server=server)
    assert done.code == 0
    assert "false ended with 1" in done.err


@pytest.mark.parametrize(("command", "code"), [("run", 125), ("submit", 2)])
def test_what_cannot_be_told_is_refused_before_anything_happens(command: str, code: int) -> None:
    done = gpu_pool(command, "--notify", "ftp://example.org", "--", "true", server="http://127.0.0.1:9")
    assert done.code == code
    assert "must be a URL that begins with http:// or https://" in done.err
