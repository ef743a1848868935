"""The client: ask for a GPU, use it, give it back."""

from .events import ClientEvent
from .pool_client import GPUContextManager, GPUWorkerPoolClient, gpu_worker_pool_client

__all__ = ["ClientEvent", "GPUContextManager", "GPUWorkerPoolClient", "gpu_worker_pool_client"]
