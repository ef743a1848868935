"""A stub of the driver's library, and probes that are started on it. The test decides what it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpus.nvml.looks import Start, three_idle_gpus
from tests.gpus.nvml_driver import NvmlProbeInChild
from tests.gpus.stub_nvml import StubConfig, build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build(tmp_path_factory.mktemp("nvml"))
    if built is None:
        pytest.skip("there is no C compiler to make the stub of NVML with")
    return built


@pytest.fixture
def config(tmp_path: Path) -> StubConfig:
    """What a test changes in it, it writes."""
    return three_idle_gpus(tmp_path)


@pytest.fixture
def start(library: Path, config: StubConfig) -> Iterator[Start]:
    """Starts probes, and ends their processes after the test."""
    probes = []

    def start_one() -> NvmlProbeInChild:
        config.write()
        probes.append(NvmlProbeInChild("box", config.environment(library)))
        return probes[-1]

    yield start_one
    for probe in probes:
        probe.end()
