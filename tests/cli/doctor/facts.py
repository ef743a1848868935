"""Made-up facts of an endpoint."""

from __future__ import annotations

from typing import Any

from gpu_worker_pool.cli.doctor.client import EndpointFacts
from gpu_worker_pool.urls import parse_endpoint
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import read

TOKEN = "a-long-random-secret"  # noqa: S105 - of nothing

FREE_GPU = {
    "gpu_id": 0,
    "uuid": "GPU-0",
    "memory_total_mb": 1000,
    "memory_outside_mb": 10,
    "leases": [],
    "processes": [],
}


def pool(**other: Any) -> PoolView:
    data = {
        "gpus": [FREE_GPU],
        "thresholds": {"memory_percent": 80.0, "utilization_percent": 90.0},
        "can_grant": True,
        "source": "nvml",
    }
    found = read(PoolView, {**data, **other})
    assert found is not None
    return found


FACTS = EndpointFacts("box", parse_endpoint("http://box:8000"), has_token=False, took_s=0.01, pool=pool())
