"""How long a fresh process takes to import the client, beside `import aiohttp` and a bare python, in turn in one run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMES = 10
BARE = "bare python"
PROGRAMS = {
    BARE: "pass",
    "import asyncio": "import asyncio",
    "import aiohttp": "import aiohttp",
    "import gpu_worker_pool": "import gpu_worker_pool",
    "import gpu_worker_pool.client": "import gpu_worker_pool.client",
    "... and make a client": "from gpu_worker_pool import GPUWorkerPoolClient; GPUWorkerPoolClient()",
    "... and GPUWorkerPool": "from gpu_worker_pool import GPUWorkerPool; GPUWorkerPool()",
}


def run(program: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    return time.perf_counter() - began


def main() -> None:
    for program in PROGRAMS.values():
        run(program)  # compiled, and in the page cache
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(TIMES):
        for name, program in PROGRAMS.items():
            times[name].append(run(program))
    medians = {name: 1000 * statistics.median(found) for name, found in times.items()}
    bare, aiohttp = medians[BARE], medians["import aiohttp"] - medians[BARE]
    print(f"{'median of ' + str(TIMES):32}{'all of it':>12}{'above bare':>13}{'of aiohttp':>12}")
    for name, median in medians.items():
        above = median - bare
        print(f"{name:32}{median:9.0f} ms{above:10.0f} ms{above / aiohttp:12.2f}")


if __name__ == "__main__":
    main()
