"""Simulated GPUs: what they are, how they move with who is on them, and that they repeat."""

from __future__ import annotations

from itertools import pairwise
from threading import Thread
from uuid import UUID

import pytest

from gpu_worker_pool.core.model.gpu import GpuKey, ProcessId, Reading
from gpu_worker_pool.gpus.simulated import MODELS, SimulatedHolder, SimulatedProbe, parse_spec
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


def test_a_number_stands_for_that_many_a100() -> None:
    readings = SimulatedProbe("box", "8").read(0).readings
    assert [reading.gpu.name for reading in readings] == ["Simulated NVIDIA A100-SXM4-80GB"] * 8
    assert [reading.gpu.index for reading in readings] == list(range(8))
    assert {reading.memory_total_mb for reading in readings} == {81920}


def test_models_may_be_mixed_in_any_case_and_with_spaces() -> None:
    readings = SimulatedProbe("box", " 2xa100-40GB, T4 ,1xRTX-3080").read(0).readings
    assert [(reading.gpu.name, reading.memory_total_mb) for reading in readings] == [
        ("Simulated NVIDIA A100-SXM4-40GB", 40960),
        ("Simulated NVIDIA A100-SXM4-40GB", 40960),
        ("Simulated Tesla T4", 15360),
        ("Simulated NVIDIA GeForce RTX 3080", 10240),
    ]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_simulated(model: str) -> None:
    reading = read(SimulatedProbe("box", f"1x{model}"), 0)
    assert reading.gpu.name == f"Simulated {MODELS[model].name}"
    assert known(reading.power_draw_w) < known(reading.power_limit_w) == MODELS[model].power_limit_w


@pytest.mark.parametrize(
    "spec",
    [
        "",
        " ",
        ",",
        "0",
        "0xT4",
        "-1",
        "1.5",
        "x",
        "4x",
        "xT4",
        "8,8",
        "T4,",
        "2,T4",
        "4xG80",
        "1e3",
        "٣",
        "4 T4",
        "4*T4",
    ],
)
def test_a_spec_that_cannot_be_read_says_what_is_allowed(spec: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)It must be a number of GPUs from 1 to 1024 .*A100-80GB.*T4"):
        parse_spec(spec)


@pytest.mark.parametrize("spec", ["1025", "1024xT4,T4", "9" * 5000, f"{'9' * 5000}xT4"])
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


def test_uuids_differ_by_node_index_and_seed() -> None:
    def uuids(node: str, seed: int) -> set[str]:
        return {reading.gpu.key.uuid for reading in SimulatedProbe(node, "64", seed).read(0).readings}

    assert len(uuids("a", 0) | uuids("b", 0) | uuids("a", 1) | uuids("1/a", 0)) == 4 * 64


# --- how they move -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_an_idle_gpu_shows_next_to_nothing(seed: int) -> None:
    probe = SimulatedProbe("box", "2", seed)
    for at in range(0, 600, 3):
        for reading in probe.read(at).readings:
            assert 0.5 < known(reading.memory_percent) < 2
            assert 0 <= known(reading.utilization_percent) <= 3
            assert 30 <= known(reading.temperature_c) <= 40
            assert 50 <= known(reading.power_draw_w) <= 70
            assert reading.processes == ()


def test_an_idle_gpu_does_not_stand_still() -> None:
    probe = SimulatedProbe("box", "1")
    assert len({(reading.memory_used_mb, reading.power_draw_w) for reading in (read(probe, at) for at in range(9))}) > 5


@pytest.mark.parametrize("seed", range(20))
def test_an_occupied_gpu_is_busy_within_two_seconds_and_stays_so(seed: int) -> None:
    probe, _ = occupied(TRAINING, seed=seed)
    for at in range(2, 600, 3):
        reading = read(probe, at)
        assert 55 < known(reading.memory_percent) < 66
        assert 60 <= known(reading.utilization_percent) <= 98


