"""`GPUExecutor`: concurrent.futures on leased GPUs."""

from .errors import ExecutorBrokenError, RemoteTaskError, WorkerLostError
from .executor import GPUExecutor

__all__ = ["ExecutorBrokenError", "GPUExecutor", "RemoteTaskError", "WorkerLostError"]
