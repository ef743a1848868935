"""Dask: each worker process of a cluster leases GPUs when it starts, and releases them when it ends.

from gpu_worker_pool.adapters.dask import LeasedWorker
client.register_plugin(LeasedWorker(memory="8GB"))
"""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import WorkerPlugin

from gpu_worker_pool.client.process_lease import lease_for_process, release_for_process


class LeasedWorker(WorkerPlugin):
    """A plugin of Dask's workers. `asked` is that of `lease_for_process`. A worker takes no task before it has its GPUs.

    Workers must be processes of their own (`processes=True`, or `dask worker`): a process has one environment.
    """

    name = "gpu-worker-pool"

    def __init__(self, timeout: float | None = None, **asked: Any) -> None:
        self._timeout, self._asked = timeout, asked

    async def setup(self, worker: Any) -> None:
        """Wait for the GPUs; the worker answers its scheduler meanwhile."""
        if worker.nanny is None:
            raise RuntimeError(
                "this Dask worker has no process of its own, and a process has one environment; start the cluster with "
                "processes=True, or workers by `dask worker`"
            )
        await asyncio.to_thread(lease_for_process, self._timeout, **self._asked)

    async def teardown(self, worker: Any) -> None:
        """Release them."""
        del worker
        await asyncio.to_thread(release_for_process)
