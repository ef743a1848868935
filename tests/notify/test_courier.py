"""One attempt against the real thing: an HTTP server that fails, hangs and redirects, programs, and a sendmail."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.notify.courier import SIGNATURE, Courier, Failed
from gpu_worker_pool.notify.notice import Notice, Occasion
from gpu_worker_pool.notify.pending import Delivery
from gpu_worker_pool.notify.rule import Mail, Program, Rule, Target, Webhook
from tests.notify.receiver import receiver
from tests.processes import has_ended

NOTICE = Notice(
    Occasion.LOST, 1.7e9, "run-1", "ada", (GpuKey("gpu-1", "GPU-0"),), reason="revoked", by="root", why="a $(course)"
)


async def attempt(target: Target, *, timeout_s: float = 30.0, env: dict[str, str] | None = None) -> Failed | None:
    rule = Rule(frozenset(Occasion), target, timeout_s=timeout_s)
    return await Courier(os.environ if env is None else env).tell(Delivery("an-id", NOTICE, rule, 0.0))


async def test_a_webhook_is_posted_and_signed() -> None:
    with receiver() as at:
        assert await attempt(Webhook(at.url, "a secret of sixteen")) is None
        got = at.next()

    assert got.json == {
        "schema": "gpu-pool/notice/1",
        "id": "an-id",
        "on": "lost",
        "at": "2023-11-14T22:13:20Z",
        "lease_id": "run-1",
        "owner": "ada",
        "gpus": [{"node": "gpu-1", "uuid": "GPU-0"}],
        "node": None,
        "reason": "revoked",
        "by": "root",
        "why": "a $(course)",
        "ends_at": None,
        "labels": {},
        "job": None,
        "exit_code": None,
    }
    said = dict(part.split("=") for part in got.headers[SIGNATURE].split(","))
    signed = hmac.new(b"a secret of sixteen", said["t"].encode() + b"." + got.body, hashlib.sha256).hexdigest()
    assert signed == said["v1"]


@pytest.mark.parametrize(("status", "is_final"), [(500, False), (503, False), (429, False), (404, True), (302, True)])
async def test_an_answer_that_is_no_success_is_a_failure(status: int, *, is_final: bool) -> None:
    with receiver(status) as at:
        failed = await attempt(Webhook(at.url))

    assert failed is not None
    assert (str(status) in failed.why, failed.is_final) == (True, is_final)
    assert at.elsewhere == 0, "no redirect is followed"


async def test_a_receiver_that_hangs_or_is_not_there_is_a_failure() -> None:
    with receiver(None) as at:
        hung = await attempt(Webhook(at.url), timeout_s=0.2)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        away = await attempt(Webhook(f"http://127.0.0.1:{unused.getsockname()[1]}/"))

    assert hung is not None
    assert "0.2 s" in hung.why
    assert away is not None
    assert not away.is_final


async def test_a_program_gets_the_notice_and_no_shell_reads_it(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\ncat > {tmp_path}/stdin\necho "$@" > {tmp_path}/args\nenv > {tmp_path}/env\n')
    program.chmod(0o700)

    env = {"PATH": os.environ["PATH"], "GPU_POOL_TOKENS": "ada:a-long-random-secret"}
    failed = await attempt(Program((str(program), "$HOME; touch x")), env=env)

    assert failed is None
    assert json.loads((tmp_path / "stdin").read_text())["lease_id"] == "run-1"
    assert (tmp_path / "args").read_text() == "$HOME; touch x\n"
    told = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert (told["GPU_POOL_EVENT"], told["GPU_POOL_OWNER"], told["GPU_POOL_REASON"]) == ("lost", "ada", "revoked")
    assert "GPU_POOL_TOKENS" not in told


async def test_a_program_that_does_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(
        f"#!/bin/sh\nsetsid sh -c 'echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 600' &\nwait\n"
    )
    program.chmod(0o700)

    making = asyncio.ensure_future(attempt(Program((str(program),)), timeout_s=300))
    while not (tmp_path / "pid").exists():  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.01)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making

    assert has_ended(int((tmp_path / "pid").read_text()), within_s=30.0)
    failed = await attempt(Program((str(program),)), timeout_s=0.1)
    assert failed is not None
    assert "0.1 s" in failed.why


async def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    left = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 600"
    script = f"setsid sh -c '{left}' & until [ -e {tmp_path}/pid ]; do sleep 0.01; done"

    assert await attempt(Program(("/bin/sh", "-c", script))) is None
    assert has_ended(int((tmp_path / "pid").read_text()), within_s=0.0)


async def test_a_program_need_not_read_what_it_is_told() -> None:
    notice = replace(NOTICE, labels=(("command", "x" * 1_000_000),))
    rule = Rule(frozenset(Occasion), Program(("/bin/true",)), timeout_s=30.0)

    assert await Courier(os.environ).tell(Delivery("an-id", notice, rule, 0.0)) is None


async def test_a_program_that_fails_or_is_not_there(tmp_path: Path) -> None:
    failed, missing = await attempt(Program(("/bin/false",))), await attempt(Program((str(tmp_path / "none"),)))

    assert failed == Failed("/bin/false ended with 1")
    assert missing == Failed(f"{tmp_path}/none cannot be started: No such file or directory")


async def test_a_mail_goes_to_the_sendmail_of_the_system(tmp_path: Path) -> None:
    sendmail = tmp_path / "sendmail"
    sendmail.write_text(f'#!/bin/sh\ncat > {tmp_path}/mail\necho "$@" > {tmp_path}/args\n')
    sendmail.chmod(0o700)

    failed = await attempt(Mail("ada@example.org"), env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})

    assert failed is None
    mail = (tmp_path / "mail").read_text()
    assert (tmp_path / "args").read_text() == "-i -- ada@example.org\n"
    assert "Subject: GPU pool: the lease run-1 of ada was lost: revoked, by root" in mail


async def test_a_sendmail_that_fails_or_hangs_is_a_failure(tmp_path: Path) -> None:
    sendmail = tmp_path / "sendmail"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    sendmail.write_text("#!/bin/sh\nexit 75\n")
    sendmail.chmod(0o700)
    assert await attempt(Mail("ada@example.org"), env=env) == Failed(f"{sendmail} ended with 75")

    sendmail.write_text("#!/bin/sh\nexec sleep 600\n")
    hung = await attempt(Mail("ada@example.org"), env=env, timeout_s=0.1)
    assert hung == Failed(f"{sendmail} has not ended within 0.1 s")
