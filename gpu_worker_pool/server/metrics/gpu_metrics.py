"""The metrics that each GPU has samples of, as text for Prometheus.

The lines are made here: prometheus_client makes each sample through several objects, which takes 100 ms for a thousand
GPUs. They are made in turns of the event loop, so that calls are answered in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from prometheus_client.utils import floatToGoString

from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.slot import memory_use
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.sampler import Sampler
from gpu_worker_pool.server.http.loop_share import LoopShare
from gpu_worker_pool.server.views.gpu_view import STATES, gpu_states

MB = 1024 * 1024
# Three for each of ten thousand GPUs.
MOST_LABELS = 32_768
# Lines that are encoded together. All lines of one metric are a megabyte: that takes milliseconds, and so does freeing them.
LINES_OF_PART = 128


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
STATE = ("gpupool_gpu_state", "1 for the state the GPU is in, as in /pool; 0 for the others.")
OUTSIDE = ("gpupool_gpu_memory_outside_bytes", "Memory in use that belongs to no lease.")


class GpuMetrics:
    """Reads the latest snapshot and the pool when Prometheus scrapes."""

    def __init__(self, sampler: Sampler, pool: Pool, *, with_dcgm_names: bool) -> None:
        self._sampler = sampler
        self._pool = pool
        self._gauges = OWN + (DCGM if with_dcgm_names else ())

    async def parts(self, loop_share: LoopShare) -> list[bytes]:
        """The text, in short parts."""
        return [*await self._readings(loop_share), *await self._slots(loop_share)]

    async def _readings(self, loop_share: LoopShare) -> list[bytes]:
        snapshot = self._sampler.snapshot
        families = {gauge: _Family(gauge.name, gauge.help) for gauge in self._gauges}
        for reading in snapshot.readings:
            gpu = reading.gpu
            labels = _labels(
                gpu=str(gpu.index), name=gpu.name, node=gpu.key.node, source=snapshot.source, uuid=gpu.key.uuid
            )
            for gauge, family in families.items():
                value = gauge.value(reading)
                if value is not None:
                    family.add(labels, value)
            await loop_share.yield_if_due()
        return _parts(families.values())

    async def _slots(self, loop_share: LoopShare) -> list[bytes]:
        """The state has a sample for each word, so that a sum counts GPUs, and a state that a GPU has left goes to 0."""
        states, outside, pool = _Family(*STATE), _Family(*OUTSIDE), self._pool
        for slot, state_now in gpu_states(pool):
            # A GPU that has not been read since the start has no index.
            index = str(slot.reading.gpu.index) if slot.reading else ""
            place, uuid = _labels(gpu=index, node=slot.key.node), _labels(uuid=slot.key.uuid)
            for state in STATES:
                states.add(f'{place},state="{state}",{uuid}', float(state == state_now))
            use = memory_use(slot, pool.state.ignored_processes)
            if use is not None and slot.reading is not None:
                outside.add(f"{place},{uuid}", use.outside_mb * MB)
            await loop_share.yield_if_due()
        return _parts((states, outside))


class _Family:
    """The lines of one metric; those before the last few are encoded."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._parts: list[bytes] = []
        self._lines = [f"# HELP {name} {text}", f"# TYPE {name} gauge"]

    def add(self, labels: str, value: float) -> None:
        self._lines.append(f"{self._name}{{{labels}}} {floatToGoString(value)}")  # type: ignore[no-untyped-call]
        if len(self._lines) >= LINES_OF_PART:
            self._encode()

    def parts(self) -> list[bytes]:
        self._encode()
        return self._parts

    def _encode(self) -> None:
        self._parts.append("\n".join((*self._lines, "")).encode())
        self._lines.clear()


def _parts(families: Iterable[_Family]) -> list[bytes]:
    return [part for family in families for part in family.parts()]


@lru_cache(maxsize=MOST_LABELS)
def _labels(**labels: str) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
