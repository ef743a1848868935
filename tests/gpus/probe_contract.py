"""What every probe promises, as tests: a probe's own test module subclasses this and provides the fixture `probe`."""

from __future__ import annotations

from math import isfinite

from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.gpus.probe import Probe


class ProbeContract:
    """Tests over the fixture `probe`: a probe that sees at least one GPU. The fixture closes it."""

    # How many, since values may change between them.
    reads = 10

    def test_each_read_shows_the_same_gpus_of_one_node_at_the_time_that_it_was_asked_with(self, probe: Probe) -> None:
        first = [reading.gpu for reading in probe.read(1.0).readings]
        assert first
        assert len({gpu.key for gpu in first}) == len({gpu.index for gpu in first}) == len(first)
        assert len({gpu.key.node for gpu in first}) == 1
        assert min(gpu.index for gpu in first) >= 0
        for at in (2.0, 12.5, 1e9):
            readings = probe.read(at).readings
            assert [reading.gpu for reading in readings] == first
            assert {reading.at for reading in readings} == {at}

    def test_every_value_is_possible_or_unknown(self, probe: Probe) -> None:
        for at in range(1, self.reads + 1):
            for reading in probe.read(float(at)).readings:
                self._check(reading)

    def _check(self, reading: Reading) -> None:
        for percent in (reading.utilization_percent, reading.memory_percent, reading.reported_memory_percent):
            assert percent is None or 0 <= percent <= 100
        total, used = reading.memory_total_mb, reading.memory_used_mb
        assert total is None or total > 0
        assert used is None or 0 <= used <= (used if total is None else total)
        assert reading.temperature_c is None or isfinite(reading.temperature_c)
        assert reading.power_draw_w is None or reading.power_draw_w >= 0
        assert reading.power_limit_w is None or reading.power_limit_w > 0
        processes = reading.processes or ()
        assert len({process.id for process in processes}) == len(processes)
        for process in processes:
            assert process.id.pid > 0
            assert process.memory_mb is None or process.memory_mb >= 0
