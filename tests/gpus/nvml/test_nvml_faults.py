"""GPUs that are lost, drivers that go away, MIG devices that come and go, and NVML that does not work at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, ProcessId
from gpu_worker_pool.gpus.nvml import RETRY_S, NvmlProbe
from gpu_worker_pool.gpus.probe import ProbeResult, ProbeUnavailable
from tests.gpus.nvml.looks import UUIDS, VALUES, Start, unknown_of
from tests.gpus.nvml_driver import NvmlProbeInChild
from tests.gpus.stub_nvml import NvmlCode, StubConfig, StubGpu

A100 = "NVIDIA A100-SXM4-80GB"


# A GPU that is lost


@pytest.mark.parametrize(
    ("code", "words"), [(NvmlCode.GPU_IS_LOST, "lost"), (NvmlCode.RESET_REQUIRED, "nvidia-smi --gpu-reset -i 1")]
)
def test_a_lost_gpu_says_so_keeps_its_name_and_comes_back(
    config: StubConfig, start: Start, code: NvmlCode, words: str
) -> None:
    config.gpus[1] = StubGpu("Tesla T4", "GPU-one")
    probe = start()
    before = probe.read(1.0)
    config.gpus[1].error = code
    config.write()
    lost, still_lost = probe.read(2.0), probe.read(3.0)
    config.gpus[1].error = None
    config.write()
    back = probe.read(4.0)

    for result in (lost, still_lost):
        assert result.error is None
        assert [reading.fault is None for reading in result.readings] == [True, False, True]
        assert result.readings[1].gpu == before.readings[1].gpu
        assert words in str(result.readings[1].fault)
        assert unknown_of(result.readings[1]) == set().union(*VALUES.values())
        assert unknown_of(result.readings[0]) == set()
    assert [reading.gpu for reading in back.readings] == [reading.gpu for reading in before.readings]
    assert [unknown_of(reading) for reading in back.readings] == [set()] * 3
    assert [reading.fault for reading in back.readings] == [None] * 3


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (NvmlCode.GPU_IS_LOST, "lost"),
        (NvmlCode.NO_PERMISSION, "/dev/nvidia1"),
        (NvmlCode.INSUFFICIENT_POWER, "power cables"),
        (NvmlCode.UNKNOWN, "Unknown Error"),
        (27, "stub error 27"),
    ],
)
def test_a_gpu_that_could_never_be_opened_is_shown_all_the_same(
    config: StubConfig, start: Start, code: int, words: str
) -> None:
    config.gpus[1].errors = {"GetHandleByIndex_v2": code}
    probe = start()
    result = probe.read(1.0)
    config.gpus[1].errors = {}
    config.write()

    assert result.error is None
    assert result.readings[1].gpu == Gpu(GpuKey("box", "unknown-1"), 1, "NVIDIA GPU")
    assert words in str(result.readings[1].fault)
    assert probe.read(2.0).readings[1].gpu.key.uuid == UUIDS[1]


def test_where_all_gpus_are_lost_nvml_is_started_anew(config: StubConfig, start: Start) -> None:
    probe = start()
    config.errors = {"GetMigMode": NvmlCode.GPU_IS_LOST}
    config.write()
    config.calls()
    lost = probe.read(1.0)
    early = probe.read(1.0 + RETRY_S - 0.01)
    before_the_pause_is_over = config.calls()
    due = probe.read(1.0 + RETRY_S)
    when_it_is_over = config.calls()
    config.errors = {}
    config.write()
    back = probe.read(2.0 + RETRY_S)

    for result in (lost, early, due):
        assert "no GPU answers" in str(result.error)
        assert [reading.gpu.key.uuid for reading in result.readings] == UUIDS[:3]
        assert all(reading.fault for reading in result.readings)
    assert "InitWithFlags" not in before_the_pause_is_over
    assert [call for call in when_it_is_over if call in ("Shutdown", "InitWithFlags")] == ["Shutdown", "InitWithFlags"]
    assert back.error is None
    assert [unknown_of(reading) for reading in back.readings] == [set()] * 3


# A driver that goes away


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (NvmlCode.UNINITIALIZED, "restarted"),
        (NvmlCode.DRIVER_NOT_LOADED, "not loaded"),
        (NvmlCode.LIB_RM_VERSION_MISMATCH, "different versions"),
    ],
)
@pytest.mark.parametrize("call", ["GetCount_v2", "GetPowerUsage", "GetMigMode"])
def test_a_driver_that_goes_away_is_an_error_and_comes_back(
    config: StubConfig, start: Start, call: str, code: NvmlCode, words: str
) -> None:
    probe = start()
    before = probe.read(1.0)
    config.errors = {call: code}
    config.write()
    gone = probe.read(2.0)
    config.errors = {}
    config.generation += 1
    config.write()
    early = probe.read(2.0 + RETRY_S - 0.01)
    back = probe.read(2.0 + RETRY_S)

    for result in (gone, early):
        assert result.readings == ()
        assert words in str(result.error)
    assert back.error is None
    assert [reading.gpu for reading in back.readings] == [reading.gpu for reading in before.readings]
    assert [unknown_of(reading) for reading in back.readings] == [set()] * 3


def test_a_lost_gpu_is_not_taken_for_one_that_moved(config: StubConfig, start: Start) -> None:
    """The first GPU was taken out, and what is now at index 1 cannot be opened: it is not the one that was there."""
    probe = start()
    config.generation += 1
    moved = [config.gpus[1], StubGpu.numbered(9)]
    moved[1].error = NvmlCode.GPU_IS_LOST
    config.gpus = moved
    config.write()
    probe.read(1.0)
    found = probe.read(1.0 + RETRY_S).readings

    assert [reading.gpu.key.uuid for reading in found] == [UUIDS[1], "unknown-1"]


# MIG


def test_mig_devices_stand_in_place_of_their_gpu(config: StubConfig, start: Start) -> None:
    gpu = config.gpus[1]
    gpu.temperature_c, gpu.compute = 52, {4_000_000: 100, 4_000_001: 200}
    gpu.mig = {0: StubGpu.mig_device(1, 0), 2: StubGpu.mig_device(1, 2, name=None)}
    gpu.mig[2].memory_used_mb, gpu.mig[2].compute, gpu.mig[2].graphics = 200, {4_000_001: 200}, None
    result = start().read(1.0)

    assert result.error is None
    assert [reading.gpu for reading in result.readings] == [
        Gpu(GpuKey("box", str(UUIDS[0])), 0, A100),
        Gpu(GpuKey("box", "MIG-00000001-0000-0000-0000-000000000000"), 200, f"{A100} MIG 1g.10gb"),
        Gpu(GpuKey("box", "MIG-00000001-0000-0000-0000-000000000002"), 202, f"{A100} MIG"),
        Gpu(GpuKey("box", str(UUIDS[2])), 2, A100),
    ]
    empty, used = result.readings[1:3]
    assert (empty.memory_total_mb, empty.memory_used_mb, empty.processes) == (9728, 0, ())
    assert (used.memory_total_mb, used.memory_used_mb) == (9728, 200)
    assert used.processes == (GpuProcess(ProcessId(4_000_001), 200.0),)
    for reading in (empty, used):
        assert unknown_of(reading) == {"utilization_percent", "power_draw_w", "power_limit_w"}
        assert reading.temperature_c == 52
        assert not reading.has_utilization, "it must be possible to grant it by memory alone"


def test_mig_devices_that_are_made_and_unmade_are_noticed(config: StubConfig, start: Start) -> None:
    config.gpus = [StubGpu.numbered(0)]
    probe = start()
    seen = [uuids(probe.read(1.0))]
    for devices in ({0: StubGpu.mig_device(0, 0)}, {0: StubGpu.mig_device(0, 5), 1: StubGpu.mig_device(0, 6)}, None):
        config.gpus[0].mig = devices
        config.write()
        seen.append(uuids(probe.read(2.0)))

    mig = {position: str(StubGpu.mig_device(0, position).uuid) for position in (0, 5, 6)}
    assert seen == [[UUIDS[0]], [mig[0]], [mig[5], mig[6]], [UUIDS[0]]]


def test_a_gpu_with_mig_on_and_no_mig_device_cannot_be_used_and_says_why(config: StubConfig, start: Start) -> None:
    for gpu in config.gpus:
        gpu.mig = {}
    result = start().read(1.0)

    assert uuids(result) == UUIDS[:3]
    assert all("MIG is on" in str(reading.fault) for reading in result.readings)
    assert result.error is None


def test_the_mig_devices_of_a_lost_gpu_keep_their_names(config: StubConfig, start: Start) -> None:
    config.gpus[1].mig = {0: StubGpu.mig_device(1, 0), 1: StubGpu.mig_device(1, 1)}
    probe = start()
    before = probe.read(1.0)
    for call in ("GetHandleByIndex_v2", "GetMigMode", "GetMemoryInfo_v2"):
        config.gpus[1].errors = {call: NvmlCode.GPU_IS_LOST}
        config.gpus[1].error = None if call == "GetMemoryInfo_v2" else NvmlCode.GPU_IS_LOST
        config.write()
        lost = probe.read(2.0)

        assert [reading.gpu for reading in lost.readings] == [reading.gpu for reading in before.readings]
        assert [reading.fault is None for reading in lost.readings] == [True, False, False, True]
    config.gpus[1].error, config.gpus[1].errors = None, {}
    config.write()
    assert [reading.fault for reading in probe.read(3.0).readings] == [None] * 4


# Beginning and end


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (NvmlCode.DRIVER_NOT_LOADED, "driver is not loaded"),
        (NvmlCode.LIB_RM_VERSION_MISMATCH, "different versions"),
        (NvmlCode.NO_PERMISSION, "may not be used by this user"),
        (NvmlCode.UNKNOWN, "NVML does not work: Unknown Error"),
    ],
)
@pytest.mark.parametrize("call", ["InitWithFlags", "GetCount_v2"])
def test_where_nvml_does_not_work_the_probe_says_why(
    config: StubConfig, start: Start, call: str, code: NvmlCode, words: str
) -> None:
    config.errors = {call: code}

    with pytest.raises(ProbeUnavailable, match=words):
        start()
    calls = config.calls()
    assert calls.count("Shutdown") == (calls.count("InitWithFlags") if call == "GetCount_v2" else 0)


def test_where_there_is_no_library_the_probe_says_so() -> None:
    program = "import ctypes; ctypes.CDLL('libnvidia-ml.so.1')"
    if subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0:
        pytest.skip("this machine has an NVIDIA driver")

    with pytest.raises(ProbeUnavailable, match=r"libnvidia-ml\.so\.1 was not found: install the NVIDIA driver"):
        NvmlProbeInChild("box", {})


def test_where_the_bindings_are_missing_the_probe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    with pytest.raises(ProbeUnavailable, match=r"pip install 'gpu-worker-pool\[server\]'"):
        NvmlProbe("box")


def uuids(result: ProbeResult) -> list[str]:
    return [reading.gpu.key.uuid for reading in result.readings]
