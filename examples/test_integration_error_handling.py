"""Tests of how a program gets along when things go wrong, against real servers that are really killed.

python -m pytest examples/test_integration_error_handling.py

Copy from it to test your own program: no mocks are needed, a server with simulated GPUs starts in under a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from gpu_worker_pool import GPUWorkerPool, RequestRefusedError, ServiceUnavailableError, WorkerTimeoutError

if TYPE_CHECKING:
    from gpu_worker_pool.testing import ServerProcess

# What a program does with its GPU: train, in real life.
Work = Callable[[str], None]


def train_on_any(servers: Sequence[str], work: Work, timeout_s: float) -> str:
    """The program under test: works on whichever GPU it gets, and says how it went."""
    with GPUWorkerPool(service_endpoints=list(servers), endpoint_max_retries=0) as pool:
        try:
            with pool.gpu(timeout=timeout_s) as assignment:
                work(str(assignment.gpu_id))
        except ServiceUnavailableError as error:  # first: one of its kinds is a timeout, too
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

    # The work itself fails: its error is what one sees, and the GPU is free for the next one.
    def divide(_: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_on_any(urls, divide, timeout_s=30)

    # One server dies without a word: the other one serves.
    first.kill()
    assert train_on_any(urls, used.append, timeout_s=30) == "trained"
    assert used[-1] == f"127.0.0.1-{second.port}:0"

    # All GPUs that are left are somebody else's: the reason says whose.
    with GPUWorkerPool(second.url) as somebody, somebody.gpu(timeout=30):
        said = train_on_any(urls, used.append, timeout_s=1)
    assert said.startswith("no GPU:")
    assert "leased by" in said

    # What can never be served is refused at once, however long one would wait.
    with GPUWorkerPool(second.url) as pool, pytest.raises(RequestRefusedError):
        pool.request_gpu(timeout=600, gpus=2)

    # Nobody is left.
    second.kill()
    assert train_on_any(urls, used.append, timeout_s=0.3) == "no server: 2 are down"

    # And back again.
    first.launch()
    first.wait_until_ready()
    assert train_on_any(urls, used.append, timeout_s=30) == "trained"
    assert used[-1] == f"127.0.0.1-{first.port}:0"
