"""The running server on the real probes' code: a fake nvidia-smi, and real nvidia-ml-py on a stub of the driver's library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.gpus.fake_nvidia_smi import FakeNvidiaSmi, install
from tests.gpus.stub_nvml import NvmlCode, StubConfig, StubGpu, build
from tests.server.leasing import eventually, get, queue, release, take

PATIENCE_S = 30.0
ONE_GPU = "0, GPU-aaaa, NVIDIA A100, 81920, {used}, 7, 41, 61.50, 400.00\n"


def until(is_so: Callable[[], bool]) -> None:
    eventually(is_so, "it is so", PATIENCE_S)


@pytest.fixture
def smi(tmp_path: Path) -> FakeNvidiaSmi:
    return install(tmp_path)


def without_nvml(fake: FakeNvidiaSmi) -> dict[str, str]:
    return {**fake.environment(), "SIMULATED_GPUS": "", "LD_LIBRARY_PATH": ""}


def test_values_of_nvidia_smi_are_shown_and_change_while_the_server_runs(smi: FakeNvidiaSmi) -> None:
    smi.say(ONE_GPU.format(used=1024))
    with ServerProcess(without_nvml(smi)) as server:
        (gpu,) = server.json("/gpu/stats")["gpus"]
        assert server.json("/gpu/stats")["source"] == "nvidia-smi"
        assert (gpu["name"], gpu["uuid"], gpu["memory"]["used_mb"]) == ("NVIDIA A100", "GPU-aaaa", 1024)
        assert (gpu["temperature_c"], gpu["power"]) == (41, {"draw_w": 61.5, "limit_w": 400.0})
        assert server.json("/health")["nvidia_smi_available"] is True

        smi.say(ONE_GPU.format(used=2048))

        until(lambda: server.json("/gpu/stats")["gpus"][0]["memory"]["used_mb"] == 2048)


def test_a_box_with_another_host_name_keeps_its_leases_its_queue_and_its_drains(smi: FakeNvidiaSmi) -> None:
    smi.say("".join(f"{index}, GPU-{index}, NVIDIA A100, 81920, 0, 0, 41, 61.50, 400.00\n" for index in range(3)))
    with ServerProcess({**without_nvml(smi), "GPU_POOL_NODE": "old"}) as server:
        eventually(lambda: server.json("/pool")["can_grant"], "it can grant")
        drained = server.ask("/admin/gpus/2/drain", "POST", {"reason": "bad fan"})
        assert drained.status == 200, drained.body
        held = take(server, gpus=2)
        waits = queue(server)["id"]
        for name in ("new", "newer"):  # the second time, the journal has events under several names
            server.env["GPU_POOL_NODE"] = name
            server.restart()

            pool = server.json("/pool")
            assert (pool["node"], {gpu["node"] for gpu in pool["gpus"]}, len(pool["gpus"])) == (name, {name}, 3)
            after = get(server, held["id"])
            assert (after["state"], after["fence"]) == ("active", held["fence"])
            assert after["gpus"] == [{**gpu, "node": name} for gpu in held["gpus"]]
            assert get(server, waits)["state"] == "queued"
            assert [gpu["uuid"] for gpu in pool["gpus"] if gpu["is_out_of_service"]] == ["GPU-2"]
        release(server, held["id"])
        granted = get(server, waits, wait_s=10)
        assert (granted["state"], granted["gpus"][0]["node"]) == ("active", "newer")
        assert granted["fence"] == held["fence"] + 1


def test_a_hung_nvidia_smi_makes_readings_old_and_nothing_slow(smi: FakeNvidiaSmi) -> None:
    smi.say(ONE_GPU.format(used=1024))
    with ServerProcess(without_nvml(smi)) as server:
        smi.say({"hang": True})

        until(lambda: server.json("/health")["status"] == "degraded")

        health = server.json("/health")
        assert health["reading_age_s"] > 5
        assert "nvidia-smi has not answered" in health["reason"]
        stats = server.json("/gpu/stats")
        assert stats["gpu_count"] == 1, "what was seen last stays"
        assert "s old" in stats["error"]
        assert server.json("/livez") == {"status": "alive", "source": "nvidia-smi"}
        assert server.ask("/readyz").status == 503
        until(lambda: "has not answered since" in server.log())
        smi.say(ONE_GPU.format(used=1024))  # so that nothing that hangs is left behind
        until(lambda: server.json("/health")["status"] == "healthy")


def test_a_driver_that_fails_later_does_not_make_the_gpus_vanish(smi: FakeNvidiaSmi) -> None:
    smi.say(ONE_GPU.format(used=1024))
    with ServerProcess(without_nvml(smi)) as server:
        smi.say(
            {"print": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "exit_code": 9}
        )

        until(lambda: server.json("/gpu/count")["error"] is not None)

        assert server.json("/gpu/count")["gpu_count"] == 1
        assert "communicate" in server.json("/health")["reason"]

        smi.say(ONE_GPU.format(used=512))

        until(lambda: server.json("/health")["status"] == "healthy")


@pytest.fixture
def nvml(tmp_path: Path) -> tuple[StubConfig, dict[str, str]]:
    library = build(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler to build the stub of the driver's library with")
    config = StubConfig(tmp_path / "nvml.conf", [StubGpu.numbered(0), StubGpu.numbered(1)])
    config.write()
    return config, {**config.environment(library), "SIMULATED_GPUS": ""}


def test_a_gpu_that_fell_off_the_bus_is_shown_as_unhealthy_beside_the_others(
    nvml: tuple[StubConfig, dict[str, str]],
) -> None:
    config, env = nvml
    with ServerProcess(env) as server:
        config.gpus[0].error = NvmlCode.GPU_IS_LOST
        config.write()

        until(lambda: not server.json("/gpu/stats")["gpus"][0]["healthy"])

        stats = server.json("/gpu/stats")
        assert [gpu["healthy"] for gpu in stats["gpus"]] == [False, True]
        assert stats["gpus"][0]["error"]
        assert server.json("/health")["status"] == "degraded"
        assert "GPU 0" in server.json("/health")["reason"]
