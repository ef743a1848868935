"""Dask's workers on leased GPUs, in a real cluster of processes; where distributed is installed."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest

from gpu_worker_pool import WorkerTimeoutError
from gpu_worker_pool.testing import ServerProcess
from tests.client.blocking.programs import active
from tests.server.leasing import eventually, take

from .work import visible

IS_INSTALLED = find_spec("distributed") is not None
pytestmark = [
    pytest.mark.skipif(not IS_INSTALLED, reason="distributed is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


def distributed() -> Any:
    """Loaded by the worker that runs these tests, and not by all that collect them: it takes half a second."""
    return importlib.import_module("distributed")


@pytest.fixture
def plugin() -> Any:
    return importlib.import_module("gpu_worker_pool.adapters.dask").LeasedWorker


def local_cluster(*, processes: bool = True) -> Any:
    shape = {"n_workers": 2, "threads_per_worker": 1, "processes": processes}
    return distributed().LocalCluster(**shape, protocol="tcp", host="127.0.0.1", dashboard_address=None)


def test_every_worker_has_a_gpu_of_its_own_until_it_ends(server: ServerProcess, plugin: Any) -> None:
    with local_cluster() as cluster, distributed().Client(cluster) as client:
        client.register_plugin(plugin(timeout=60.0))
        found = client.gather(client.map(visible, range(8)))
        gpus = {pid: gpu for _, pid, gpu in found}
        assert None not in gpus.values()
        assert len(set(gpus.values())) == len(gpus)
        leases = active(server)
        assert len(leases) == 2

        client.register_plugin(plugin(timeout=60.0))
        with pytest.raises(ValueError, match=r"this process has a lease for .* already.*client\.restart\(\)"):
            client.register_plugin(plugin(timeout=60.0, gpus=2))
        assert active(server) == leases
        again = {pid: gpu for _, pid, gpu in client.gather(client.map(visible, range(8, 16)))}
        assert (gpus | again) == (again | gpus)
        assert len(client.run(visible, 0)) == 2
    eventually(lambda: active(server) == set(), "the leases have ended with the workers")


def test_a_worker_without_a_lease_runs_no_task(server: ServerProcess, plugin: Any) -> None:
    taken = {take(server)["id"] for _ in range(3)}
    with local_cluster() as cluster, distributed().Client(cluster) as client:
        with pytest.raises(WorkerTimeoutError):
            client.register_plugin(plugin(timeout=0.5))
        eventually(lambda: len(cluster.scheduler.workers) == 1, "the worker without a lease has closed")
        cluster.scale(3)
        eventually(lambda: server.json("/pool")["queue"], "a new worker waits")
        eventually(lambda: not server.json("/pool")["queue"], "it has waited for too long")
        found = client.gather(client.map(visible, range(40)))
        eventually(lambda: len(cluster.scheduler.workers) == 1, "the worker without a lease has closed")
        assert len({pid for _, pid, _ in found}) == 1
        assert None not in {gpu for _, _, gpu in found}
        assert len(active(server) - taken) == 1


def test_workers_that_share_a_process_run_no_task(server: ServerProcess, plugin: Any) -> None:
    with local_cluster(processes=False) as cluster, distributed().Client(cluster) as client:
        with pytest.raises(RuntimeError, match="has no process of its own"):
            client.register_plugin(plugin(timeout=60.0))
        eventually(lambda: not cluster.scheduler.workers, "they have closed")
    assert active(server) == set()
