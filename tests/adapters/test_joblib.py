"""joblib's Parallel on leased GPUs, where joblib is installed."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.client.blocking.programs import active

from .work import fail, fail_once_begun, never_end, visible

joblib: Any = pytest.importorskip("joblib", reason="joblib is not installed")


@pytest.fixture(autouse=True)
def _backend() -> None:
    importlib.import_module("gpu_worker_pool.adapters.joblib")


@pytest.mark.parametrize("n_jobs", [1, 2, -1])
def test_every_worker_has_a_gpu_of_its_own(server: ServerProcess, n_jobs: int) -> None:
    with joblib.parallel_config("gpu", n_jobs=n_jobs):
        found = joblib.Parallel()(joblib.delayed(visible)(number) for number in range(8))

    assert [number for number, _, _ in found] == list(range(8))
    gpus = {pid: gpu for _, pid, gpu in found}
    assert os.getpid() not in gpus
    assert None not in gpus.values()
    assert len(gpus) <= (n_jobs if n_jobs > 0 else 4)
    assert len(set(gpus.values())) == len(gpus)
    assert active(server) == set()


def test_an_exception_ends_the_calls_that_run(server: ServerProcess, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with joblib.parallel_config("gpu", n_jobs=2), pytest.raises(LookupError, match="the other one runs"):
        joblib.Parallel()(joblib.delayed(function)(begun) for function in (never_end, fail_once_begun))
    assert active(server) == set()


def test_a_parallel_that_is_kept_goes_on_after_an_exception(server: ServerProcess) -> None:
    with joblib.parallel_config("gpu", n_jobs=1), joblib.Parallel() as parallel:
        with pytest.raises(LookupError, match="number"):
            parallel(joblib.delayed(fail)(number) for number in range(3))
        ((_, pid, gpu),) = parallel(joblib.delayed(visible)(number) for number in range(1))
    assert pid != os.getpid()
    assert gpu is not None
    assert active(server) == set()
