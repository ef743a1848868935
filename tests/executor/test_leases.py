"""The leases of an executor's workers: when they are requested and released, and what their loss means."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool import (
    GPUExecutor,
    RequestRefusedError,
    ServiceUnavailableError,
    WorkerLostError,
)
from gpu_worker_pool.testing import ServerProcess
from tests.client.foreign_servers import ForeignServer, ScriptedLeases
from tests.processes import has_ended
from tests.server import elsewhere
from tests.server.leasing import OFTEN, eventually, get, queue, queued, release, take

from . import work
from .conftest import MakeExecutor
from .work import Gate


def active(server: ServerProcess) -> list[dict[str, Any]]:
    return [lease for lease in server.json("/leases")["leases"] if lease["state"] == "active"]


def test_a_lease_is_requested_for_a_task_and_released_when_there_is_none(
    server: ServerProcess, executor: MakeExecutor, gate: Gate
) -> None:
    ex = executor(2, idle_release_s=0.0)
    assert active(server) == []

    future = ex.submit(work.report, gate.path)
    visitor = gate.wait()
    (lease,) = active(server)
    assert str(lease["gpus"][0]["gpu_id"]) == visitor.gpu
    assert lease["labels"]["command"]
    visitor.let_go()
    future.result()

    eventually(lambda: active(server) == [], "the lease is released")
    assert server.json(f"/leases/{lease['id']}")["end_reason"] == "released"
    # And requested again.
    assert ex.submit(abs, -2).result() == 2


def test_a_worker_may_have_several_gpus_or_a_part_of_one(
    server: ServerProcess, executor: MakeExecutor, gate: Gate
) -> None:
    several = executor(gpus=2, labels={"name": "sweep"}, priority=3)
    future = several.submit(work.report, gate.path)
    visitor = gate.wait()
    assert len(visitor.gpu.split(",")) == 2
    (lease,) = active(server)
    assert (lease["labels"], lease["priority"]) == ({"name": "sweep"}, 3)
    visitor.let_go()
    future.result()
    several.shutdown()

    shared = executor(2, memory="1GB", model="A100", preemptible=True)
    futures = [shared.submit(work.report, gate.path) for _ in range(2)]
    visitors = [gate.wait() for _ in range(2)]
    assert [(lease["memory_mb"], lease["preemptible"]) for lease in active(server)] == [(1024.0, True)] * 2
    for visitor in visitors:
        visitor.let_go()
    for future in futures:
        future.result()


def test_tasks_wait_in_the_queue_and_a_cancelled_one_leaves_it(server: ServerProcess, executor: MakeExecutor) -> None:
    held = take(server, gpus=4)
    ex = executor(2)
    first, second = ex.submit(abs, -1), ex.submit(abs, -2)
    eventually(lambda: len(queued(server)) == 2, "both wait")
    assert first.cancel()
    eventually(lambda: len(queued(server)) == 1, "one has left the queue")
    release(server, held["id"])

    assert (second.result(), first.cancelled()) == (2, True)


def test_a_lost_lease_ends_the_worker_and_fails_its_task(
    server: ServerProcess, executor: MakeExecutor, gate: Gate
) -> None:
    future = executor(grace_s=0.2).submit(work.report_with_child, gate.path)
    visitor = gate.wait()
    release(server, active(server)[0]["id"])

    with pytest.raises(WorkerLostError, match=rf"lease on GPU {visitor.gpu} was lost: it was released by \w+"):
        future.result()
    assert has_ended(visitor.pid)
    assert has_ended(visitor.says)


def test_what_a_task_has_started_ends_with_its_worker_before_the_gpu_is_granted_again(
    server: ServerProcess, executor: MakeExecutor, gate: Gate
) -> None:
    """The process has left the group and the session of the worker, and ignores SIGTERM."""
    future = executor(1, grace_s=0.2).submit(work.report_with_child, gate.path)
    visitor = gate.wait()
    others = take(server, gpus=3)
    waiter = queue(server)
    visitor.kill()

    assert get(server, waiter["id"], wait_s=30)["state"] == "active"
    assert Path(f"/proc/{visitor.says}").exists() is False
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        future.result()
    release(server, waiter["id"])
    release(server, others["id"])


def test_the_death_of_a_guard_ends_its_worker_and_what_that_has_started(
    server: ServerProcess, executor: MakeExecutor, gate: Gate
) -> None:
    """The process has left the group and the session of the worker, and ignores SIGTERM."""
    future = executor().submit(work.report_with_child, gate.path)
    visitor = gate.wait()
    guard = int(active(server)[0]["pid"])
    assert guard not in {visitor.pid, os.getpid()}
    os.kill(guard, 9)

    with pytest.raises(WorkerLostError, match=f"worker {visitor.pid} on GPU {visitor.gpu} was killed with its guard"):
        future.result()
    assert has_ended(visitor.pid)
    assert has_ended(visitor.says)


def test_a_request_that_can_never_be_served_fails_the_tasks_and_not_the_executor(
    server: ServerProcess, executor: MakeExecutor
) -> None:
    ex = executor(gpus=5)
    for _ in range(2):
        with pytest.raises(RequestRefusedError, match="5 GPUs"):
            ex.submit(abs, 1).result()
    assert queued(server) == []


def test_without_a_server_tasks_fail_at_once_and_say_so() -> None:
    with (
        GPUExecutor(1, service_endpoint="http://127.0.0.1:9") as ex,
        pytest.raises(
            ServiceUnavailableError, match=r"no GPU server is available: .*check that the GPU servers are running"
        ),
    ):
        ex.submit(abs, 1).result()


def test_with_a_limit_tasks_wait_for_a_server_that_is_not_there_yet() -> None:
    with ServerProcess({"SIMULATED_GPUS": "1", **OFTEN}) as server:
        server.kill()
        with GPUExecutor(2, lease_timeout_s=work.MOST_S, service_endpoint=server.url) as ex:
            futures = [ex.submit(abs, -number) for number in range(3)]
            server.start()
            assert [future.result() for future in futures] == [0, 1, 2]


def test_gpus_of_another_machine_are_not_used() -> None:
    with (
        ForeignServer(
            ScriptedLeases(pool=(200, {"gpus": [], "leases": [], "queue": [], "machine": "another"})).behaviour()
        ) as foreign,
        GPUExecutor(1, service_endpoint=foreign.url) as ex,
        pytest.raises(RequestRefusedError, match="its GPUs are in another machine"),
    ):
        ex.submit(abs, 1).result()


# --- the environment of the program ----------------------------------------------------------------------------------


@pytest.fixture
def environ() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_only_gpus_that_the_program_sees_are_requested(
    server: ServerProcess, executor: MakeExecutor, environ: pytest.MonkeyPatch
) -> None:
    environ.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert executor(None).submit(work.environment, "CUDA_VISIBLE_DEVICES").result() == {"CUDA_VISIBLE_DEVICES": "2"}

    environ.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(RequestRefusedError, match="CUDA_VISIBLE_DEVICES='7' names no GPU of the pool"):
        executor().submit(abs, 1).result()


def test_inside_a_lease_the_workers_share_the_gpus_of_that_lease(
    server: ServerProcess, executor: MakeExecutor, environ: pytest.MonkeyPatch, gate: Gate
) -> None:
    around = take(server, gpus=2, pid=os.getpid(), host=os.uname().nodename)
    for name, value in {**around["env"], "GPU_POOL_LEASE_ID": around["id"], "GPU_POOL_LEASE_URL": server.url}.items():
        environ.setenv(name, value)
    ex = executor(2)
    futures = [ex.submit(work.report, gate.path) for _ in range(2)]
    visitors = [gate.wait(), gate.wait()]
    assert {visitor.gpu for visitor in visitors} == set(around["env"]["CUDA_VISIBLE_DEVICES"].split(","))
    for visitor in visitors:
        visitor.let_go()
    for future in futures:
        future.result()
    ex.shutdown()
    release(server, around["id"])


# --- leases that end -------------------------------------------------------------------------------------------------


def test_a_preempted_worker_finishes_its_task_and_gets_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"SIMULATED_GPUS": "1", "GPU_POOL_PREEMPT_GRACE": "30", **OFTEN}
    with ServerProcess(settings) as server, Gate(tmp_path) as gate:
        ex = GPUExecutor(1, preemptible=True, service_endpoint=server.url)
        with ex:
            first, second = (ex.submit(work.report, gate.path) for _ in range(2))
            visitor = gate.wait()
            (lease,) = active(server)
            waiter = queue(server)
            eventually(lambda: "save your work" in caplog.text, "it is warned")
            visitor.let_go("finished")
            assert first.result() == "finished"

            assert get(server, waiter["id"], wait_s=30)["state"] == "active"
            assert server.json(f"/leases/{lease['id']}")["end_reason"] == "released"
            release(server, waiter["id"])
            gate.wait().let_go("later")
            assert second.result() == "later"


def test_a_task_that_outlives_the_time_limit_of_its_lease_is_ended(
    server: ServerProcess, executor: MakeExecutor, gate: Gate
) -> None:
    """The server may warn, or end the lease, before the worker's guard acts; whichever was first, the time limit is named."""
    future = executor(time_limit=6.0, grace_s=0.5).submit(work.report, gate.path)
    visitor = gate.wait()

    with pytest.raises(WorkerLostError, match=r"SIGTERM.*time limit|lease .* was lost: its time limit"):
        future.result()
    assert has_ended(visitor.pid)


def test_a_worker_whose_lease_has_a_ttl_is_ended_when_no_heartbeat_gets_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_TTL", "1.5")
    settings = {"SIMULATED_GPUS": "1", **OFTEN}
    with ServerProcess(settings, command=elsewhere.COMMAND) as server, Gate(tmp_path) as gate:
        ex = GPUExecutor(1, service_endpoint=server.url)
        with ex:
            assert ex.submit(abs, -1).result() == 1
            future = ex.submit(work.report, gate.path)
            visitor = gate.wait()
            server.kill()

            with pytest.raises(WorkerLostError, match=r"lease|SIGTERM"):
                future.result()
            assert has_ended(visitor.pid)
            server.start()
