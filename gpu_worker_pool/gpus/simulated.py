"""Simulated GPUs, for a demo, a test or a laptop: their readings follow what runs on them.

Everything is a function of the seed, of the times passed in and of the processes on each GPU. There is no clock and no
hidden randomness, so the same calls give the same readings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import pi, sin
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, GpuProcess, ProcessId, Reading
from gpu_worker_pool.host.processes import PROC, read_process

from .probe import ProbeResult

MAX_GPUS = 1024
DEFAULT_MODEL = "A100-80GB"


@dataclass(frozen=True, slots=True)
class GpuModel:
    name: str
    memory_mb: int
    power_limit_w: float


MODELS = {
    "A10": GpuModel("NVIDIA A10", 23028, 150),
    "A30": GpuModel("NVIDIA A30", 24576, 165),
    "A40": GpuModel("NVIDIA A40", 46068, 300),
    "A100-40GB": GpuModel("NVIDIA A100-SXM4-40GB", 40960, 400),
    "A100-80GB": GpuModel("NVIDIA A100-SXM4-80GB", 81920, 400),
    "B200": GpuModel("NVIDIA B200", 183359, 1000),
    "H100": GpuModel("NVIDIA H100 80GB HBM3", 81559, 700),
    "H200": GpuModel("NVIDIA H200", 143771, 700),
    "L4": GpuModel("NVIDIA L4", 23034, 72),
    "L40S": GpuModel("NVIDIA L40S", 46068, 350),
    "P100": GpuModel("Tesla P100-PCIE-16GB", 16384, 250),
    "RTX-3080": GpuModel("NVIDIA GeForce RTX 3080", 10240, 320),
    "RTX-3090": GpuModel("NVIDIA GeForce RTX 3090", 24576, 350),
    "RTX-4090": GpuModel("NVIDIA GeForce RTX 4090", 24564, 450),
    "RTX-5090": GpuModel("NVIDIA GeForce RTX 5090", 32607, 575),
    "RTX-A6000": GpuModel("NVIDIA RTX A6000", 49140, 300),
    "T4": GpuModel("Tesla T4", 15360, 70),
    "V100-16GB": GpuModel("Tesla V100-SXM2-16GB", 16384, 300),
    "V100-32GB": GpuModel("Tesla V100-SXM2-32GB", 32768, 300),
}


@dataclass(frozen=True, slots=True)
class SimulatedHolder:
    """A process on a simulated GPU; without `memory_mb` it takes about 60 % of the GPU."""

    pid: int
    started: float | None = None
    memory_mb: float | None = None


def parse_spec(spec: str) -> tuple[GpuModel, ...]:
    """The GPUs for `8` or `4xA100-80GB,4xT4`, in order; a ValueError says what is allowed."""
    parts = [part.strip().upper() for part in spec.split(",")]
    if len(parts) == 1 and re.fullmatch("[0-9]+", parts[0]):
        parts = [f"{parts[0]}X{DEFAULT_MODEL}"]
    models: list[GpuModel] = []
    for part in parts:
        number, model = _number_and_model(spec, part)
        if len(models) + number > MAX_GPUS:
            raise _bad_spec(spec, f"it has more than {MAX_GPUS} GPUs")
        models += [model] * number
    return tuple(models)


def _number_and_model(spec: str, part: str) -> tuple[int, GpuModel]:
    """The number and model of "4XT4"; "T4" alone is one."""
    found = re.fullmatch("([0-9]+)X(.*)", part)
    number, model = (found[1].lstrip("0"), found[2]) if found else ("1", part)
    if model not in MODELS:
        raise _bad_spec(spec, f"{part or 'nothing'!r} is not a known model, with or without a number before it")
    if not number:
        raise _bad_spec(spec, "the number of GPUs must be at least 1")
    # A longer number is a mistake, and Python does not convert a very long one.
    return (int(number) if len(number) <= 6 else MAX_GPUS + 1), MODELS[model]


class SimulatedProbe:
    """Reads simulated GPUs. Every name begins with "Simulated", so that they are not taken for hardware.

    `occupy` sets the processes on a GPU, from any thread. `outsiders` is a file that may change at any time: the processes outside
    the pool on each GPU, as in {"0": [{"pid": 1, "memory_mb": 5000, "user": "bob", "name": "train.py",
    "utilization_percent": 60}]}, by the GPU's index. A file that is missing or not of this form shows none.
    """

    source = "simulated"

    def __init__(self, node: str, spec: str, seed: int = 0, *, outsiders: str | None = None) -> None:
        self._outsiders = Path(outsiders) if outsiders else None
        self._lock = Lock()
        self._gpus = {
            gpu.identity.key.uuid: gpu
            for gpu in (_SimulatedGpu.make(node, index, model, seed) for index, model in enumerate(parse_spec(spec)))
        }

    def occupy(self, uuid: str, holders: Sequence[SimulatedHolder]) -> None:
        """Set all processes on this GPU; an empty sequence vacates it."""
        with self._lock:
            if uuid not in self._gpus:
                raise ValueError(f"there is no simulated GPU with the UUID {uuid!r}")
            self._gpus[uuid].occupy(holders)

    def read(self, at: float) -> ProbeResult:
        """Read all GPUs at that time."""
        with self._lock:
            readings = tuple(gpu.read(at) for gpu in self._gpus.values())
        return ProbeResult(readings if self._outsiders is None else _with_outsiders(readings, self._outsiders))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


# The periods of the drift of the readings. They have no common multiple for a long time.
_PERIODS_S = (7.0, 19.0, 53.0)


@dataclass(slots=True)
class _SimulatedGpu:
    """A GPU. Its processes have their memory at once, and when they leave it is free at once."""

    identity: Gpu
    model: GpuModel
    # Where the drift of each of the readings begins.
    phases: tuple[float, ...]
    wanted: dict[ProcessId, float | None] = field(default_factory=dict)

    @classmethod
    def make(cls, node: str, index: int, model: GpuModel, seed: int) -> _SimulatedGpu:
        # The seed and the index are numbers, so no node name can give two GPUs one UUID.
        identity = f"{seed}/{index}/{node}"
        uuid = f"GPU-{uuid5(NAMESPACE_URL, f'gpu-worker-pool:simulated/{identity}')}"
        gpu = Gpu(GpuKey(node, uuid), index, f"Simulated {model.name}")
        random = Random(identity)  # noqa: S311 - not for secrets, and it must repeat
        return cls(gpu, model, tuple(random.uniform(0, 2 * pi) for _ in _PERIODS_S))

    def occupy(self, holders: Sequence[SimulatedHolder]) -> None:
        wanted: dict[ProcessId, float | None] = {}
        for holder in holders:
            id_ = ProcessId(holder.pid, holder.started)
            # A process with two leases on one GPU is one process that takes both amounts.
            before, more = wanted.get(id_, 0.0), holder.memory_mb
            wanted[id_] = None if before is None or more is None else before + min(max(0.0, more), self.model.memory_mb)
        self.wanted = wanted

    def read(self, at: float) -> Reading:
        # Slow, smooth drift between -1 and 1.
        first, second, third = (
            sin(2 * pi * at / period_s + phase) for period_s, phase in zip(_PERIODS_S, self.phases, strict=True)
        )
        total_mb, limit_w = self.model.memory_mb, self.model.power_limit_w
        idle_mb = (0.01 + 0.002 * third) * total_mb
        held_mb = self._held_mb((0.6 + 0.02 * second) * total_mb, total_mb - idle_mb)
        utilization_percent = 79.0 + 19.0 * first if self.wanted else 1.5 + 1.5 * first
        busy, idle_w = utilization_percent / 100, 0.15 * min(400.0, limit_w)
        return Reading(
            self.identity,
            at,
            memory_total_mb=float(total_mb),
            memory_used_mb=float(min(total_mb, round(idle_mb + sum(held_mb.values())))),
            utilization_percent=float(round(utilization_percent)),
            temperature_c=float(round(35.0 + 45.0 * busy + 2.0 * third)),
            power_draw_w=round((idle_w + (0.95 * limit_w - idle_w) * busy) * (1 + 0.02 * second), 2),
            power_limit_w=float(limit_w),
            processes=tuple(GpuProcess(id_, float(int(mb)), "simulated") for id_, mb in held_mb.items()),
        )

    def _held_mb(self, unsaid_mb: float, room_mb: float) -> dict[ProcessId, float]:
        """The memory of each process: those without an amount share what is there for them, and all of it fits on the GPU."""
        unsaid = sum(mb is None for mb in self.wanted.values())
        held_mb = {id_: unsaid_mb / unsaid if mb is None else mb for id_, mb in self.wanted.items()}
        scale = min(1.0, room_mb / max(1.0, sum(held_mb.values())))
        return {id_: mb * scale for id_, mb in held_mb.items()}


def _process(pid: int) -> ProcessId:
    """A process as other probes name it: with its start time, if it runs on this machine."""
    seen = read_process(PROC, pid)
    return ProcessId(pid) if seen is None else seen.id


def _with_outsiders(readings: tuple[Reading, ...], file: Path) -> tuple[Reading, ...]:
    """The readings with the processes that this file puts on the GPUs."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        return tuple(_with_processes(reading, said.get(str(reading.gpu.index), ())) for reading in readings)
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return readings


def _with_processes(reading: Reading, said: Sequence[dict[str, Any]]) -> Reading:
    found = tuple(
        GpuProcess(_process(item["pid"]), item.get("memory_mb"), item.get("name"), user=item.get("user"))
        for item in said
    )
    busy_percent = sum(item.get("utilization_percent", 0.0) for item in said)
    held_mb = sum(process.memory_mb or 0.0 for process in found)
    return replace(
        reading,
        processes=(*(reading.processes or ()), *found),
        memory_used_mb=min((reading.memory_used_mb or 0.0) + held_mb, reading.memory_total_mb or 0.0),
        utilization_percent=min(max(reading.utilization_percent or 0.0, busy_percent), 100.0),
    )


def _bad_spec(spec: str, why: str) -> ValueError:
    shown = spec if len(spec) <= 80 else f"{spec[:80]}…"
    return ValueError(
        f"simulated GPUs {shown!r}: {why}. It must be a number of GPUs from 1 to {MAX_GPUS} ({DEFAULT_MODEL} each), or "
        f"models with their numbers such as '4xA100-80GB,4xT4', of {', '.join(sorted(MODELS))}"
    )
