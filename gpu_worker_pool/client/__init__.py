"""The client: ask for a GPU, use it, release it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .events import ClientEvent
    from .pool_client import GPUContextManager, GPUWorkerPoolClient, gpu_worker_pool_client

__all__ = ["ClientEvent", "GPUContextManager", "GPUWorkerPoolClient", "gpu_worker_pool_client"]
# Loaded on first use: a command that only calls a server needs none of them.


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".events" if name == "ClientEvent" else ".pool_client", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
