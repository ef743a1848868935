"""A server with more simulated GPUs than a box may have, to see what grows with them.

A fleet has as many, but on one machine it also has the processes of its boxes and their messages. A server alone shows better
what a lease costs.
"""

from __future__ import annotations

import os
import runpy
import sys

from gpu_worker_pool.gpus import simulated

# The command of a ServerProcess. It must not be told the GPUs by the usual variable: it would refuse so many.
LARGE = (sys.executable, "-m", "benchmarks.shared.large_server")
SPEC = "BENCHMARK_GPUS"
MOST_GPUS = 1_000_000

if __name__ == "__main__":
    simulated.MAX_GPUS = MOST_GPUS
    os.environ["SIMULATED_GPUS"] = os.environ[SPEC]
    runpy.run_module("gpu_worker_pool.testing", run_name="__main__", alter_sys=True)
