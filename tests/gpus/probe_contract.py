"""What every probe promises, as tests: a probe's own test module subclasses this and provides the fixture `probe`."""

from __future__ import annotations

from math import isfinite

from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.gpus.probe import Probe, ProbeResult


class ProbeContract:
    """Tests over the fixture `probe`: a probe that sees at least one GPU. The fixture closes it."""

    # How many, since values may change between them.
    reads = 10

    def test_a_look_is_returned_and_sees_a_gpu(self, probe: Probe) -> None:
        result = probe.read(1.0)
        assert isinstance(result, ProbeResult)
        assert isinstance(result.readings, tuple)
        assert result.readings
        assert all(isinstance(reading, Reading) for reading in result.readings)
        assert result.error is None or result.error

    def test_two_looks_show_the_same_gpus(self, probe: Probe) -> None:
        first, second = probe.read(1.0), probe.read(2.0)
        assert [reading.gpu for reading in first.readings] == [reading.gpu for reading in second.readings]

    def test_readings_carry_the_time_they_were_asked_with(self, probe: Probe) -> None:
        for at in (0.0, 12.5, 1e9):
            assert {reading.at for reading in probe.read(at).readings} == {at}

    def test_percentages_are_within_0_and_100_or_unknown(self, probe: Probe) -> None:
        for reading in self._readings(probe):
            for percent in (reading.utilization_percent, reading.memory_percent, reading.reported_memory_percent):
                assert percent is None or 0 <= percent <= 100

    def test_memory_used_is_no_more_than_the_total_or_unknown(self, probe: Probe) -> None:
        for reading in self._readings(probe):
            assert reading.memory_total_mb is None or reading.memory_total_mb > 0
            assert reading.memory_used_mb is None or reading.memory_used_mb >= 0
            if reading.memory_used_mb is not None and reading.memory_total_mb is not None:
                assert reading.memory_used_mb <= reading.memory_total_mb

    def test_power_and_temperature_are_finite_or_unknown(self, probe: Probe) -> None:
        for reading in self._readings(probe):
            assert reading.temperature_c is None or isfinite(reading.temperature_c)
            assert reading.power_draw_w is None or reading.power_draw_w >= 0
            assert reading.power_limit_w is None or reading.power_limit_w > 0

    def test_keys_are_unique_and_all_of_one_node(self, probe: Probe) -> None:
        keys = [reading.gpu.key for reading in probe.read(1.0).readings]
        assert len(set(keys)) == len(keys)
        assert len({key.node for key in keys}) == 1

    def test_indices_are_unique_and_not_negative(self, probe: Probe) -> None:
        indices = [reading.gpu.index for reading in probe.read(1.0).readings]
        assert len(set(indices)) == len(indices)
        assert min(indices) >= 0

    def test_processes_are_told_apart_and_hold_a_plausible_amount_of_memory(self, probe: Probe) -> None:
        for reading in self._readings(probe):
            processes = reading.processes or ()
            assert len({process.id for process in processes}) == len(processes)
            for process in processes:
                assert process.id.pid > 0
                assert process.memory_mb is None or process.memory_mb >= 0

    def _readings(self, probe: Probe) -> list[Reading]:
        return [reading for at in range(1, self.reads + 1) for reading in probe.read(float(at)).readings]
