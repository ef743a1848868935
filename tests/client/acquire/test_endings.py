"""Leases that their server ends, by a time limit or for another request: the holder is warned, and told why."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import gpu_worker_pool
from gpu_worker_pool import (
    GPUContextManager,
    GPUWorkerPool,
    GPUWorkerPoolClient,
    RequestRefusedError,
    StaleAssignmentError,
)
from gpu_worker_pool.testing import ServerProcess
from tests.client.fault_tools import as_at_first, client_of, running, soon
from tests.client.foreign_servers import ForeignServer, Gate, ScriptedLeases, Seen
from tests.client.statistics_server import StatisticsServer
from tests.server.leasing import OFTEN, eventually, get, queue

GRACE_S = 3600


@pytest.fixture(scope="module", params=[False, True], ids=["here", "elsewhere"])
def started(request: pytest.FixtureRequest) -> Iterator[list[ServerProcess]]:
    settings = {"SIMULATED_GPUS": "2", "GPU_POOL_PREEMPT_GRACE": str(GRACE_S), **OFTEN}
    with running(1, is_elsewhere=request.param, **settings) as servers:
        yield servers


@pytest.fixture
def server(started: list[ServerProcess]) -> Iterator[ServerProcess]:
    yield started[0]
    as_at_first(started)


def kinds(events: list[Any]) -> list[str]:
    return [event.kind for event in events]


async def test_the_holder_is_warned_of_its_time_limit_and_told_that_it_is_over(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Any] = []
    warned: list[Any] = []
    caplog.set_level(logging.WARNING, "gpu_worker_pool.client")
    async with client_of(server, on_event=events.append, on_ending=warned.append) as client:
        assignment = await client.request_gpu(timeout=30, time_limit="2s")
        assert assignment.warned is not None
        assert assignment.lost is not None
        assert not assignment.warned.is_set()

        ending = await asyncio.wait_for(assignment.warned.wait(), 20)

        assert ending.reason == "time_limit"
        assert assignment.ending is ending
        assert assignment.ends_at is not None
        assert abs(assignment.ends_at - ending.ends_at) < timedelta(seconds=1)
        assert not assignment.is_lost
        assert await asyncio.wait_for(assignment.lost.wait(), 20) == "its time limit is over"
        assert getattr(assignment.lost, "code", None) == "time_limit"
        with pytest.raises(StaleAssignmentError, match="its time limit is over"):
            await client.release_gpu(assignment)
    assert kinds(events) == ["requested", "assigned", "ending", "lost"]
    assert warned == [assignment]
    clock = ending.ends_at.strftime("%H:%M")
    assert f"the lease ends at {clock} (time limit); save your work" in caplog.text
    assert get(server, assignment.lease_id or "")["end_reason"] == "time_limit"


async def test_a_preemptible_lease_is_warned_while_another_request_needs_its_gpus(server: ServerProcess) -> None:
    async with client_of(server) as client:
        assignment = await client.request_gpu(timeout=30, gpus=2, preemptible=True)
        assert assignment.warned is not None
        await asyncio.to_thread(queue, server)
        assert (await asyncio.wait_for(assignment.warned.wait(), 20)).reason == "preempted"
        assert not assignment.is_lost
        await client.release_gpu(assignment)


async def test_a_preempted_lease_says_so() -> None:
    with running(1, SIMULATED_GPUS="1", GPU_POOL_PREEMPT_GRACE="0.2") as (server,):
        async with client_of(server) as client:
            assignment = await client.request_gpu(timeout=30, preemptible=True)
            other = await client.request_gpu(timeout=30)
            assert assignment.lost is not None
            reason = await asyncio.wait_for(assignment.lost.wait(), 20)
            assert reason == "it was preemptible, and another request needed its GPUs"
            assert not other.is_lost


async def test_a_warning_is_asked_for_once_and_may_be_withdrawn() -> None:
    """The client says which warnings it knows, and only those."""
    soon_over = {"reason": "idle", "ends_at": "2026-11-17T00:00:00Z", "ends_in_s": 30.0}
    computes = Gate()
    events: list[Any] = []

    async def renew(seen: Seen) -> tuple[int, Any]:
        if "warned" in seen.json:
            await computes.passed()
            return 200, {"renewed": [{"id": id_} for id_ in seen.json["ids"]], "lost": []}
        return 200, {"renewed": [{"id": id_, "warning": soon_over} for id_ in seen.json["ids"]], "lost": []}

    with ForeignServer(ScriptedLeases(renew=renew).behaviour()) as foreign:
        async with client_of(foreign, on_event=events.append, endpoint_timeout=20) as client:
            assignment = await client.request_gpu(timeout=30)
            await soon(lambda: len(foreign.asked("POST")) == 2, "two heartbeats")
            assert assignment.ending is not None
            computes.open()
            await soon(lambda: assignment.ending is None, "the warning is withdrawn")
        first, second = (seen.json for seen in foreign.asked("POST")[:2])
    assert "warned" not in first
    assert second["warned"] == [assignment.lease_id]
    assert kinds(events)[:4] == ["requested", "assigned", "ending", "going_on"]


async def test_a_server_that_passes_over_the_limit_is_not_believed() -> None:
    scripted = ScriptedLeases()
    with ForeignServer(scripted.behaviour()) as foreign:
        async with client_of(foreign) as client:
            with pytest.raises(RequestRefusedError, match="its lease does not end, and a limit of 1m was asked for"):
                await client.request_gpu(timeout=30, time_limit="1m")
        assert {seen.lease_id for seen in foreign.asked("PUT")} == set(scripted.deleted)


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"time_limit": "soon"}, "time_limit is 'soon'; give seconds, or a text such as 2h"),
        ({"time_limit": True}, "time_limit is True"),
        ({"time_limit": 0}, "time_limit_s is 0"),
        ({"time_limit": "400d"}, "time_limit_s"),
        ({"preemptible": "no"}, "preemptible is 'no'; it must be True or False"),
    ],
)
async def test_a_bad_value_asks_for_nothing(wishes: dict[str, Any], said: str) -> None:
    with ForeignServer(ScriptedLeases().behaviour()) as foreign:
        async with client_of(foreign) as client:
            with pytest.raises(ValueError, match=said):
                await client.request_gpu(timeout=30, **wishes)
        assert foreign.asked("PUT") == []


async def test_without_a_lease_server_limits_hold_in_this_process() -> None:
    events: list[Any] = []
    async with (
        StatisticsServer(1) as statistics,
        GPUWorkerPoolClient(statistics.url, on_event=events.append) as client,
    ):
        context = GPUContextManager(client, 30, time_limit=1)
        with pytest.raises(StaleAssignmentError, match="its time limit is over"):  # noqa: PT012
            async with context:
                assignment = context.assignment
                assert assignment is not None
                assert assignment.warned is not None
                assert assignment.lost is not None
                assert assignment.ends_at is not None
                assert (await asyncio.wait_for(assignment.warned.wait(), 20)).reason == "time_limit"
                await asyncio.wait_for(assignment.lost.wait(), 20)
        low = await client.request_gpu(timeout=30, preemptible=True)
        high = asyncio.ensure_future(client.request_gpu(timeout=120))
        assert low.warned is not None
        assert (await asyncio.wait_for(low.warned.wait(), 20)).reason == "preempted"
        await client.release_gpu(low)
        assert (await high).gpu_id == low.gpu_id
    assert kinds(events)[:4] == ["requested", "assigned", "ending", "lost"]


def test_a_program_without_asyncio_is_called_and_told(server: ServerProcess) -> None:
    told: list[str] = []

    def note(assignment: Any) -> None:
        told.append(assignment.ending.reason)

    with GPUWorkerPool(server.url, on_ending=note) as pool:
        assignment = pool.request_gpu(30, time_limit="1s")
        eventually(lambda: (pool.get_pool_status(), assignment.is_lost)[1], "it is lost")
        assert told == ["time_limit"]
    with (
        pytest.raises(StaleAssignmentError, match="time limit"),
        gpu_worker_pool.gpu(30, time_limit=1, preemptible=True, service_endpoint=server.url) as short,
    ):
        eventually(lambda: short.is_lost, "it is lost")


async def test_a_copy_learns_of_a_warning_and_a_pickled_one_does_not(server: ServerProcess) -> None:
    async with client_of(server) as client:
        assignment = await client.request_gpu(timeout=30, time_limit=2)
        assert assignment.warned is not None
        await asyncio.wait_for(assignment.warned.wait(), 20)
        assert copy.copy(assignment).ending is assignment.ending
        sent = pickle.loads(pickle.dumps(assignment))  # noqa: S301 - our own
        assert (sent.ending, sent.ends_at) == (None, assignment.ends_at)
