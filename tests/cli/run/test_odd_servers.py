"""`gpu-pool run` with programs on its endpoint that are not our server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.cli.own_process import gpu_pool
from tests.client.foreign_servers import ForeignServer, ScriptedLeases, Seen, lease


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


@pytest.mark.parametrize(
    "env",
    [{}, {"BASH_ENV": "x.sh"}, {"CUDA_VISIBLE_DEVICES": "0\0"}, {"CUDA_VISIBLE_DEVICES": "1"}],
    ids=["none", "other", "nul", "another GPU"],
)
def test_without_a_usable_grant_the_command_does_not_start(env: dict[str, str]) -> None:
    async def grant(seen: Seen) -> tuple[int, Any]:
        return 201, lease(seen.lease_id, "active", env=env)

    scripted = ScriptedLeases(put=grant)
    with ForeignServer(scripted.behaviour()) as server:
        done = gpu_pool("run", "--", "echo", "ran", server=server.url)
        assert (done.code, done.out) == (125, "")
        assert "CUDA_VISIBLE_DEVICES" in done.err
        assert "Traceback" not in done.err
        assert {seen.lease_id for seen in server.asked("PUT")} == set(scripted.deleted)


def test_only_the_variables_of_cuda_reach_the_command() -> None:
    sent = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONPATH": "odd", "ENV": "odd"}

    async def grant(seen: Seen) -> tuple[int, Any]:
        return 201, lease(seen.lease_id, "active", env=sent)

    with ForeignServer(ScriptedLeases(put=grant).behaviour()) as server:
        done = gpu_pool("run", "--", "env", server=server.url)
    assert "CUDA_VISIBLE_DEVICES=0\n" in done.out
    assert "odd" not in done.out
