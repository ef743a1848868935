"""Hand out GPUs without collisions between workers, processes, users and machines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import ClientEvent, GPUContextManager, GPUWorkerPoolClient, gpu_worker_pool_client
    from .client.blocking import GPUWorkerPool, gpu
    from .errors import (
        EndpointError,
        NoEndpointAnsweredError,
        PoolError,
        RequestRefusedError,
        ServiceUnavailableError,
        StaleAssignmentError,
        WorkerTimeoutError,
    )
    from .models import (
        EndpointInfo,
        GlobalGPUAssignment,
        GlobalGPUInfo,
        GPUAssignment,
        GPUInfo,
        GPUStats,
        MultiEndpointPoolStatus,
        PoolStatus,
        WorkerInfo,
    )

__version__ = "1.0.0"

# Loaded on first use: the server needs none of them, and importing the package must be cheap.
_MODULES = {
    **dict.fromkeys(("ClientEvent", "GPUContextManager", "GPUWorkerPoolClient", "gpu_worker_pool_client"), "client"),
    **dict.fromkeys(("GPUWorkerPool", "gpu"), "client.blocking"),
    **dict.fromkeys(
        (
            "EndpointError",
            "NoEndpointAnsweredError",
            "PoolError",
            "RequestRefusedError",
            "ServiceUnavailableError",
            "StaleAssignmentError",
            "WorkerTimeoutError",
        ),
        "errors",
    ),
    **dict.fromkeys(
        (
            "EndpointInfo",
            "GPUAssignment",
            "GPUInfo",
            "GPUStats",
            "GlobalGPUAssignment",
            "GlobalGPUInfo",
            "MultiEndpointPoolStatus",
            "PoolStatus",
            "WorkerInfo",
        ),
        "models",
    ),
}

__all__ = [
    "ClientEvent",
    "EndpointError",
    "EndpointInfo",
    "GPUAssignment",
    "GPUContextManager",
    "GPUInfo",
    "GPUStats",
    "GPUWorkerPool",
    "GPUWorkerPoolClient",
    "GlobalGPUAssignment",
    "GlobalGPUInfo",
    "MultiEndpointPoolStatus",
    "NoEndpointAnsweredError",
    "PoolError",
    "PoolStatus",
    "RequestRefusedError",
    "ServiceUnavailableError",
    "StaleAssignmentError",
    "WorkerInfo",
    "WorkerTimeoutError",
    "gpu",
    "gpu_worker_pool_client",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
