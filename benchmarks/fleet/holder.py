"""A program that holds GPUs of the fleet by the Python client, which renews the leases, and tells in the end how many it has lost."""

from __future__ import annotations

import os
import sys

from benchmarks.shared.children import arguments, say

LABELS = {"name": "holds while the leader is killed"}
WAIT_S = 60.0


def main() -> None:
    urls, among, number, ttl_s = arguments()
    os.environ["GPU_POOL_TTL"] = f"{ttl_s:g}"
    from gpu_worker_pool import GPUWorkerPool  # noqa: PLC0415 - it reads its settings from the environment

    pool = GPUWorkerPool(service_endpoints=urls, scope="fleet")
    pool.start()
    held = [pool.request_gpu(timeout=WAIT_S, among=among, labels=LABELS) for _ in range(number)]
    say(len(held))
    sys.stdin.read()
    say(sum(assignment.is_lost for assignment in held))
    # Without any cleanup: the fleet ends too.
    os._exit(0)


if __name__ == "__main__":
    main()
