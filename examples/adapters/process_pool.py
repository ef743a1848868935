"""multiprocessing.Pool, each of whose processes leases a GPU at its start."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial

from gpu_worker_pool import lease_for_process


def train(number: int) -> tuple[int, str]:
    """Stand for your training."""
    return number, os.environ["CUDA_VISIBLE_DEVICES"]


if __name__ == "__main__":
    # Spawned, because a process that uses CUDA must not be forked.
    with multiprocessing.get_context("spawn").Pool(2, initializer=partial(lease_for_process, timeout=600)) as pool:
        for number, gpu in pool.map(train, range(4)):
            print(f"task {number} on GPU {gpu}")
