"""`gpu-pool run` with programs on its endpoint that are not our server."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from tests.cli.own_process import MOST_S, gpu_pool, start_gpu_pool
from tests.client.foreign_servers import Behaviour, ForeignServer, ScriptedLeases, Seen, lease, not_found, saying
from tests.server.leasing import eventually
from tests.server.running import free_port


async def dripping(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Begins an answer and never ends it."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


def test_the_timeout_bounds_the_answers_too() -> None:
    with ForeignServer(dripping) as server:
        done = gpu_pool("run", "--timeout", "0.5s", "--", "echo", "ran", server=server.url)
    assert (done.code, done.out) == (124, "")  # and not 125, because no server answered within its own limit
    assert "--timeout" in done.err


def test_a_signal_ends_the_wait_also_before_any_server_has_answered() -> None:
    with ForeignServer(dripping) as server, start_gpu_pool("run", "--", "true", server=server.url) as waiting:
        eventually(lambda: server.seen, "it asks")
        waiting.terminate()
        assert waiting.wait(timeout=MOST_S) == 128 + signal.SIGTERM


def test_whatever_variables_a_server_sends_the_command_sees_the_gpus_of_the_grant_and_no_others() -> None:
    async def grant(seen: Seen) -> tuple[int, Any]:
        return 201, lease(seen.lease_id, "active", env={"BASH_ENV": "x.sh", "CUDA_VISIBLE_DEVICES": "1"})

    with ForeignServer(ScriptedLeases(put=grant).behaviour()) as server:
        done = gpu_pool("run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES:$BASH_ENV", server=server.url)
    assert (done.code, done.out) == (0, "0:\n"), done.err


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (saying(401, b'{"detail": "Log in first."}'), "Log in first (status 401)"),
        (not_found, "Not Found (status 404)"),
        (saying(200, b'{"hello": 1}'), "its answer shows no GPUs; is this a GPU statistics server (status 200)"),
    ],
)
def test_what_can_never_grant_is_not_waited_for(behaviour: Behaviour, words: str) -> None:
    with ForeignServer(behaviour) as server:
        done = gpu_pool("run", "--", "true", server=server.url)
    assert done.code == 125
    assert "no GPU server can be used" in done.err
    assert words in done.err
    assert "Start one" not in done.err


def test_what_fails_again_and_again_is_told_and_named_when_the_time_is_over() -> None:
    async def odd(_: Seen) -> tuple[int, Any]:
        return 201, [1]

    with ForeignServer(ScriptedLeases(put=odd).behaviour()) as server:
        with start_gpu_pool("run", "--", "true", server=server.url) as waiting:
            assert waiting.stderr is not None
            assert "has failed this request 2 times: its answer is not a lease" in waiting.stderr.readline()
            waiting.terminate()
        done = gpu_pool("run", "--timeout", "0s", "--", "true", server=server.url)
    assert done.code == 124
    assert "no GPU within --timeout: 127.0.0.1: its answer is not a lease" in done.err


def test_where_all_that_answer_refuse_a_box_that_is_down_is_not_waited_for() -> None:
    """The lab's bug 7: without a token and with one box down, `run` waited for ever, without a word."""
    refusal = (401, {"detail": "Without a token, only calls from the server's own machine may change anything"})
    with ForeignServer(ScriptedLeases(put=refusal).behaviour()) as server:
        both = f"{server.url},http://127.0.0.1:{free_port()}"
        done = gpu_pool("run", "--remote", "-e", both, "--", "echo", "ran")
    assert (done.code, done.out) == (125, "")
    assert "Without a token" in done.err
