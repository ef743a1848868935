from __future__ import annotations

import asyncio
import copy
import math
import pickle
from dataclasses import asdict
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import pytest

from gpu_worker_pool.models import (
    EndpointInfo,
    GlobalGPUAssignment,
    GlobalGPUInfo,
    GPUAssignment,
    GPUInfo,
    GPUStats,
    LeaseFacts,
    MultiEndpointPoolStatus,
    PoolStatus,
    WorkerInfo,
)
from gpu_worker_pool.notices import Loss

NOW = datetime(2026, 1, 2, tzinfo=UTC)
# As SERVER.md shows it.
SUMMARY: dict[str, Any] = {
    "gpu_count": 2,
    "total_memory_mb": 20480,
    "total_used_memory_mb": 4096,
    "total_memory_usage_percent": 20.0,
    "average_utilization_percent": 17.5,
    "gpus_summary": [
        {"gpu_id": 0, "name": "NVIDIA GeForce RTX 3080", "memory_usage_percent": 20.0, "utilization_percent": 15},
        {"gpu_id": 1, "name": "NVIDIA GeForce RTX 3080", "memory_usage_percent": 20.0, "utilization_percent": 20},
    ],
    "timestamp": "2025-07-23T10:30:00.123456",
}
GPU: dict[str, Any] = SUMMARY["gpus_summary"][0]


# --- as the documents show them ------------------------------------------------------------------------------------


def test_an_assignment_prints_as_the_documents_show_it() -> None:
    assignment = GPUAssignment(2, "worker-1", NOW, endpoint_id="server1")
    assignment.lease_id = "abc"

    assert repr(assignment) == f"GPUAssignment(gpu_id=2, worker_id='worker-1', assigned_at={NOW!r})"


def test_a_single_endpoint_assignment_has_the_global_names_beside_it() -> None:
    assignment = GPUAssignment(2, "w", NOW, global_gpu_id="server1:2", endpoint_id="server1", local_gpu_id=2)

    assert (assignment.gpu_id, assignment.global_gpu_id) == (2, "server1:2")
    assert (assignment.endpoint_id, assignment.local_gpu_id) == ("server1", 2)


def test_the_gpu_id_of_a_global_assignment_is_its_global_id_and_cannot_be_set() -> None:
    assignment = GlobalGPUAssignment("server1:2", "server1", 2, "w", NOW)

    assert assignment.gpu_id == "server1:2"
    with pytest.raises(AttributeError):
        assignment.gpu_id = "server1:3"  # type: ignore[misc]


def test_the_status_of_either_document_can_be_made() -> None:
    endpoint = EndpointInfo("server1", "http://server1:8000", True, NOW, 8, 5, 1.5)
    of_readme = MultiEndpointPoolStatus(8, 5, 3, 0, {}, 1, 1, [{"endpoint_id": "server1"}])
    of_design = MultiEndpointPoolStatus(
        total_endpoints=1,
        healthy_endpoints=1,
        total_gpus=8,
        available_gpus=5,
        active_workers=3,
        blocked_workers=0,
        endpoints=[endpoint],
        gpu_assignments={"server1:0": [WorkerInfo("w")]},
    )

    assert isinstance(of_readme, PoolStatus)
    assert of_readme.endpoint_details == [{"endpoint_id": "server1"}]
    assert of_design.endpoint_details == [asdict(endpoint)]


# --- what the client adds ------------------------------------------------------------------------------------------


def assignments() -> list[GPUAssignment | GlobalGPUAssignment]:
    return [GPUAssignment(2, "w", NOW), GlobalGPUAssignment("server1:2", "server1", 2, "w", NOW)]


def test_assignments_are_equal_by_the_documented_fields() -> None:
    one = GPUAssignment(1, "w", NOW, endpoint_id="server1")
    other = GPUAssignment(1, "w", NOW)
    one.lease_id = "abc"

    assert one == other
    assert {one: "known"}[other] == "known"
    assert one != GPUAssignment(2, "w", NOW)
    assert repr(one) == repr(other)
    assert asdict(GlobalGPUAssignment("s:1", "s", 1, "w", NOW, lease_id="abc")).items() >= {
        ("global_gpu_id", "s:1"),
        ("endpoint_id", "s"),
        ("local_gpu_id", 1),
        ("worker_id", "w"),
        ("assigned_at", NOW),
        ("lease_id", "abc"),
    }