def test_memory_and_utilization_rise_gradually() -> None:
    probe, _ = occupied(TRAINING)
    looks = [read(probe, at) for at in (0.0, 0.3, 0.6, 0.9)]
    for earlier, later in pairwise(looks):
        assert known(earlier.memory_used_mb) < known(later.memory_used_mb)
        assert known(earlier.utilization_percent) <= known(later.utilization_percent)
    assert known(looks[1].utilization_percent) < 60


def test_it_gets_warm_slowly_and_draws_power() -> None:
    probe, _ = occupied(TRAINING)
    cold, soon, late = read(probe, 0), read(probe, 2), read(probe, 120)
    assert known(cold.temperature_c) < known(soon.temperature_c) < 50
    assert 60 < known(late.temperature_c) < 90
    assert known(cold.power_draw_w) < 70
    assert 250 < known(late.power_draw_w) < known(late.power_limit_w)


@pytest.mark.parametrize("spec", ["1", "T4", "B200"])
def test_a_vacated_gpu_is_idle_a_second_later(spec: str) -> None:
    probe, uuid = occupied(SimulatedHolder(1, None, 1e9), spec=spec)
    assert known(read(probe, 100).memory_percent) > 98
    probe.occupy(uuid, [])
    after = read(probe, 101)
    assert known(after.memory_percent) < 2
    assert known(after.utilization_percent) <= 3
    assert after.processes == ()


def test_it_cools_down_slowly() -> None:
    probe, uuid = occupied(TRAINING)
    warm = known(read(probe, 120).temperature_c)
    probe.occupy(uuid, [])
    assert warm - 10 < known(read(probe, 121).temperature_c) <= warm
    assert known(read(probe, 240).temperature_c) < 40


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.1, 0.5, 1.0, 60.0])
def test_with_nobody_on_it_it_is_below_the_default_thresholds_at_once(after_s: float) -> None:
    for seed in range(20):
        probe, uuid = occupied(SimulatedHolder(1, None, 1e9), seed=seed)
        read(probe, 100)
        probe.occupy(uuid, [])
        reading = read(probe, 100 + after_s)
        assert known(reading.memory_percent) < 80
        assert known(reading.utilization_percent) < 90


def test_only_the_occupied_gpu_is_busy() -> None:
    probe = SimulatedProbe("box", "3")
    probe.occupy(uuid_of(probe, 1), [TRAINING])
    assert [known(reading.utilization_percent) > 50 for reading in probe.read(10).readings] == [False, True, False]


# --- who is on them ------------------------------------------------------------------------------------------------


def test_each_holder_is_a_process_with_its_memory() -> None:
    probe, _ = occupied(SimulatedHolder(11, 1.5, 8000), SimulatedHolder(12, None, 20000))
    reading = read(probe, 10)
    assert [(process.id, process.memory_mb) for process in reading.processes or ()] == [
        (ProcessId(11, 1.5), 8000),
        (ProcessId(12, None), 20000),
    ]
    assert 28000 < known(reading.memory_used_mb) < 28000 + 0.02 * 81920


def test_a_process_is_there_from_the_next_look_on() -> None:
    probe, _ = occupied(TRAINING)
    assert [process.id for process in read(probe, 0).processes or ()] == [ProcessId(4711, 100.0)]


def test_one_of_two_leaves_and_takes_its_memory_with_it() -> None:
    stays, leaves = SimulatedHolder(11, 1.0, 8000), SimulatedHolder(12, 1.0, 60000)
    probe, uuid = occupied(stays, leaves)
    read(probe, 10)
    probe.occupy(uuid, [stays])
    reading = read(probe, 11)
    assert [(process.id.pid, process.memory_mb) for process in reading.processes or ()] == [(11, 8000)]
    assert 8000 < known(reading.memory_used_mb) < 10000
    assert known(reading.utilization_percent) >= 60


def test_those_who_did_not_say_share_about_60_percent() -> None:
    probe, _ = occupied(SimulatedHolder(11), SimulatedHolder(12), SimulatedHolder(13))
    reading = read(probe, 10)
    assert 55 < known(reading.memory_percent) < 66
    assert len({process.memory_mb for process in reading.processes or ()}) == 1


