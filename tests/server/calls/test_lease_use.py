"""What a lease used is shown once it has ended, by a real server that reads a real (fake) nvidia-smi."""

from __future__ import annotations

from pathlib import Path

from gpu_worker_pool.testing import ServerProcess
from tests.gpus.fake_nvidia_smi import install
from tests.server.leasing import OFTEN, eventually, get, take


def test_the_most_memory_and_the_mean_utilization_are_kept_through_a_restart(tmp_path: Path) -> None:
    smi = install(tmp_path)
    line = "0, GPU-aaaa, NVIDIA A100, 81920, {}, {}, 41, 61.50, 400.00\n"
    smi.say(line.format(10, 0))
    env = {**OFTEN, **smi.environment(), "SIMULATED_GPUS": "", "LD_LIBRARY_PATH": ""}
    env["GPU_POOL_STATE_DIR"] = str(tmp_path / "state")
    with ServerProcess(env) as server:
        lease = take(server, ttl_s=600)["id"]
        smi.say(line.format(30_000, 80))
        eventually(lambda: server.json("/gpu/stats")["gpus"][0]["memory"]["used_mb"] == 30_000, "it was read")
        assert server.ask(f"/leases/{lease}", "DELETE").status == 200
        before = get(server, lease)
        (span,) = server.json("/timeline")["gpus"][0]["spans"]
    with ServerProcess(env) as server:
        after = get(server, lease)

    assert before["peak_memory_mb"] == after["peak_memory_mb"] == span["peak_memory_mb"] == 30_000
    assert 0 < before["mean_utilization_percent"] <= 80
    assert after["mean_utilization_percent"] == span["mean_utilization_percent"] == before["mean_utilization_percent"]
