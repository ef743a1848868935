"""The client: ask for a GPU, use it, release it."""

from .contexts import GPUContextManager, gpu_worker_pool_client
from .events import ClientEvent
from .pool_client import GPUWorkerPoolClient

__all__ = ["ClientEvent", "GPUContextManager", "GPUWorkerPoolClient", "gpu_worker_pool_client"]
