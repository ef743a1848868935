"""What is read from real nvidia-ml-py on a stub of the driver's library, in a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, ProcessId, Reading
from gpu_worker_pool.gpus.probe import ProbeResult
from tests.gpus.nvml.looks import VALUES, Start, three_idle_gpus, unknown_of
from tests.gpus.nvml_driver import NvmlProbeInChild
from tests.gpus.probe_contract import ProbeContract
from tests.gpus.stub_nvml import NvmlCode, StubConfig, StubGpu
from tests.processes import child_process


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with child_process() as process:
        yield process


@pytest.fixture(scope="class", params=["healthy", "with MIG", "with a lost GPU", "knows nothing"])
def probe(
    request: pytest.FixtureRequest, library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NvmlProbeInChild]:
    """One process for each; the contract's last test closes it."""
    config = three_idle_gpus(tmp_path_factory.mktemp("contract"))
    gpu = config.gpus[1]
    gpu.compute, gpu.graphics = {os.getpid(): 300, 0: 5, 4_000_000: None}, {os.getpid(): 300}
    match request.param:
        case "with MIG":
            gpu.mig = {0: StubGpu.mig_device(1, 0), 3: StubGpu.mig_device(1, 3)}
        case "with a lost GPU":
            gpu.error = NvmlCode.GPU_IS_LOST
        case "knows nothing":
            config.gpus = [StubGpu(None, "GPU-x", *[None] * 10)]  # type: ignore[arg-type]  # nine numbers, two lists
    config.write()
    probe = NvmlProbeInChild("box", config.environment(library))
    yield probe
    probe.end()


class TestContract(ProbeContract):
    """By the fixture above."""


# What is read


def test_everything_that_is_measured_is_read(config: StubConfig, start: Start) -> None:
    config.gpus = [
        StubGpu(
            name="Tesla T4",
            uuid="GPU-abc",
            memory_total_mb=15360,
            memory_reserved_mb=450,
            memory_used_mb=1024.5,
            utilization_percent=37,
            temperature_c=61,
            power_draw_w=52.345,
            power_limit_w=70,
            compute={4_000_000: 1000},
        )
    ]
    probe = start()

    assert probe.source == "nvml"
    assert probe.read(12.5) == ProbeResult(
        (
            Reading(
                gpu=Gpu(GpuKey("box", "GPU-abc"), 0, "Tesla T4"),
                at=12.5,
                memory_total_mb=15360,
                memory_used_mb=1024.5,
                utilization_percent=37,
                temperature_c=61,
                power_draw_w=52.345,
                power_limit_w=70,
                processes=(GpuProcess(ProcessId(4_000_000), 1000.0),),
            ),
        )
    )


# What is unknown


@pytest.mark.parametrize("code", [NvmlCode.NO_PERMISSION, NvmlCode.NOT_SUPPORTED, NvmlCode.UNKNOWN, NvmlCode.TIMEOUT])
@pytest.mark.parametrize("call", VALUES)
def test_a_value_that_cannot_be_read_is_unknown_alone(
    config: StubConfig, start: Start, call: str, code: NvmlCode
) -> None:
    newer = {
        "GetMemoryInfo": ["GetMemoryInfo_v2"],
        "GetTemperature": ["GetTemperatureV"],
        "GetComputeRunningProcesses_v3": ["GetComputeRunningProcesses_v2"],
    }
    config.gpus[1].errors = dict.fromkeys([call, *newer.get(call, [])], code)
    result = start().read(1.0)

    assert result.error is None
    assert [reading.fault for reading in result.readings] == [None] * 3
    assert [unknown_of(reading) for reading in result.readings] == [set(), VALUES[call], set()]


@pytest.mark.parametrize(
    ("code", "processes"),
    [(NvmlCode.NOT_SUPPORTED, [4_000_000]), (NvmlCode.NO_PERMISSION, None), (NvmlCode.UNKNOWN, None)],
)
def test_a_gpu_that_cannot_draw_has_its_computing_processes_but_who_may_be_missing_is_unknown(
    config: StubConfig, start: Start, code: NvmlCode, processes: list[int] | None
) -> None:
    config.gpus[0].compute = {4_000_000: 10}
    config.gpus[0].errors = {"GetGraphicsRunningProcesses_v3": code, "GetGraphicsRunningProcesses_v2": code}
    reading = start().read(1.0).readings[0]

    assert (reading.processes and [process.id.pid for process in reading.processes]) == processes


def test_a_value_that_cannot_be_true_is_unknown(config: StubConfig, start: Start) -> None:
    config.gpus[0].utilization_percent = 4_000_000_000
    config.gpus[1].memory_used_mb = config.gpus[1].memory_total_mb = 0
    config.gpus[2].memory_used_mb = 1e6
    readings = start().read(1.0).readings

    assert unknown_of(readings[0]) == {"utilization_percent"}
    assert unknown_of(readings[1]) == {"memory_total_mb", "memory_used_mb"}
    assert unknown_of(readings[2]) == {"memory_used_mb"}


@pytest.mark.parametrize(
    "code", [NvmlCode.FUNCTION_NOT_FOUND, NvmlCode.NOT_SUPPORTED, NvmlCode.ARGUMENT_VERSION_MISMATCH]
)
def test_older_drivers_are_asked_in_the_older_way(config: StubConfig, start: Start, code: NvmlCode) -> None:
    newer = ["GetMemoryInfo_v2", "GetTemperatureV", "GetComputeRunningProcesses_v3", "GetGraphicsRunningProcesses_v3"]
    config.errors = dict.fromkeys(newer, code)
    gpu = config.gpus[0]
    gpu.memory_reserved_mb, gpu.memory_used_mb, gpu.temperature_c = 600, 100, 44
    gpu.compute, gpu.graphics = {4_000_000: 1}, {4_000_001: 2}
    reading = start().read(1.0).readings[0]

    assert reading.memory_used_mb == 700  # the older way counts what is reserved
    assert reading.temperature_c == 44
    assert [process.id.pid for process in reading.processes or ()] == [4_000_000, 4_000_001]


# Processes


@pytest.mark.parametrize(
    ("compute", "graphics", "merged"),
    [
        ({7: 100}, {7: 100}, 100),
        ({7: 100}, {7: 30}, 100),
        ({7: 30}, {7: 100}, 100),
        ({7: None}, {7: 100}, 100),
        ({7: 100}, {7: None}, 100),
        ({7: None}, {7: None}, None),
        ({7: None}, {}, None),
        ({}, {7: 0}, 0),
    ],
)
def test_a_process_that_computes_and_draws_is_one(
    config: StubConfig,
    start: Start,
    compute: dict[int, float | None],
    graphics: dict[int, float | None],
    merged: float | None,
) -> None:
    pids = {7: 4_000_007}
    config.gpus[0].compute = {pids[pid]: mb for pid, mb in compute.items()}
    config.gpus[0].graphics = {pids[pid]: mb for pid, mb in graphics.items()}

    assert start().read(1.0).readings[0].processes == (GpuProcess(ProcessId(4_000_007), merged),)
