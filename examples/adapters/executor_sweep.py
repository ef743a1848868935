"""A sweep with GPUExecutor: each training in a process that has a GPU of its own."""

from __future__ import annotations

import os

from gpu_worker_pool import GPUExecutor


def train(rate: float) -> tuple[float, str]:
    """Stand for your training."""
    return (rate - 0.3) ** 2, os.environ["CUDA_VISIBLE_DEVICES"]


if __name__ == "__main__":
    with GPUExecutor(max_workers=2, retries=1) as ex:
        rates = [0.1, 0.2, 0.3, 0.4]
        for rate, (loss, gpu) in zip(rates, ex.map(train, rates), strict=True):
            print(f"rate {rate} on GPU {gpu}: loss {loss:.3f}")
