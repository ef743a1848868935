"""What `gpu-pool doctor` finds out about the GPUs of this machine."""

from __future__ import annotations

import os
import platform
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gpu_worker_pool
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.enforce.devices import driver_parameters
from gpu_worker_pool.enforce.enforcer import ADVICE_ON_RESETS
from gpu_worker_pool.enforce.plan import resets_devices
from gpu_worker_pool.gpus.choose import choose_probe
from gpu_worker_pool.gpus.probe import ProbeUnavailable
from gpu_worker_pool.host.enforcement import DENY, Enforcement, read_enforcement
from gpu_worker_pool.host.visible_devices import InstalledGpu, select_visible

from .amd import judge_amd
from .finding import Check, Finding

TRY_SIMULATED = "to try the pool without one: gpu-pool serve --simulated-gpus 4, or SIMULATED_GPUS=4"
CONTAINER = "in a container pass the GPUs in (docker run --gpus all)"


@dataclass(frozen=True, slots=True)
class Probed:
    """What the server's own probe reads here; `error` says why nothing can be read, or not all of it."""

    readings: tuple[Reading, ...] = ()
    source: str = ""
    error: str | None = None
    took_s: float = 0.0


@cache
def probe() -> Probed:
    """Read once, as a server would."""
    began = time.monotonic()
    try:
        reader = choose_probe(socket.gethostname(), None)
    except ProbeUnavailable as unavailable:
        return Probed(error=str(unavailable))
    seen = reader.read(began)
    reader.close()
    return Probed(seen.readings, reader.source, seen.error, time.monotonic() - began)


def driver_version(root: Path) -> str | None:
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


def checks() -> list[Check]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    version = (
        f"gpu-worker-pool {gpu_worker_pool.__version__}, Python {platform.python_version()} on {platform.system()}"
    )
    return [
        Check("python", lambda: [Finding("python", "ok", version)]),
        Check("gpus", lambda: judge_gpus(driver_version(Path("/")), probe())),
        Check("amdgpu", judge_amd),
        Check("enforce", lambda: judge_enforcement(read_enforcement(), driver_parameters())),
        Check("visible-devices", lambda: judge_visible_devices(visible, probe().readings)),
    ]


def judge_gpus(driver: str | None, probed: Probed) -> Iterator[Finding]:
    """Whether a server that is started here can read the GPUs, and how."""
    if sick := [f"GPU {reading.gpu.index}: {reading.fault}" for reading in probed.readings if reading.fault]:
        yield Finding("gpus", "problem", "; ".join(sick), "this GPU is never granted; the others are")
    elif probed.readings:
        models = ", ".join(dict.fromkeys(reading.gpu.name for reading in probed.readings))
        by = f"{probed.source}{f', driver {driver}' if driver else ''}"
        text = f"{count(len(probed.readings), 'GPU')}: {models} (by {by}), read in {1000 * probed.took_s:.0f} ms"
        if probed.source.startswith("nvidia-smi"):
            how = "nvidia-smi is slow: find out why NVML, libnvidia-ml.so.1, cannot be loaded"
            yield Finding("gpus", "warning", text, how)
        else:
            yield Finding("gpus", "ok", text)
    elif driver is None:
        text = f"this machine has no GPU to hand out: no driver of NVIDIA or AMD is loaded ({probed.error or 'it shows no GPU'})"
        how = f"on a GPU box install the driver of its GPUs; {CONTAINER}; {TRY_SIMULATED}"
        yield Finding("gpus", "warning", text, how)
    else:
        how = f"run nvidia-smi by hand: it says more; {CONTAINER}; {TRY_SIMULATED}"
        yield Finding("gpus", "problem", f"driver {driver}: {probed.error or 'it shows no GPU'}", how)


def judge_enforcement(found: Enforcement | None, parameters: Mapping[str, str]) -> Iterator[Finding]:
    """Whether only holders can open a GPU here, and whether the driver would undo that."""
    if found is None:
        text = "every user can open every GPU; `gpu-pool enforce` lets only its holders (docs/how-to/enforce.md)"
        yield Finding("enforce", "skipped", text)
        return
    text = f"mode {found.mode}, {count(len(found.devices), 'device')}"
    if not found.is_running:
        how = "start it again (gpu-pool enforce), or give the devices back to all (gpu-pool enforce --stop)"
        yield Finding("enforce", "problem", f"{text}; it does not run, and the devices stay as they were", how)
    elif found.mode == DENY and parameters and resets_devices(parameters):
        yield Finding("enforce", "warning", f"{text}; the NVIDIA driver undoes it", ADVICE_ON_RESETS)
    else:
        yield Finding("enforce", "ok", f"{text}, pid {found.pid}")


def judge_visible_devices(value: str | None, readings: Sequence[Reading]) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES as a server that is started here would understand it."""
    name = "visible-devices"
    if value is None:
        return
    shown = f"CUDA_VISIBLE_DEVICES={value[:60]!r}"
    visible = select_visible(value, [InstalledGpu(reading.gpu.index, reading.gpu.key.uuid) for reading in readings])
    if visible.is_filtering and not visible.indices:
        how = "a server started from here would show no GPU: unset it, or name the GPUs to show"
        yield Finding(name, "warning", f"{shown} hides all GPUs", how)
    elif not readings:
        yield Finding(name, "skipped", f"{shown}; there is no GPU that it could show or hide")
    elif visible.warnings:
        how = "correct it: CUDA ignores everything after a name that it does not know"
        yield Finding(name, "warning", "; ".join(visible.warnings), how)
    else:
        indices = ", ".join(map(str, visible.indices))
        yield Finding(name, "ok", f"{shown}: of {count(len(readings), 'GPU')} these are shown: {indices}")
