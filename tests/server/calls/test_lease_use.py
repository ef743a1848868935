"""What a lease used is shown once it has ended, by a real server that reads a real (fake) nvidia-smi."""

from __future__ import annotations

from pathlib import Path

from gpu_worker_pool.testing import ServerProcess
from tests.gpus.fake_nvidia_smi import install
from tests.server.leasing import OFTEN, eventually, get, take


def until_read(server: ServerProcess, used_mb: float) -> None:
    eventually(lambda: server.json("/pool")["gpus"][0]["memory_used_mb"] == used_mb, "it was read")


def test_the_most_memory_and_the_mean_utilization_are_kept_through_a_restart(tmp_path: Path) -> None:
    smi = install(tmp_path)
    line = "0, GPU-aaaa, NVIDIA A100, 81920, {}, {}, 41, 61.50, 400.00\n"
    smi.say(line.format(10, 0))
    env = {**OFTEN, **smi.environment(), "SIMULATED_GPUS": "", "LD_LIBRARY_PATH": ""}
    env["GPU_POOL_STATE_DIR"] = str(tmp_path / "state")
    with ServerProcess(env) as server:
        lease = take(server, ttl_s=600)["id"]
        # The first of these readings may have begun before the grant, and is not the lease's then.
        for used_mb in (20_000, 30_000):
            smi.say(line.format(used_mb, 80))
            until_read(server, used_mb)
        assert server.ask(f"/leases/{lease}", "DELETE").status == 200
        before = get(server, lease)
        total = server.json("/usage")["total"]
        (span,) = server.json("/timeline")["gpus"][0]["spans"]
    with ServerProcess(env) as server:
        after = get(server, lease)

    assert before["peak_memory_mb"] == after["peak_memory_mb"] == span["peak_memory_mb"] == 30_000
    assert 0 < total["busy_gpu_hours"] < total["measured_gpu_hours"] == total["gpu_hours"]
    assert 0 < before["mean_utilization_percent"] <= 80
    assert after["mean_utilization_percent"] == span["mean_utilization_percent"] == before["mean_utilization_percent"]
