"""The readings as Prometheus metrics in base units, and with DCGM's names if those are enabled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.server.authority.sampler import Sampler

MB = 1024 * 1024
LABELS = ("node", "gpu", "uuid", "name", "source")


class Gauge(NamedTuple):
    """One metric of a reading; a value of None is left out."""

    name: str
    help: str
    value: Callable[[Reading], float | None]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _free_mb(reading: Reading) -> float | None:
    if reading.memory_total_mb is None or reading.memory_used_mb is None:
        return None
    return reading.memory_total_mb - reading.memory_used_mb


OWN = (
    Gauge("gpupool_gpu_memory_total_bytes", "Memory of the GPU.", lambda r: _scaled(r.memory_total_mb, MB)),
    Gauge("gpupool_gpu_memory_used_bytes", "Memory in use.", lambda r: _scaled(r.memory_used_mb, MB)),
    Gauge("gpupool_gpu_utilization_ratio", "Utilization, 0 to 1.", lambda r: _scaled(r.utilization_percent, 0.01)),
    Gauge("gpupool_gpu_temperature_celsius", "Temperature.", lambda r: r.temperature_c),
    Gauge("gpupool_gpu_power_watts", "Power drawn.", lambda r: r.power_draw_w),
    Gauge("gpupool_gpu_power_limit_watts", "Power limit.", lambda r: r.power_limit_w),
    Gauge("gpupool_gpu_healthy", "1 if the GPU answers without an error.", lambda r: float(r.fault is None)),
)
DCGM = (
    Gauge("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", lambda r: r.utilization_percent),
    Gauge("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).", lambda r: r.memory_used_mb),
    Gauge("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", _free_mb),
    Gauge("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", lambda r: r.temperature_c),
    Gauge("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", lambda r: r.power_draw_w),
)


class SamplerCollector(Collector):
    """Reads the latest snapshot when Prometheus scrapes; it has no counters of its own."""

    def __init__(self, sampler: Sampler, *, with_dcgm_names: bool) -> None:
        self._sampler = sampler
        self._gauges = OWN + (DCGM if with_dcgm_names else ())

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        snapshot = self._sampler.snapshot
        for gauge in self._gauges:
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=LABELS)
            for reading in snapshot.readings:
                value = gauge.value(reading)
                if value is not None:
                    gpu = reading.gpu
                    family.add_metric([gpu.key.node, str(gpu.index), gpu.key.uuid, gpu.name, snapshot.source], value)
            yield family
        yield GaugeMetricFamily("gpupool_gpus", "GPUs that are shown.", len(snapshot.readings))
        yield GaugeMetricFamily("gpupool_reading_age_seconds", "Age of the last reading.", self._sampler.age_s())
        yield GaugeMetricFamily("gpupool_look_seconds", "Duration of the last sample.", self._sampler.last_sample_s)
        yield CounterMetricFamily("gpupool_looks", "Samples of the GPUs.", self._sampler.samples)
        yield CounterMetricFamily("gpupool_looks_failed", "Samples that failed.", self._sampler.failed_samples)