@pytest.mark.parametrize("memory_mb", [float("inf"), 1e300, 81920.0])
def test_they_never_hold_more_than_there_is(memory_mb: float) -> None:
    probe, _ = occupied(SimulatedHolder(11, None, memory_mb), SimulatedHolder(12, None, memory_mb))
    reading = read(probe, 10)
    assert known(reading.memory_used_mb) <= 81920
    assert sum(known(process.memory_mb) for process in reading.processes or ()) <= known(reading.memory_used_mb)


@pytest.mark.parametrize("memory_mb", [float("nan"), -5.0, 0.0])
def test_a_holder_of_nothing_is_a_process_without_memory(memory_mb: float) -> None:
    probe, _ = occupied(SimulatedHolder(11, None, memory_mb))
    assert [process.memory_mb for process in read(probe, 10).processes or ()] == [0]


def test_a_process_named_twice_is_one_with_both_amounts() -> None:
    probe, _ = occupied(SimulatedHolder(11, 1.0, 3000), SimulatedHolder(11, 1.0, 4000))
    assert [(process.id.pid, process.memory_mb) for process in read(probe, 10).processes or ()] == [(11, 7000)]


def test_a_reused_pid_is_another_process() -> None:
    probe, uuid = occupied(SimulatedHolder(11, 1.0, 3000))
    read(probe, 10)
    probe.occupy(uuid, [SimulatedHolder(11, 2.0, 5000)])
    assert [(process.id.started, process.memory_mb) for process in read(probe, 10).processes or ()] == [(2.0, 0)]


def test_an_unknown_gpu_cannot_be_occupied() -> None:
    with pytest.raises(ValueError, match="no simulated GPU with the UUID 'GPU-0'"):
        SimulatedProbe("box", "1").occupy("GPU-0", [])


def test_repr_says_how_many_are_occupied() -> None:
    probe, _ = occupied(TRAINING, spec="3")
    assert repr(probe) == "<SimulatedProbe: 3 GPUs, 1 occupied>"


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


def test_another_seed_gives_other_values() -> None:
    def values(seed: int) -> list[list[object]]:
        return [[(r.memory_used_mb, r.utilization_percent, r.power_draw_w) for r in found] for found in looks(seed)]

    assert all(one != other for one, other in zip(values(7), values(8), strict=True))


def test_gpus_of_one_probe_do_not_move_in_step() -> None:
    readings = SimulatedProbe("box", "8").read(10).readings
    assert len({reading.power_draw_w for reading in readings}) > 4


def test_an_earlier_time_changes_nothing_but_the_time() -> None:
    probe, _ = occupied(TRAINING)
    now = read(probe, 50)
    before = read(probe, 20)
    assert before.at == 20
    assert (before.memory_used_mb, before.utilization_percent, before.temperature_c) == (
        now.memory_used_mb,
        now.utilization_percent,
        now.temperature_c,
    )


def test_it_may_be_occupied_from_another_thread_while_it_is_looked_at() -> None:
    probe = SimulatedProbe("box", "4")
    uuids = [reading.gpu.key.uuid for reading in probe.read(0).readings]
    crowd = [SimulatedHolder(pid, 1.0, 100) for pid in range(1, 50)]

    def come_and_go() -> None:
        for turn in range(1000):
            for uuid in uuids:
                probe.occupy(uuid, crowd[: turn % 50])

    threads = [Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    at = 0.0
    while any(thread.is_alive() for thread in threads):
        at += 0.01
        for reading in probe.read(at).readings:
            pids = [process.id.pid for process in reading.processes or ()]
            assert pids == list(range(1, len(pids) + 1))
    for thread in threads:
        thread.join()
    # All three ended with the same crowd.
    assert {len(reading.processes or ()) for reading in probe.read(at + 1).readings} == {999 % 50}


def test_keys_carry_the_node() -> None:
    key = read(SimulatedProbe("gpu-box-1", "1"), 0).gpu.key
    assert key == GpuKey("gpu-box-1", key.uuid)
