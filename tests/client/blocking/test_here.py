"""How a blocking caller leases: in its own thread, without the loop, as long as it is simple. Counts, no times."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool import (
    GPUWorkerPool,
    GPUWorkerPoolClient,
    PoolError,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from gpu_worker_pool.client.acquire import heartbeat, here
from gpu_worker_pool.client.acquire.lost import Lost
from gpu_worker_pool.client.endpoints.known_endpoints import KnownEndpoints
from gpu_worker_pool.testing import ServerProcess
from tests.client.blocking.programs import END_S, Child, active, fill
from tests.client.foreign_servers import ForeignServer, ScriptedLeases, Seen, lease
from tests.server.leasing import eventually, queued

TOKEN = "a-token"  # noqa: S105 - of a server in this file


def loop_of(pool: GPUWorkerPool) -> asyncio.AbstractEventLoop:
    assert pool._thread is not None
    return pool._thread.loop


def known_of(pool: GPUWorkerPool) -> KnownEndpoints:
    assert pool._client._started_client is not None
    return pool._client._started_client.known


COUNTING = """
    import asyncio
    counts = dict.fromkeys(("connections", "tasks", "calls to the loop"), 0)
    ours = threading.get_ident()

    def see(event, args):
        if event == "socket.connect" and threading.get_ident() == ours:
            counts["connections"] += 1

    def make_task(loop, work, **options):
        counts["tasks"] += 1
        return asyncio.Task(work, loop=loop, **options)

    def count_calls(*args, **options):
        counts["calls to the loop"] += 1
        return call_loop(*args, **options)

    with GPUWorkerPool(url, polling_interval=3600) as pool:
        pool._thread.loop.set_task_factory(make_task)
        call_loop, pool._thread.loop.call_soon_threadsafe = pool._thread.loop.call_soon_threadsafe, count_calls
        sys.addaudithook(see)
        # No lease lasts until the loop takes it over, however slow this machine is.
        from gpu_worker_pool.client.acquire import heartbeat
        heartbeat.LATER_S = 3600
        for _ in range(50):
            with pool.gpu():
                pass
    """


def test_fifty_leases_need_one_connection_and_no_task_of_the_loop(server: ServerProcess) -> None:
    """The loop is called once, to take over the first lease later."""
    program = COUNTING + "    print(*counts.values())\n"
    with Child(server, program) as child:
        assert child.end() == (0, "1 0 1", "")


def test_by_the_unix_socket_too(tmp_path: Path) -> None:
    path = tmp_path / "sockets" / "pool.sock"
    program = COUNTING + "    print(*counts.values())\n"
    with (
        ServerProcess({"REFRESH_INTERVAL": "0.05", "GPU_POOL_SOCKET": str(path)}) as server,
        Child(server, program, {"GPU_POOL_SOCKET": str(path)}) as child,
    ):
        assert child.end() == (0, "1 0 1", "")


def test_a_lease_that_lasts_is_kept_alive_by_the_loop(server: ServerProcess) -> None:
    """And its loss is told, though it was granted past the loop."""
    with GPUWorkerPool(server.url) as pool:
        assignment = pool.request_gpu()
        server.ask(f"/leases/{assignment.lease_id}", "DELETE")
        eventually(lambda: assignment.is_lost, "it is told of the loss")
        assert active(server) == set()


def test_a_request_that_must_wait_does_so_in_its_own_thread(server: ServerProcess) -> None:
    """The loop has no task for it."""
    others = fill(server)
    got = []
    with GPUWorkerPool(server.url) as pool:
        with pytest.raises(WorkerTimeoutError):
            pool.request_gpu(timeout=0)
        tasks = len(asyncio.all_tasks(loop_of(pool)))
        thread = threading.Thread(target=lambda: got.append(pool.request_gpu()))
        thread.start()
        eventually(lambda: len(queued(server)) == 1, "it waits")
        assert len(asyncio.all_tasks(loop_of(pool))) == tasks
        assert pool.get_pool_status().blocked_workers == 1
        (waiting,) = queued(server)
        server.ask(f"/leases/{others[0]}", "DELETE")
        thread.join()
        assert got[0].lease_id == waiting
    assert active(server) == set(others[1:])


def test_a_short_wait_needs_one_call_more_and_is_not_told_as_a_wait(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server holds its first answer, and says why it is late to a request that is. The second call takes the GPU up."""
    monkeypatch.setattr(here, "HOLD_S", END_S)
    others = fill(server)
    got = []
    with GPUWorkerPool(server.url, polling_interval=3600) as pool:
        with pytest.raises(WorkerTimeoutError, match="GPU"):
            pool.request_gpu(timeout=0.2)
        eventually(lambda: not queued(server), "it has left the queue")
        (member,) = known_of(pool).members.values()
        calls = member.endpoint.calls
        thread = threading.Thread(target=lambda: got.append(pool.request_gpu()))
        thread.start()
        eventually(lambda: len(queued(server)) == 1, "it waits")
        server.ask(f"/leases/{others[0]}", "DELETE")
        thread.join()
        assert got[0].lease_id in active(server)
        assert member.endpoint.calls == calls + 2


def test_the_loop_looks_less_and_less_often_for_leases_that_last(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until one does: then the next one is not kept waiting."""
    with GPUWorkerPool(server.url, polling_interval=3600) as pool:
        (member,) = known_of(pool).members.values()
        beat: Any = member.heartbeat
        asked = Asked()

        def wake_after(*, is_lasting: bool) -> float:
            beat.add_later("one", Lost(60.0, is_local=True), 0.0, asked)
            if not is_lasting:
                beat.drop_soon("one", asked)
            asked.wake()
            beat.drop("one")
            return asked.after_s / heartbeat.LATER_S

        assert [wake_after(is_lasting=False) for _ in range(6)] == pytest.approx([1, 2, 4, 8, 16, 16])
        monkeypatch.setattr(heartbeat, "LATER_S", 1e-9)
        asyncio.run_coroutine_threadsafe(in_loop(wake_after, is_lasting=True), loop_of(pool)).result()
        assert wake_after(is_lasting=False) == pytest.approx(1)


class Asked:
    """A loop that is woken only when the test says so."""

    def call_later(self, *_: Any) -> None:
        raise AssertionError("it is called in the loop only")

    def call_soon_threadsafe(self, _: Any, after_s: float, wake: Callable[[], None]) -> None:
        self.after_s, self.wake = after_s, wake


async def in_loop(work: Any, **options: Any) -> Any:
    return work(**options)


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


def test_a_lease_that_the_loop_keeps_alive_is_released_in_the_callers_thread_too(server: ServerProcess) -> None:
    with GPUWorkerPool(server.url) as pool:
        assignment = pool.request_gpu()
        (member,) = known_of(pool).members.values()
        eventually(lambda: len(member.heartbeat._held) == 1, "the loop keeps it alive")
        tasks = asyncio.all_tasks(loop_of(pool))
        pool.release_gpu(assignment)
        assert active(server) == set()
        assert asyncio.all_tasks(loop_of(pool)) <= tasks
        eventually(lambda: not member.heartbeat._held, "the loop no longer does")


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
