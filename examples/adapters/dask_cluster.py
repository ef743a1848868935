"""A Dask cluster, each of whose workers leases a GPU before it takes tasks."""

from __future__ import annotations

import os

from distributed import Client, LocalCluster

from gpu_worker_pool.adapters.dask import LeasedWorker


def train(number: int) -> tuple[int, str]:
    """Stand for your training."""
    return number, os.environ["CUDA_VISIBLE_DEVICES"]


if __name__ == "__main__":
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)  # type: ignore[no-untyped-call]
    with cluster, Client(cluster) as client:  # type: ignore[no-untyped-call]
        client.register_plugin(LeasedWorker(timeout=600))
        for number, gpu in client.gather(client.map(train, range(4))):
            print(f"task {number} on GPU {gpu}")