@pytest.mark.parametrize("assignment", assignments())
@pytest.mark.parametrize("is_lost", [False, True])
async def test_another_process_learns_whether_it_was_lost_already(assignment: LeaseFacts, is_lost: bool) -> None:
    assignment.lease_id = "abc"
    assignment.env = MappingProxyType({"CUDA_VISIBLE_DEVICES": "2"})
    assignment.lost = Loss(60.0)
    heard = asyncio.create_task(assignment.lost.wait())
    await asyncio.sleep(0)  # it belongs to this loop now, and cannot be pickled
    if is_lost:
        assignment.lost.set("revoked")

    there = pickle.loads(pickle.dumps(assignment))  # noqa: S301 - our own

    assert there == assignment
    assert (there.lease_id, there.env) == ("abc", {"CUDA_VISIBLE_DEVICES": "2"})
    assert there.is_lost is is_lost
    if is_lost:
        assert (await there.lost, there.lost.reason) == ("revoked", "revoked")
    heard.cancel()


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
def test_a_copy_hears_of_the_loss(copier: Any) -> None:
    assignment = GPUAssignment(1, "w", NOW)
    loss = assignment.lost = Loss(60.0)
    copied = copier(assignment)
    loss.set("revoked")

    assert copied is not assignment
    assert copied.is_lost


# --- checks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GPUInfo(-1, "x", 0.0, 0.0), "gpu_id is -1"),
        (lambda: GPUInfo(0, "x", 100.1, 0.0), "memory_usage_percent is 100.1; it must be a number from 0 to 100"),
        (lambda: GPUInfo(0, "x", 0.0, -0.1), "utilization_percent is -0.1"),
        (lambda: GlobalGPUInfo("s:0", "s", 0, "x", 101.0, 0.0, True), "memory_usage_percent is 101"),
        (lambda: GlobalGPUInfo("s:0", "s", 0, "x", 1.0, math.nan, True), "utilization_percent is nan"),
        (lambda: GlobalGPUInfo("s-0", "s", 0, "x", 1.0, 1.0, True), "global_gpu_id is 's-0'; it must be s:0"),
        (lambda: GPUAssignment(-1, "w", NOW), "gpu_id is -1"),
        (lambda: GPUAssignment(0, "", NOW), "worker_id is ''"),
        (lambda: GlobalGPUAssignment("s:1", "s", 2, "w", NOW), "global_gpu_id is 's:1'; it must be s:2"),
        (lambda: GlobalGPUAssignment("s:1", "s", 1, "", NOW), "worker_id is ''"),
        (lambda: WorkerInfo(""), "worker_id is ''"),
        (lambda: PoolStatus(-1, 0, 0, 0, {}), "total_gpus is -1"),
        (lambda: PoolStatus(1, 2, 0, 0, {}), "available_gpus is 2, which is more than total_gpus, 1"),
        (lambda: PoolStatus(1, 1, -1, 0, {}), "active_workers is -1"),
        (lambda: PoolStatus(1, 1, 0, -1, {}), "blocked_workers is -1"),
        (lambda: MultiEndpointPoolStatus(1, 1, -1, 0, {}, 1, 1), "active_workers is -1"),
        (lambda: MultiEndpointPoolStatus(1, 1, 0, 0, {}, 1, 2), "healthy_endpoints is 2, which is more"),
        (lambda: EndpointInfo("s", "http://s", True, None, 1, 2, None), "available_gpus is 2"),
        (lambda: EndpointInfo("", "http://s", True, None, 1, 1, None), "endpoint_id is ''"),
        (lambda: EndpointInfo("s", "http://s", True, None, 1, 1, math.inf), "response_time_ms is inf"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        make()


def summary(**change: Any) -> GPUStats:
    return GPUStats(**{**SUMMARY, "gpus_summary": [GPUInfo(**gpu) for gpu in SUMMARY["gpus_summary"]], **change})


def test_the_documented_summary_is_one() -> None:
    assert asdict(summary()) == SUMMARY


NO_INDEXES: list[object] = [None, -1, 1.0, "0", True, [], 10**5000]
NO_NAMES: list[object] = [None, 7, "x" * 257, "red\x1b[31m", "line\nbreak", "\ud800"]
NO_PERCENTAGES: list[object] = [-1, 100.5, math.nan, math.inf, -math.inf, "20", True, [], {}, 10**5000]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gpu_id", NO_INDEXES),
        ("name", NO_NAMES),
        ("memory_usage_percent", NO_PERCENTAGES),
        ("utilization_percent", NO_PERCENTAGES),
    ],
)
def test_a_gpu_with_garbage_is_refused_by_name(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name} is .*; it must be ") as caught:
            GPUInfo(**{**GPU, name: value})
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu_count": 3}, "gpu_count is 3, but gpus_summary has 2 GPUs"),
        ({"gpu_count": None}, "gpu_count is None"),
        ({"gpus_summary": [GPUInfo(**GPU)] * 2}, "gpus_summary has the same gpu_id twice"),
        ({"total_memory_mb": math.nan}, "total_memory_mb is nan"),
        ({"total_used_memory_mb": -1}, "total_used_memory_mb is -1"),
        ({"total_memory_usage_percent": 101}, "total_memory_usage_percent is 101"),
        ({"average_utilization_percent": "17"}, "average_utilization_percent is '17'"),
        ({"timestamp": 7}, "timestamp is 7"),
    ],
)
def test_a_summary_with_garbage_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        summary(**change)
