"""Dask's workers on leased GPUs, in a real cluster of processes; where distributed is installed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.client.blocking.programs import active
from tests.server.leasing import eventually

from .work import visible

distributed: Any = pytest.importorskip("distributed", reason="distributed is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_worker_has_a_gpu_of_its_own_until_it_ends(server: ServerProcess) -> None:
    plugin = importlib.import_module("gpu_worker_pool.adapters.dask")
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, processes=True)
    with cluster, distributed.Client(cluster) as client:
        client.register_plugin(plugin.LeasedWorker(timeout=60.0))
        found = client.gather(client.map(visible, range(8)))
        gpus = {pid: gpu for _, pid, gpu in found}
        assert None not in gpus.values()
        assert len(set(gpus.values())) == len(gpus)
        eventually(lambda: len(active(server)) == 2, "both have one")
    eventually(lambda: active(server) == set(), "the leases have ended with the workers")
