"""A function that has a GPU for the length of each call, by a decorator."""

from __future__ import annotations

import os
import subprocess
import sys

import gpu_worker_pool


@gpu_worker_pool.gpu(memory="8GB")
def evaluate(name: str) -> None:
    """Start a program, which sees the GPU of the lease and no other."""
    program = "import os, sys; print(sys.argv[1], 'on GPU', os.environ['CUDA_VISIBLE_DEVICES'])"
    subprocess.run([sys.executable, "-c", program, name], check=True)


if __name__ == "__main__":
    evaluate("the first")
    evaluate("the second")
    print("after that, CUDA_VISIBLE_DEVICES is", os.environ.get("CUDA_VISIBLE_DEVICES"))
