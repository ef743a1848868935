"""The types of the public API, as mypy sees them in a user's program."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

from tests.server.running import ROOT

RIGHT = """
from gpu_worker_pool import GPUExecutor, GPUWorkerPool, GPUWorkerPoolClient, LeaseInfo, gpu, lease_for_process

async def work(client: GPUWorkerPoolClient) -> list[LeaseInfo]:
    assignment = await client.request_gpu(30, gpus=2, memory="8GB", among=[0, "GPU-1"], labels={"a": "b"}, new=True)
    lease_id: str | None = assignment.lease_id
    fence: int | None = assignment.fence
    env: dict[str, str] = dict(assignment.env)
    print(lease_id, fence, env, assignment.uuids, assignment.ends_at, assignment.is_lost)
    await client.release_gpu(assignment)
    found: LeaseInfo | None = await client.lease("x")
    return [*await client.leases(mine=True), *([found] if found else [])]

with GPUWorkerPool("http://localhost:8000", worker_timeout=5.0, token="secret") as pool:
    with pool.gpu(10, model="A100", time_limit="2h", preemptible=True) as held:
        where: int | str = held.gpu_id
    infos: list[LeaseInfo] = pool.leases()

with gpu(10, memory_mb=8000, service_endpoint="http://localhost:8000") as leased:
    print(leased.gpu_ids)

@gpu(gpus=2)
def train(epochs: int) -> float:
    return 1.0 * epochs

loss: float = train(3)
kept = lease_for_process(gpus=1, priority=3, on_lost=lambda lost: print(lost.lease_id), scope="box")
executor = GPUExecutor(2, memory="8GB", service_endpoints=["http://localhost:8000"])
"""

WRONG = {
    'pool.request_gpu(gpus="two")': 'incompatible type "str"',
    "pool.request_gpu(gpu=2)": 'Unexpected keyword argument "gpu"',
    'gpu(memory=["8GB"])': "No overload variant",
    "gpu(colour=3)": 'Unexpected keyword argument "colour"',
    "lease_for_process(labels=3)": 'incompatible type "int"',
    'GPUWorkerPool(worker_timeout="5")': 'incompatible type "str"',
    "GPUExecutor(timeout=5)": 'Unexpected keyword argument "timeout"',
    "pool.request_gpu().leaseid": 'has no attribute "leaseid"',
}


def check(program: Path, text: str) -> list[str]:
    program.write_text(text, encoding="utf-8")
    cache = ROOT / ".mypy_cache" / "of-programs"
    told, problem, _ = api.run(
        ["--strict", "--config-file=", f"--cache-dir={cache}", "--no-error-summary", str(program)]
    )
    assert problem == ""
    return [line for line in told.splitlines() if ": error:" in line]


def test_a_program_that_is_right_is_right_for_mypy_and_each_mistake_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    assert check(tmp_path / "right.py", RIGHT) == []
    lines = ["from gpu_worker_pool import GPUExecutor, GPUWorkerPool, gpu, lease_for_process", "pool = GPUWorkerPool()"]
    told = check(tmp_path / "wrong.py", "\n".join([*lines, *WRONG]))
    for number, (mistake, words) in enumerate(WRONG.items(), start=len(lines) + 1):
        assert any(f"wrong.py:{number}: " in line and words in line for line in told), (mistake, told)
    assert len(told) >= len(WRONG)
