"""Simulated GPUs: what they are, how they move with who is on them, and that they repeat."""

from __future__ import annotations

from uuid import UUID

import pytest

from gpu_worker_pool.core.model.gpu import ProcessId, Reading
from gpu_worker_pool.gpus.simulated import SimulatedHolder, SimulatedProbe, parse_spec
from tests.gpus.probe_contract import ProbeContract

TRAINING = SimulatedHolder(4711, 100.0)


class TestSimulatedProbeContract(ProbeContract):
    @pytest.fixture
    def probe(self) -> SimulatedProbe:
        probe = SimulatedProbe("box", "2xA100-80GB,T4", seed=3)
        probe.occupy(uuid_of(probe), [TRAINING, SimulatedHolder(4712, 100.0, 2000)])
        return probe


def uuid_of(probe: SimulatedProbe, index: int = 0) -> str:
    return probe.read(0.0).readings[index].gpu.key.uuid


def read(probe: SimulatedProbe, at: float, index: int = 0) -> Reading:
    return probe.read(at).readings[index]


def occupied(*holders: SimulatedHolder, spec: str = "1", seed: int = 0) -> tuple[SimulatedProbe, str]:
    """A probe whose first GPU has been taken by these since time 0."""
    probe = SimulatedProbe("box", spec, seed)
    uuid = uuid_of(probe)
    probe.occupy(uuid, holders)
    return probe, uuid


def known(value: float | None) -> float:
    assert value is not None
    return value


# --- which GPUs ----------------------------------------------------------------------------------------------------


def test_models_may_be_mixed_in_any_case_and_with_spaces() -> None:
    readings = SimulatedProbe("box", " 2xa100-40GB, T4 ,1xRTX-3080").read(0).readings
    assert [(reading.gpu.name, reading.memory_total_mb) for reading in readings] == [
        ("Simulated NVIDIA A100-SXM4-40GB", 40960),
        ("Simulated NVIDIA A100-SXM4-40GB", 40960),
        ("Simulated Tesla T4", 15360),
        ("Simulated NVIDIA GeForce RTX 3080", 10240),
    ]


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "0xT4",
        "-1",
        "4x",
        "2,T4",
        "4xG80",
        "٣",
    ],
)
def test_a_spec_that_cannot_be_read_says_what_is_allowed(spec: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)It must be a number of GPUs from 1 to 1024 .*A100-80GB.*T4"):
        parse_spec(spec)


@pytest.mark.parametrize("spec", ["1024xT4,T4", "9" * 5000])
def test_there_are_at_most_1024_gpus(spec: str) -> None:
    assert len(parse_spec("1023xT4,L4")) == 1024
    with pytest.raises(ValueError, match="more than 1024 GPUs") as refused:
        parse_spec(spec)
    assert len(str(refused.value)) < 500


def test_uuids_are_well_formed_and_repeat() -> None:
    keys = [reading.gpu.key for reading in SimulatedProbe("box", "4").read(0).readings]
    assert keys == [reading.gpu.key for reading in SimulatedProbe("box", "4").read(0).readings]
    for key in keys:
        assert key.node == "box"
        assert key.uuid == f"GPU-{UUID(key.uuid.removeprefix('GPU-'))}"


# --- how they move -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_an_idle_gpu_shows_next_to_nothing(seed: int) -> None:
    probe = SimulatedProbe("box", "2", seed)
    for at in range(0, 600, 3):
        for reading in probe.read(at).readings:
            assert 0.5 < known(reading.memory_percent) < 2
            assert 0 <= known(reading.utilization_percent) <= 3
            assert 30 <= known(reading.temperature_c) <= 40
            assert 50 <= known(reading.power_draw_w) <= 72
            assert reading.processes == ()


@pytest.mark.parametrize("seed", range(5))
def test_an_occupied_gpu_is_busy_within_two_seconds_and_stays_so(seed: int) -> None:
    probe, _ = occupied(TRAINING, seed=seed)
    for at in range(2, 600, 3):
        reading = read(probe, at)
        assert 55 < known(reading.memory_percent) < 66
        assert 60 <= known(reading.utilization_percent) <= 98


# --- who is on them ------------------------------------------------------------------------------------------------


def test_each_holder_is_a_process_with_its_memory() -> None:
    probe, _ = occupied(SimulatedHolder(11, 1.5, 8000), SimulatedHolder(12, None, 20000))
    reading = read(probe, 10)
    assert [(process.id, process.memory_mb) for process in reading.processes or ()] == [
        (ProcessId(11, 1.5), 8000),
        (ProcessId(12, None), 20000),
    ]
    assert 28000 < known(reading.memory_used_mb) < 28000 + 0.02 * 81920


@pytest.mark.parametrize("memory_mb", [float("inf"), 1e300, 81920.0])
def test_they_never_hold_more_than_there_is(memory_mb: float) -> None:
    probe, _ = occupied(SimulatedHolder(11, None, memory_mb), SimulatedHolder(12, None, memory_mb))
    reading = read(probe, 10)
    assert known(reading.memory_used_mb) <= 81920
    assert sum(known(process.memory_mb) for process in reading.processes or ()) <= known(reading.memory_used_mb)


# --- they repeat ---------------------------------------------------------------------------------------------------


def looks(seed: int) -> list[tuple[Reading, ...]]:
    probe = SimulatedProbe("box", "4xA100-80GB,2xT4", seed)
    seen = [probe.read(5.0).readings]
    busy = seen[0][1].gpu.key.uuid
    probe.occupy(busy, [TRAINING, SimulatedHolder(5, 1.0, 9000)])
    seen += [probe.read(5.0 + at / 3).readings for at in range(30)]
    probe.occupy(busy, [])
    return [*seen, *(probe.read(15.0 + at / 3).readings for at in range(30))]


def test_the_same_calls_give_equal_looks() -> None:
    assert looks(seed=7) == looks(seed=7)
