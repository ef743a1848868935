"""Tests of a program when things go wrong, with real servers that are really killed.

python -m pytest examples/test_integration_error_handling.py

Copy from it to test your own program. You need no mocks: a server with simulated GPUs starts in under a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from gpu_worker_pool import GPUWorkerPool, RequestRefusedError, ServiceUnavailableError, WorkerTimeoutError

if TYPE_CHECKING:
    from gpu_worker_pool.testing import ServerProcess

# The work of a program on its GPU; in real life, training.
Work = Callable[[str], None]


def train_on_any(servers: Sequence[str], work: Work, timeout_s: float) -> str:
    """The program under test: it works on any GPU that it gets, and says how it went."""
    with GPUWorkerPool(service_endpoints=list(servers), endpoint_max_retries=0) as pool:
        try:
            with pool.gpu(timeout=timeout_s) as assignment:
                work(str(assignment.gpu_id))
        except ServiceUnavailableError as error:  # before the next: one of its subclasses is a timeout too
            return f"no server: {len(error.reasons)} are down"
        except WorkerTimeoutError as error:
            return f"no GPU: {error.reason}"
        return "trained"


def test_it_goes_through_good_and_bad_times(servers: list[ServerProcess]) -> None:
    first, second = servers
    urls = [first.url, second.url]
    used: list[str] = []

    # All is well.
    assert train_on_any(urls, used.append, timeout_s=30) == "trained"

    # The work itself fails: the caller sees its error, and the GPU is free again.
    def divide(_: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_on_any(urls, divide, timeout_s=30)

    # One server dies: the other one serves.
    first.kill()
    assert train_on_any(urls, used.append, timeout_s=30) == "trained"
    assert used[-1] == f"127.0.0.1-{second.port}:0"

    # Another client holds the last GPU: the reason says which.
    with GPUWorkerPool(second.url) as other, other.gpu(timeout=30):
        said = train_on_any(urls, used.append, timeout_s=1)
    assert said.startswith("no GPU:")
    assert "leased by" in said

    # A request that can never be served is refused at once, whatever its timeout.
    with GPUWorkerPool(second.url) as pool, pytest.raises(RequestRefusedError):
        pool.request_gpu(timeout=600, gpus=2)

    # No server is left.
    second.kill()
    assert train_on_any(urls, used.append, timeout_s=0.3) == "no server: 2 are down"

    # One is back.
    first.launch()
    first.wait_until_ready()
    assert train_on_any(urls, used.append, timeout_s=30) == "trained"
    assert used[-1] == f"127.0.0.1-{first.port}:0"
