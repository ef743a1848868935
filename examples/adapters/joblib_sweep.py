"""joblib's Parallel, whose workers have a GPU each."""

from __future__ import annotations

import os

from joblib import Parallel, delayed, parallel_config

import gpu_worker_pool.adapters.joblib  # noqa: F401 - it registers the backend "gpu"


def train(number: int) -> tuple[int, str]:
    """Stand for your training."""
    return number, os.environ["CUDA_VISIBLE_DEVICES"]


if __name__ == "__main__":
    with parallel_config("gpu", n_jobs=2, memory="8GB"):
        for number, gpu in Parallel()(delayed(train)(number) for number in range(4)):
            print(f"task {number} on GPU {gpu}")
