"""A blocking caller, and what can go wrong under it: a silent, restarted or stopped server, a lost connection, a stop."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
from typing import Any

import pytest

from gpu_worker_pool import (
    GPUWorkerPool,
    GPUWorkerPoolClient,
    PoolError,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from gpu_worker_pool.testing import ServerProcess
from tests.client.blocking.programs import END_S, active
from tests.client.foreign_servers import ForeignServer, ScriptedLeases, Seen, lease
from tests.server.leasing import eventually, queued

TOKEN = "a-token"  # noqa: S105 - of a server in this file


def test_a_lease_that_lasts_is_kept_alive_by_the_loop(server: ServerProcess) -> None:
    """And its loss is told."""
    with GPUWorkerPool(server.url) as pool:
        assignment = pool.request_gpu()
        server.ask(f"/leases/{assignment.lease_id}", "DELETE")
        eventually(lambda: assignment.is_lost, "it is told of the loss")
        assert active(server) == set()


def test_a_request_that_a_silent_server_gets_late_leaves_nothing_behind(server: ServerProcess) -> None:
    """Its release must not overtake it."""
    with GPUWorkerPool(server.url) as pool:
        with pool.gpu():
            pass
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerTimeoutError, match="has not answered"):
                pool.request_gpu(timeout=0.3)
        finally:
            os.kill(server.pid, signal.SIGCONT)
    eventually(lambda: not active(server) and not queued(server), "nothing is left")


def test_a_server_that_was_restarted_is_called_again(server: ServerProcess) -> None:
    """The connection of the last call is of no use then."""
    with GPUWorkerPool(server.url) as pool:
        with pool.gpu():
            pass
        server.stop()
        server.start()
        with pool.gpu() as assignment:
            assert active(server) == {assignment.lease_id}
        assert active(server) == set()


def test_a_stop_in_the_middle_of_requests_and_releases_of_other_threads(server: ServerProcess) -> None:
    """Nothing hangs, nothing is left, and each thread is told why its call ended."""
    for _ in range(8):
        pool = GPUWorkerPool(server.url, polling_interval=3600)
        pool.start()
        workers = [Worker(pool) for _ in range(6)]
        for worker in workers:
            worker.has_begun.wait(END_S)
        pool.stop()
        for worker in workers:
            worker.thread.join(END_S)
            assert isinstance(worker.end, RuntimeError | StaleAssignmentError), worker.end
        eventually(lambda: not active(server) and not queued(server), "nothing is left")


class Worker:
    """Requests and releases GPUs in a thread of its own until that fails."""

    def __init__(self, pool: GPUWorkerPool) -> None:
        self.has_begun = threading.Event()
        self.end: BaseException | None = None
        self._pool = pool
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        try:
            while True:
                self._pool.release_gpu(self._pool.request_gpu())
                self.has_begun.set()
        except BaseException as error:  # noqa: BLE001 - whatever it is
            self.end = error


async def refuse(_: Seen) -> tuple[int, Any]:
    return 403, {"detail": "not for you"}


async def grant_two(seen: Seen) -> tuple[int, Any]:
    gpu = {"node": "foreign", "uuid": "GPU-other", "gpu_id": 1, "name": "Foreign GPU"}
    body = lease(seen.lease_id, "active")
    return 201, {**body, "gpus": [*body["gpus"], gpu]}


async def grant_another(_: Seen) -> tuple[int, Any]:
    return 201, lease("another", "active")


async def queue(seen: Seen) -> tuple[int, Any]:
    return 202, lease(seen.lease_id, "queued", reason="all are taken")


async def fail(_: Seen) -> tuple[int, Any]:
    return 500, {"detail": "it is broken"}


async def be_full(_: Seen) -> tuple[int, Any]:
    return 503, {"detail": "the disk is full"}


async def redirect(_: Seen) -> tuple[int, Any]:
    return 307, {}


def told(log: pytest.LogCaptureFixture, error: BaseException) -> list[str]:
    """What a user is told, without what differs from one request to the next."""
    texts = [f"{record.levelname} {record.getMessage()}" for record in log.records]
    log.clear()
    return [re.sub(r"[0-9a-f]{32}|worker-[-\w]+|[0-9.]+ s", "-", text) for text in [*texts, repr(error)]]


@pytest.mark.parametrize("answer", [refuse, grant_two, grant_another, queue, fail, be_full, redirect])
async def test_users_are_told_the_same_as_by_the_client_for_asyncio(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    script = ScriptedLeases(put=answer, get=answer)
    with ForeignServer(script.behaviour()) as server:
        client = GPUWorkerPoolClient(server.url, polling_interval=3600)
        async with client:
            caplog.set_level(logging.INFO, "gpu_worker_pool")
            with pytest.raises(PoolError) as by_client:
                await client.request_gpu(timeout=0.4)
            first, counts = told(caplog, by_client.value), client.get_detailed_metrics()["load_balancer"]
            ended = len(script.deleted)
        caplog.clear()
        with GPUWorkerPool(server.url, polling_interval=3600) as pool:
            caplog.clear()
            with pytest.raises(PoolError) as by_pool:
                await asyncio.to_thread(pool.request_gpu, timeout=0.4)
            assert told(caplog, by_pool.value) == first
            assert pool.get_detailed_metrics()["load_balancer"] == counts
        assert len(script.deleted) == 2 * ended


def test_a_connection_that_is_lost_in_the_middle_of_an_answer_is_made_again() -> None:
    """And the request is the same one: what was granted is not granted twice."""
    granted: list[str] = []
    script = ScriptedLeases()
    usual = script.behaviour()

    async def break_off_once(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.method == "PUT":
            granted.append(seen.lease_id)
            if len(granted) == 1:
                writer.write(b"HTTP/1.1 201 Created\r\nContent-Length: 1000\r\n\r\n{")
                await writer.drain()
                writer.transport.abort()
                return
        await usual(seen, writer)

    with ForeignServer(break_off_once) as server, GPUWorkerPool(server.url, token=TOKEN) as pool:
        assignment = pool.request_gpu(timeout=30)
        assert granted == [assignment.lease_id] * 2
        pool.release_gpu(assignment)
    assert script.deleted == [assignment.lease_id]
    sent = [{name.lower(): value for name, value in seen.headers.items()} for seen in server.seen]
    assert {fields.get("authorization") for fields in sent} == {f"Bearer {TOKEN}"}
