"""Hand out GPUs without collisions between workers, processes, users and machines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import ClientEvent, GPUContextManager, GPUWorkerPoolClient, gpu_worker_pool_client
    from .client.blocking import GPUWorkerPool
    from .client.process_lease import gpu, lease_for_process, release_for_process
    from .errors import (
        EndpointError,
        NoEndpointAnsweredError,
        PoolError,
        RequestRefusedError,
        ServiceUnavailableError,
        StaleAssignmentError,
        WorkerTimeoutError,
    )
    from .executor.errors import ExecutorBrokenError, RemoteTaskError, WorkerLostError
    from .executor.executor import GPUExecutor
    from .models import (
        EndpointInfo,
        GlobalGPUAssignment,
        GlobalGPUInfo,
        GPUAssignment,
        GPUInfo,
        GPUStats,
        LeaseInfo,
        MultiEndpointPoolStatus,
        PoolStatus,
        WorkerInfo,
    )

__version__ = "1.0.0"

__all__ = [
    "ClientEvent",
    "EndpointError",
    "EndpointInfo",
    "ExecutorBrokenError",
    "GPUAssignment",
    "GPUContextManager",
    "GPUExecutor",
    "GPUInfo",
    "GPUStats",
    "GPUWorkerPool",
    "GPUWorkerPoolClient",
    "GlobalGPUAssignment",
    "GlobalGPUInfo",
    "LeaseInfo",
    "MultiEndpointPoolStatus",
    "NoEndpointAnsweredError",
    "PoolError",
    "PoolStatus",
    "RemoteTaskError",
    "RequestRefusedError",
    "ServiceUnavailableError",
    "StaleAssignmentError",
    "WorkerInfo",
    "WorkerLostError",
    "WorkerTimeoutError",
    "gpu",
    "gpu_worker_pool_client",
    "lease_for_process",
    "release_for_process",
]


# Where the names are; all others are models. They are loaded on first use: the server needs none of them, and importing
# the package must be cheap.
_MODULES = {
    ".client": ("ClientEvent", "GPUContextManager", "GPUWorkerPoolClient", "gpu_worker_pool_client"),
    ".client.blocking": ("GPUWorkerPool",),
    ".client.process_lease": ("gpu", "lease_for_process", "release_for_process"),
    ".executor.errors": ("ExecutorBrokenError", "RemoteTaskError", "WorkerLostError"),
    ".executor.executor": ("GPUExecutor",),
    ".errors": tuple(name for name in __all__ if name.endswith("Error")),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = next((path for path, names in _MODULES.items() if name in names), ".models")
    return getattr(importlib.import_module(path, __name__), name)


def load_ipython_extension(shell: Any) -> None:
    """Load the magic `%gpu`, for `%load_ext gpu_worker_pool`."""
    from .adapters.jupyter import load  # noqa: PLC0415 - only in a notebook

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Release the notebook's GPUs, for `%unload_ext gpu_worker_pool`."""
    from .adapters.jupyter import unload  # noqa: PLC0415 - only in a notebook

    unload(shell)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
