"""joblib's Parallel on leased GPUs, where joblib is installed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.client.blocking.programs import active

from .work import fail, visible

joblib: Any = pytest.importorskip("joblib", reason="joblib is not installed")


@pytest.fixture(autouse=True)
def _backend() -> None:
    importlib.import_module("gpu_worker_pool.adapters.joblib")


@pytest.mark.parametrize("n_jobs", [2, -1])
def test_every_worker_has_a_gpu_of_its_own(server: ServerProcess, n_jobs: int) -> None:
    with joblib.parallel_config("gpu", n_jobs=n_jobs):
        found = joblib.Parallel()(joblib.delayed(visible)(number) for number in range(8))

    assert [number for number, _, _ in found] == list(range(8))
    gpus = {pid: gpu for _, pid, gpu in found}
    assert None not in gpus.values()
    assert len(set(gpus.values())) == len(gpus)
    assert active(server) == set()


def test_an_exception_passes_and_all_leases_are_released(server: ServerProcess) -> None:
    with joblib.parallel_config("gpu", n_jobs=2, memory="8GB"), pytest.raises(LookupError, match="number"):
        joblib.Parallel()(joblib.delayed(fail)(number) for number in range(8))
    assert active(server) == set()
