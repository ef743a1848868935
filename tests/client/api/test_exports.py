"""Where the names of the public API are imported from."""

from __future__ import annotations

import importlib

import pytest

import gpu_worker_pool


@pytest.mark.parametrize(
    ("module", "exported"),
    [
        ("gpu_worker_pool", gpu_worker_pool.__all__),
        (
            "gpu_worker_pool.client",
            ["GPUWorkerPoolClient", "gpu_worker_pool_client", "GPUContextManager", "ClientEvent"],
        ),
        (
            "gpu_worker_pool.models",
            [
                "GPUInfo",
                "GPUStats",
                "WorkerInfo",
                "GPUAssignment",
                "PoolStatus",
                "GlobalGPUAssignment",
                "MultiEndpointPoolStatus",
                "EndpointInfo",
                "GlobalGPUInfo",
            ],
        ),
        ("gpu_worker_pool.errors", ["WorkerTimeoutError", "StaleAssignmentError", "ServiceUnavailableError"]),
    ],
)
def test_what_is_imported_from_where(module: str, exported: list[str]) -> None:
    found = importlib.import_module(module)
    for name in exported:
        assert getattr(found, name) is getattr(gpu_worker_pool, name)
        assert name in dir(found)
