"""The client lives in other people's programs: importing it and making one brings in little."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.server.running import ROOT

HEAVY = [
    "websockets",
    "fastapi",
    "pydantic",
    "pynvml",
    "sqlite3",
    "starlette",
    "uvicorn",
    "yaml",
    "multiprocessing",
]


def loaded_after(program: str) -> set[str]:
    """The modules in a fresh process once it has run this."""
    text = f"{program}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "program",
    [
        "import gpu_worker_pool; gpu_worker_pool.__version__",
        "import gpu_worker_pool.client",
        "from gpu_worker_pool.client import GPUWorkerPoolClient; GPUWorkerPoolClient()",
        "from gpu_worker_pool import GPUWorkerPool, gpu; GPUWorkerPool()",
    ],
)
def test_nothing_heavy_is_loaded_before_the_start(program: str) -> None:
    assert loaded_after(program).isdisjoint(HEAVY)


def test_a_client_that_is_not_started_loads_little_of_the_package() -> None:
    loaded = loaded_after("from gpu_worker_pool import GPUWorkerPoolClient; GPUWorkerPoolClient()")
    later = {"asyncio", "gpu_worker_pool.core.model.settings", "ipaddress"}
    assert loaded & later == set()


def test_the_start_loads_nothing_of_the_server_either() -> None:
    program = """
import asyncio
from gpu_worker_pool import GPUWorkerPoolClient

async def main():
    async with GPUWorkerPoolClient("http://127.0.0.1:1"):
        pass

asyncio.run(main())
"""
    assert loaded_after(program) & {*HEAVY, "urllib.request"} == set()
