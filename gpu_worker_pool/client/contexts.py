"""A client, or a GPU, for the length of an `async with` block."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Unpack

from gpu_worker_pool.errors import StaleAssignmentError
from gpu_worker_pool.models import Assignment

from .options import ClientOptions, RequestWishes
from .pool_client import GPUWorkerPoolClient

logger = logging.getLogger("gpu_worker_pool.client")


@asynccontextmanager
async def gpu_worker_pool_client(**options: Unpack[ClientOptions]) -> AsyncIterator[GPUWorkerPoolClient]:
    """A client that is started, and stopped at the end."""
    async with GPUWorkerPoolClient(**options) as client:
        yield client


class GPUContextManager:
    """Requests a GPU on entering and releases it on leaving; yields the GPU's id. Raises StaleAssignmentError at the
    end if it was lost. `assignment` is what was assigned, within the block.
    """

    def __init__(
        self, client: GPUWorkerPoolClient, timeout: float | None = None, **wishes: Unpack[RequestWishes]
    ) -> None:
        self._client = client
        self._timeout = timeout
        self._wishes = wishes
        self.assignment: Assignment | None = None

    async def __aenter__(self) -> int | str:
        if self.assignment is not None:
            raise RuntimeError("this context is entered already; make another one for another GPU")
        self.assignment = await self._client.request_gpu(self._timeout, **self._wishes)
        return self.assignment.gpu_id

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assignment, self.assignment = self.assignment, None
        if assignment is None:
            return
        try:
            await self._client.release_gpu(assignment)
        except StaleAssignmentError:
            if error is None:
                raise
        except (RuntimeError, ValueError):
            # The client was stopped, which released everything, or the GPU was released by hand: nothing is left to do.
            logger.debug("GPU %s was given back before", assignment.gpu_id)
