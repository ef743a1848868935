"""joblib: a backend whose workers have GPUs of their own.

from joblib import Parallel, delayed, parallel_config
import gpu_worker_pool.adapters.joblib
with parallel_config("gpu", n_jobs=4, memory="8GB"):
    Parallel()(delayed(train)(config) for config in configs)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from joblib import register_parallel_backend
from joblib.parallel import ParallelBackendBase

from gpu_worker_pool.executor.executor import GPUExecutor


class LeasedBackend(ParallelBackendBase):  # type: ignore[misc] # joblib has no types
    """Runs the calls of `Parallel` in a GPUExecutor with `n_jobs` workers; -1: as many as there are GPUs for.

    The other options are those of GPUExecutor.
    """

    supports_retrieve_callback = True
    default_n_jobs = -1

    def __init__(
        self, nesting_level: int | None = None, inner_max_num_threads: int | None = None, **options: Any
    ) -> None:
        super().__init__(nesting_level, inner_max_num_threads)
        self._options = options
        self._executor: GPUExecutor | None = None
        self._futures: set[Future[Any]] = set()

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """How many calls joblib hands over at once. It is never 1: joblib would call the functions in this process, which has
        no lease. The executor has `n_jobs` workers all the same.
        """
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        return max(n_jobs or 1, 2)

    def configure(self, n_jobs: int | None = 1, parallel: Any = None, **_: Any) -> int:
        """Make the executor for one call of Parallel."""
        self.parallel = parallel
        n_effective = self.effective_n_jobs(n_jobs)
        self._executor = GPUExecutor(n_jobs if n_jobs is not None and n_jobs > 0 else None, **self._options)
        return n_effective

    def submit(self, func: Callable[[], Any], callback: Callable[[Future[Any]], None] | None = None) -> Future[Any]:
        """Run it on GPUs."""
        assert self._executor is not None  # noqa: S101 - joblib configures first
        future = self._executor.submit(func)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    # Before joblib 1.5.
    apply_async = submit

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """The result, or the exception."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:  # noqa: FBT001, FBT002 - joblib's signature
        """Cancel what waits and end what runs; one of the calls has failed, or Ctrl-C has been pressed."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.terminate_workers()
        if ensure_ready:
            self.configure(self.parallel.n_jobs, self.parallel)

    def terminate(self) -> None:
        """Release all leases."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)


register_parallel_backend("gpu", LeasedBackend)
