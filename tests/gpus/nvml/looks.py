"""Three idle GPUs of the stub of NVML, and what a look at them does not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpu_worker_pool.core.model.gpu import Reading
from tests.gpus.nvml_driver import NvmlProbeInChild
from tests.gpus.stub_nvml import StubConfig, StubGpu

UUIDS = [StubGpu.numbered(index).uuid for index in range(10)]


def three_idle_gpus(folder: Path) -> StubConfig:
    config = StubConfig(folder / "nvml.conf", [StubGpu.numbered(index) for index in range(3)])
    config.write()
    return config


Start = Callable[[], NvmlProbeInChild]

VALUES = {
    "GetUtilizationRates": {"utilization_percent"},
    "GetTemperature": {"temperature_c"},
    "GetPowerUsage": {"power_draw_w"},
    "GetEnforcedPowerLimit": {"power_limit_w"},
    "GetMemoryInfo": {"memory_total_mb", "memory_used_mb"},
    "GetComputeRunningProcesses_v3": {"processes"},
    "GetMigMode": set(),
}


def unknown_of(reading: Reading) -> set[str]:
    """The names of what is None, and of nothing that is never told by NVML."""
    names = set().union(*VALUES.values())
    return {name for name in names if getattr(reading, name) is None}
