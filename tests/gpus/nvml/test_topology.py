"""Which GPUs are near each other, as NVML tells it. The NVML is a stub (see stub_nvml): no such machine is here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from gpu_worker_pool.gpus.probe import ProbeResult
from tests.core.build import Box
from tests.gpus.nvml.looks import UUIDS, Start
from tests.gpus.stub_nvml import NvmlCode, StubConfig, StubGpu

SINGLE, HOST_BRIDGE, NODE, SYSTEM = 10, 30, 40, 50
LINKED, NOT_LINKED = 0, 5
TOPOLOGY_CALLS = {"GetTopologyCommonAncestor", "GetP2PStatus"}


def joined(
    number: int, ancestor: Callable[[int, int], int], linked: Callable[[int, int], bool] = lambda *_: False
) -> list[StubGpu]:
    gpus = [StubGpu.numbered(index) for index in range(number)]
    for one, other in combinations(range(number), 2):
        gpus[one].ancestors[other] = ancestor(one, other)
        gpus[one].nvlinks[other] = LINKED if linked(one, other) else NOT_LINKED
    return gpus


def two_islands(one: int, other: int) -> int:
    """0, 2, 4 and 6 on one NUMA node; 1, 3, 5 and 7 on the other."""
    return NODE if one % 2 == other % 2 else SYSTEM


def positions_of(result: ProbeResult) -> list[int | None]:
    return [reading.gpu.position for reading in result.readings]


def test_four_gpus_are_on_one_island_though_their_indices_are_not_adjacent(config: StubConfig, start: Start) -> None:
    config.gpus = joined(8, two_islands)
    box = Box(*start().read(100.0).readings)

    box.ask("one", gpus=2)
    box.ask("other", gpus=4)
    box.ask("rest", gpus=2)

    granted = [[UUIDS.index(gpu.uuid) for gpu in box.gpus_of(name)] for name in ("one", "other", "rest")]
    assert granted == [[0, 2], [1, 3, 5, 7], [4, 6]]


def test_nvlink_counts_for_more_than_pcie(config: StubConfig, start: Start) -> None:
    """Two pairs with a bridge, each over both NUMA nodes."""
    config.gpus = joined(4, lambda one, other: NODE if one // 2 == other // 2 else SYSTEM, lambda a, b: b - a == 2)

    assert positions_of(start().read(1.0)) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "code", [NvmlCode.NOT_SUPPORTED, NvmlCode.FUNCTION_NOT_FOUND, NvmlCode.NO_PERMISSION, NvmlCode.UNKNOWN]
)
def test_what_one_pair_does_not_tell_is_unknown_of_all(config: StubConfig, start: Start, code: NvmlCode) -> None:
    config.gpus = joined(4, two_islands)
    config.gpus[3].errors = {"GetTopologyCommonAncestor": code}

    result = start().read(1.0)

    assert positions_of(result) == [None] * 4
    assert (result.error, [reading.fault for reading in result.readings]) == (None, [None] * 4)


def test_mig_devices_have_no_position(config: StubConfig, start: Start) -> None:
    config.gpus = joined(4, two_islands)
    config.gpus[1].mig = {0: StubGpu.mig_device(1, 0), 1: StubGpu.mig_device(1, 1)}

    assert positions_of(start().read(1.0)) == [0, None, None, 0, 1]


def test_the_topology_is_read_once_for_the_same_gpus(config: StubConfig, start: Start) -> None:
    config.gpus = joined(4, two_islands)
    probe = start()
    assert set(config.calls()) >= TOPOLOGY_CALLS
    config.gpus[3].error = NvmlCode.GPU_IS_LOST
    config.write()
    for at in (1.0, 2.0):  # the first finds it lost, the second opens the others again
        probe.read(at)
    config.calls()

    while_lost = probe.read(3.0)
    assert not TOPOLOGY_CALLS & set(config.calls())
    config.gpus[3].error = None
    config.write()
    back = probe.read(4.0)
    assert set(config.calls()) >= TOPOLOGY_CALLS
    probe.read(5.0)

    assert not TOPOLOGY_CALLS & set(config.calls())
    assert positions_of(while_lost)[:3] == positions_of(back)[:3] == [0, 1, 0]
    assert positions_of(back)[3] == 1
