"""Dask: each worker process of a cluster leases GPUs when it starts, and releases them when it ends.

from gpu_worker_pool.adapters.dask import LeasedWorker
client.register_plugin(LeasedWorker(memory="8GB"))
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any, Final

from distributed import Status, WorkerPlugin

from gpu_worker_pool.client.inherited_lease import VISIBLE_DEVICES_VARIABLE
from gpu_worker_pool.client.process_lease import has_lease_for_process, lease_for_process, release_for_process

logger = logging.getLogger("gpu_worker_pool.dask")

_ENDS: Final = frozenset({Status.closing, Status.closed, Status.failed})
# A plugin that is registered again while the first one still waits must not request a second lease.
_one_at_a_time = asyncio.Lock()


class LeasedWorker(WorkerPlugin):
    """A plugin of Dask's workers. `asked` is that of `lease_for_process`. A worker takes no task before it has its GPUs; it
    closes if it cannot have them. Registered again, it keeps the leases of running workers.

    Workers must be processes of their own (`processes=True`, or `dask worker`): a process has one environment.
    """

    name = "gpu-worker-pool"

    def __init__(self, timeout: float | None = None, **asked: Any) -> None:
        self._timeout, self._asked = timeout, asked

    async def setup(self, worker: Any) -> None:
        """Wait for the GPUs; the worker answers its scheduler meanwhile."""
        try:
            await self._lease(worker)
        except Exception as error:
            # Dask keeps a worker whose plugin fails, and its tasks would see all GPUs.
            if not has_lease_for_process():
                _close(worker, error)
            raise

    async def teardown(self, worker: Any) -> None:
        """Release them if the worker ends. Dask calls this also before a plugin of the same name is set up; CUDA in a running
        worker cannot leave its GPUs.
        """
        if worker.status in _ENDS:
            await asyncio.to_thread(release_for_process)

    async def _lease(self, worker: Any) -> None:
        if worker.nanny is None:
            raise RuntimeError(
                "this Dask worker has no process of its own, and a process has one environment; start the cluster with "
                "processes=True, or workers by `dask worker`"
            )
        async with _one_at_a_time:
            try:
                await asyncio.to_thread(lease_for_process, self._timeout, **self._asked)
            except ValueError as error:
                if not has_lease_for_process():
                    raise
                raise ValueError(f"{error}: client.restart() ends the workers and their leases") from None


def _close(worker: Any, error: Exception) -> None:
    """Run no task here any more, and close the worker; its nanny starts no other."""
    reason = f"it has no lease of a GPU: {error}"
    logger.error("the Dask worker %s closes: %s", worker.name, reason)
    if worker.nanny is not None:
        os.environ[VISIBLE_DEVICES_VARIABLE] = "-1"
    # In this status it begins no task, and the scheduler sends it none.
    worker.status = Status.closing_gracefully
    # Not awaited: a nanny answers its worker only when that has started, and the scheduler waits for the error.
    worker.loop.add_callback(worker.close, reason=reason)
